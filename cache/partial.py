"""A cache of which only some shards are read: those that a running capture has committed so far, or those of a run begun then.

What such a reader sees is a cache of these shards alone, so that nothing in it moves while the capture goes on, and the same
shards of the finished cache are the same cache again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from cache.generations import read_earlier, way_to_mend
from cache.index import INDEX, read_index, totals_of
from cache.layout import read_root
from cache.plan import PLAN, Plan
from cache.read import Cache, cache_of, open_cache
from cache.store import Store, open_store
from cache.target_files import HEAD
from cache.write import is_committed, object_sizes, read_records
from schemas.arrays import array_specs
from schemas.errors import CacheError
from schemas.manifest import Manifest


@dataclass(frozen=True)
class Partial:
    """`cache` holds these `shards`, of `planned`; None where it is complete and all of it is read."""

    cache: Cache
    shards: tuple[int, ...] | None
    planned: int


def open_partial(path: str, layers: Sequence[int] | None = None) -> Partial:
    """Open what is committed at `path` so far; all of it where the cache is complete.

    Raises CacheError where nothing is committed yet, and what `open_cache` raises.
    """
    store = open_store(path)
    manifest = read_root(store)
    planned = manifest.totals.shards
    if manifest.complete:
        return Partial(open_cache(path, layers), None, planned)
    shards = committed_shards(store, manifest)
    if not shards or store.size(HEAD) is None:
        raise CacheError(
            f"{path}: none of {planned} shards is committed yet: wait for the capture, or "
            f"{way_to_mend(manifest)} if it has stopped"
        )
    return Partial(open_shards(path, shards, layers), shards, planned)


def committed_shards(store: Store, manifest: Manifest) -> tuple[int, ...]:
    """The shards of an unfinished cache that are in: their record is there, by the plan, and their objects have its sizes."""
    plan = Plan.open(store)
    numbers = range(manifest.totals.shards)
    specs = array_specs(manifest.identity, len(numbers))
    # Records first: a shard that is committed meanwhile then has its objects in the list.
    records = list(read_records(store, numbers))
    sizes = object_sizes(store, [spec.name for spec in specs])
    earlier = () if plan is None else read_earlier(plan.metadata)
    done = []
    for shard, record in zip(numbers, records, strict=True):
        if record is None:
            continue
        # Without a plan, or with one that makes an appended cache again, a record is taken at its word.
        made_by = record.plan_sha256 if plan is None or earlier else plan.sha256
        if is_committed(record, made_by, {spec.object_key(shard) for spec in specs}, sizes):
            done.append(shard)
    return tuple(done)


def open_shards(path: str, shards: Sequence[int], layers: Sequence[int] | None = None) -> Cache:
    """Open these shards of a cache, complete or not, as a cache of their own: index and totals are theirs.

    Raises CacheError where the cache has neither plan nor index, or not these shards; CacheDamaged as `open_cache`.
    """
    store = open_store(path)
    manifest = read_root(store)
    index = _index(store, manifest)
    index = index.filter(pa.array(np.isin(index["shard"].to_numpy(), list(shards)))).combine_chunks()
    if missing := sorted(set(shards) - set(index["shard"].to_pylist())):
        raise CacheError(
            f"{path} has no shard {missing[0]}, of {manifest.totals.shards}: give the cache that the run began on"
        )
    part = manifest.model_copy(update={"totals": totals_of(index, len(shards))})
    return cache_of(store, part, index, layers, sorted(shards))


def _index(store: Store, manifest: Manifest) -> pa.Table:
    if manifest.complete:
        return read_index(store, manifest)
    plan = Plan.open(store)
    if plan is not None:
        return plan.index()
    if store.size(INDEX) is None:
        raise CacheError(f"{store.where(PLAN)} is not written yet: wait until the capture has planned")
    # A cache whose damaged shards were forgotten: what it held is still what it will hold.
    return read_index(store, manifest)
