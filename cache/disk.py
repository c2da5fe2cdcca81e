"""Is there room for what is planned? Asked before the target is loaded, with a margin for all that is not an array's rows."""

from cache.store import Store
from schemas.arrays import array_specs, bytes_per_token
from schemas.errors import OptionError
from schemas.manifest import Identity

HEAD_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Metadata, records, tokenizer files, and what file systems keep to themselves.
SMALL_FILES_BYTES = 32 << 20


def needed_bytes(identity: Identity, shards: int, table_bytes: int) -> tuple[int, int]:
    """Bytes that `shards` shards take at most: (all, the margin among them).

    The margin is the target's head twice (a new one is written beside the old), the plan's table or the index
    (`table_bytes`), checksum, place and alignment of every chunk, and 32 MiB of small files.
    """
    target, rows = identity.target, identity.shard_tokens
    head = target.vocab_size * target.hidden_size * HEAD_ITEM_BYTES.get(identity.dtype, 4) * (1 if target.tied else 2)
    chunks = sum(rows // spec.chunk_rows for spec in array_specs(identity, 1))
    margin = 2 * head + table_bytes + shards * 84 * chunks + SMALL_FILES_BYTES
    return shards * rows * bytes_per_token(identity)[0] + margin, margin


def check_free(store: Store, needed: int, margin: int) -> None:
    """OptionError where fewer than `needed` bytes are free; a store without bounds has room for anything."""
    free = store.free_bytes()
    if free is not None and needed > free:
        raise OptionError(
            f"{store.where()} needs {needed / 1e9:.2f} GB (of which {margin / 1e9:.2f} GB margin for head, plan, index and checksums), "
            f"{free / 1e9:.2f} GB are free: free some, capture fewer layers or rows, or give another --out"
        )
