"""index.parquet: one row per sample, of which a reader takes the first `totals.samples`."""

import pyarrow as pa
import pyarrow.parquet as pq

from cache.store import Store
from schemas.errors import CacheDamaged
from schemas.index import INDEX_SCHEMA, check_table
from schemas.manifest import Manifest, Totals

INDEX = "index.parquet"


def read_index(store: Store, manifest: Manifest) -> pa.Table:
    """The first `totals.samples` rows of index.parquet. Raises CacheDamaged, or CacheError for other columns."""
    data = store.get(INDEX)
    if data is None:
        raise CacheDamaged(f"{store.where(INDEX)} is missing: the cache is damaged; capture again")
    try:
        table = pq.read_table(pa.BufferReader(data))
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


def totals_of(index: pa.Table, shards: int) -> Totals:
    """What the rows of an index add up to, over so many shards."""
    return Totals(
        samples=len(index),
        tokens=int(index["length"].to_numpy().sum()),
        supervised=int(index["supervised"].to_numpy().sum()),
        shards=shards,
        val_samples=index["split"].to_pylist().count("val"),
    )
