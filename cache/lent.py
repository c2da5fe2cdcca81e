"""Rows copied from where they lie in memory already: in a local file's pages that the system keeps.

One copy, where a read would be another; and a chunk of which only some rows are wanted is verified where it lies.
"""

import numpy as np

from cache.chunks import CHECKSUM, ChunkKey, Piece


def copy_lent(piece: Piece, due: set[ChunkKey]) -> bool:
    """Copy the rows of a piece; False where they have to be read. Chunks of it that are `due` are verified, and no longer due.

    Raises ChunkDamaged.
    """
    reader, shard, spec = piece.reader, piece.shard, piece.reader.spec
    if spec.shuffled_zstd:
        return False
    first, end = piece.chunks
    places = [reader.chunk_place(shard, number) for number in range(first, end)]
    start = min(offset for offset, _ in places)
    data = reader.store.lend(spec.object_key(shard), start, max(offset + size for offset, size in places) - start)
    if data is None:
        return False
    out, done = np.frombuffer(piece.out, np.uint8), 0
    for number, (offset, size) in zip(range(first, end), places, strict=True):
        chunk = data[offset - start : offset - start + size]
        skip = max(piece.first - number * spec.chunk_rows, 0) * spec.row_bytes
        count = min(reader.chunk_bytes - skip, len(out) - done)
        np.copyto(out[done : done + count], chunk[skip : skip + count])
        if (key := piece.key(number)) in due:
            # What was just copied is still in the processor's cache; the rest of a chunk is not copied for this.
            whole = out[done : done + count] if count == reader.chunk_bytes else chunk[:-CHECKSUM]
            reader.check(shard, number, whole, chunk[-CHECKSUM:].tobytes())
            due.remove(key)
        done += count
    return True
