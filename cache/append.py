"""More data into a finished cache: new shards behind the old ones, which nobody touches (format 1, section 3.4).

The plan of the new shards carries the manifest that the cache will have. zarr.json keeps saying what the old cache held until
all is in, so at any moment a reader sees the old cache or the new one: plan, array shapes, shards, records, index, zarr.json.
"""

import json
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cache.generations import GENERATIONS, Generation, generations_of, generations_text, pending_metadata, read_pending
from cache.layout import read_channels, read_root
from cache.plan import PLAN, Plan, Tables, write_new_plan
from cache.store import Store, open_store
from cache.write import CacheWriter
from schemas.arrays import array_specs
from schemas.errors import CacheDamaged, CacheError
from schemas.manifest import Manifest, Source, Totals


def pending_append(path: str) -> Manifest | None:
    """The manifest that an append which is not finished will give the cache at `path`, or None.

    A plan that has served, left behind by a kill in the last moment of a capture or an append, is removed.
    """
    store = open_store(path)
    try:
        plan = Plan.open(store)
    except CacheError as fault:
        raise CacheError(f"{str(fault).split(': ')[0]}: remove it, then append again") from None
    if plan is None:
        return None
    pending, held = read_pending(plan.metadata, store.where(PLAN)), read_root(store)
    if held.complete and pending in (None, held):
        store.delete(PLAN)
        return None
    return pending


def grown(held: Manifest, sources: tuple[Source, ...], totals: Totals) -> Manifest:
    """The manifest of the cache with more sources, whose own plan adds up to `totals`."""
    generations = [*generations_of(held), Generation(held.totals.shards, len(sources))]
    return held.model_copy(
        update={
            "sources": (*held.sources, *sources),
            "totals": sum_of(held.totals, totals),
            "record": held.record | {GENERATIONS: generations_text(generations)},
        }
    )


def sum_of(first: Totals, second: Totals) -> Totals:
    """The totals of two caches in one."""
    return Totals(**{name: getattr(first, name) + getattr(second, name) for name in Totals.model_fields})


def moved(plan: pa.Table, shards: int, sources: int, shard_tokens: int) -> pa.Table:
    """A plan or index that began at shard 0 and source 0, behind so many others."""
    for name, by in (("offset", shards * shard_tokens), ("shard", shards), ("source", sources)):
        place, field = plan.schema.get_field_index(name), plan.schema.field(name)
        column = pc.add(plan[name], pa.scalar(by, field.type))
        plan = plan.set_column(place, field, column)
    return plan


def begin_append(path: str, pending: Manifest, plan: Tables) -> CacheWriter:
    """Lay out the new shards: the plan (whose shards and offsets lie behind the old ones), then the arrays' new shapes.

    Raises CacheError where another append came first: only one at a time.
    """
    store = open_store(path)
    store.clean_workspaces()
    written = write_new_plan(store, plan, pending_metadata(pending))
    if written is None:
        raise CacheError(
            f"{path}: another append came first while this one was planned: let it end, then run the same command again"
        )
    grow_arrays(store, pending)
    first = generations_of(pending)[-1].first_shard
    channels = read_channels(store, pending.identity, pending.identity.layers)
    return CacheWriter(store, pending, written, first, channels)


def resume_append(path: str) -> CacheWriter | None:
    """Go on with what is being appended to the cache at `path`; None where nothing is."""
    writer = CacheWriter.resume(path)
    if writer is not None:
        grow_arrays(writer.store, writer.manifest)
    return writer


def grow_arrays(store: Store, manifest: Manifest) -> None:
    """Give every array the manifest's rows. Nothing else of its metadata changes, and nothing at all where it has them."""
    for spec in array_specs(manifest.identity, manifest.totals.shards):
        document = array_document(store, spec.name)
        if document["shape"][0] < spec.shape[0]:
            put_array_document(store, spec.name, document, spec.shape[0])


def array_document(store: Store, name: str) -> dict[str, Any]:
    """zarr.json of an array, with its shape at least. Raises CacheDamaged."""
    key = f"{name}/zarr.json"
    data = store.get(key)
    try:
        document = json.loads(data or b"")
        assert isinstance(document["shape"][0], int)
    except (ValueError, KeyError, TypeError, IndexError, AssertionError):
        raise CacheDamaged(f"{store.where(f'{name}/zarr.json')} is missing or damaged: capture again") from None
    return dict(document)


def put_array_document(store: Store, name: str, document: dict[str, Any], rows: int) -> None:
    """Write an array's zarr.json with another number of rows, as zarr-python formats it."""
    changed = document | {"shape": [rows, *document["shape"][1:]]}
    store.put(f"{name}/zarr.json", [json.dumps(changed, indent=2).encode()])
