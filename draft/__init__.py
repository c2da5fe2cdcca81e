"""The small model that drafts blocks of tokens: its parts, its files, its acceptance and its decoding."""
