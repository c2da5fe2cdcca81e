"""Stage two: stream, packed batch, anchors, objective, optimizer, checkpoint. Reads a cache, opens no target."""
