"""index.parquet: one row per sample, of which a reader takes the first `totals.samples`."""

import hashlib
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq

from cache.store import Store
from schemas.errors import CacheDamaged
from schemas.index import INDEX_SCHEMA, check_table
from schemas.manifest import Manifest, Totals

INDEX = "index.parquet"
# What the file says of its own rows: a flipped bit in Parquet's headers changes names and splits, and goes unseen.
ROWS_SHA256 = b"dflash_rows_sha256"
BATCH_ROWS = 4096


def read_index(store: Store, manifest: Manifest) -> pa.Table:
    """The first `totals.samples` rows of index.parquet. Raises CacheDamaged, or CacheError for other columns."""
    data = store.get(INDEX)
    if data is None:
        raise CacheDamaged(f"{store.where(INDEX)} is missing: the cache is damaged; capture again")
    try:
        table = pq.read_table(pa.BufferReader(data), page_checksum_verification=True)
    except (OSError, pa.ArrowException) as fault:
        raise CacheDamaged(
            f"{store.where(INDEX)} cannot be read ({str(fault).splitlines()[0]}): capture again"
        ) from None
    table = check_table(table, INDEX_SCHEMA, store.where(INDEX))
    if len(table) < manifest.totals.samples:
        raise CacheDamaged(
            f"{store.where(INDEX)} has {len(table)} rows, the manifest says {manifest.totals.samples}: capture again"
        )
    return table.slice(0, manifest.totals.samples)


def write_index(store: Store, table: pa.Table) -> None:
    """Write index.parquet (INDEX_SCHEMA); its pages have checksums, and the file says which rows it holds."""
    buffer = io.BytesIO()
    told = table.combine_chunks().replace_schema_metadata({ROWS_SHA256: _rows_sha256(table)})
    pq.write_table(told, buffer, compression="zstd", write_page_checksum=True)
    store.put(INDEX, [buffer.getvalue()])


def index_vouched(store: Store) -> bool | None:
    """Whether the rows of index.parquet are those that were written; None where the file, or its version, does not say."""
    try:
        table = pq.read_table(pa.BufferReader(store.get(INDEX) or b""), page_checksum_verification=True)
        said = (table.schema.metadata or {}).get(ROWS_SHA256)
        return None if said is None else bool(said == _rows_sha256(table))
    except (OSError, ValueError, pa.ArrowException):
        return None


def _rows_sha256(table: pa.Table) -> bytes:
    digest = hashlib.sha256()
    for start in range(0, len(table), BATCH_ROWS):
        digest.update(json.dumps(table.slice(start, BATCH_ROWS).to_pydict()).encode())
    return digest.hexdigest().encode()


def totals_of(index: pa.Table, shards: int) -> Totals:
    """What the rows of an index add up to, over so many shards."""
    return Totals(
        samples=len(index),
        tokens=int(index["length"].to_numpy().sum()),
        supervised=int(index["supervised"].to_numpy().sum()),
        shards=shards,
        val_samples=index["split"].to_pylist().count("val"),
    )
