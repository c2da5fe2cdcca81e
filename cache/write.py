"""Writing a cache, shard by shard: what is committed stays, what is not is done again (format 1, section 3.4).

A folder becomes a cache with its zarr.json (complete: false), is ready for work with its plan.parquet, and is finished by
index.parquet and a zarr.json that says complete: true.
"""

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache.codecs import Channels, HiddenCodec
from cache.generations import earlier_metadata, generations_of, read_earlier, read_pending
from cache.index import read_index, write_index
from cache.layout import begin_root, read_channels, read_root, write_arrays, write_root
from cache.plan import PLAN, Plan, Tables, write_plan
from cache.shard import encode_shard
from cache.store import Store, open_store
from schemas.arrays import array_specs
from schemas.errors import CacheError
from schemas.manifest import Identity, Manifest, first_difference
from schemas.records import CommitRecord, record_name
from schemas.strict import parse


def existing_manifest(path: str) -> Manifest | None:
    """The manifest of the cache at `path`, or None where nothing is there yet.

    Raises CacheError where it holds something else, OptionError where nothing can be written there.
    """
    store = open_store(path)
    return None if store.vacant() else read_root(store)


def check_same(path: str, found: Manifest, identity: Identity, sources: Sequence[tuple[str, str, int]]) -> None:
    """Refuse to go on with a cache of other settings or data: CacheError names the first field that differs and both values.

    `sources` are (path, sha256, rows) of the data now asked for; a file that moved is the same data.
    """
    check_identity(path, found, identity)
    if len(sources) != len(found.sources):
        raise CacheError(
            f"{path} was captured from {len(found.sources)} data files, this command gives {len(sources)}: use the same, or another --out"
        )
    for (name, sha256, rows), held_source in zip(sources, found.sources, strict=True):
        if sha256 != held_source.sha256:
            raise CacheError(
                f"{path} was captured from {held_source.path} with sha256 {held_source.sha256[:16]}, {name} has {sha256[:16]}: "
                "the data changed; use the same, or another --out"
            )
        if rows != held_source.rows:
            raise CacheError(
                f"{path} was captured from {held_source.rows} rows of {held_source.path}, this command takes {rows}: "
                "use the same --limit, or another --out"
            )


def check_identity(path: str, found: Manifest, identity: Identity) -> None:
    """Refuse other settings than the cache's: CacheError names the first field that differs and both values."""
    if (difference := first_difference(identity, found.identity)) is not None:
        name, asked, held = difference
        raise CacheError(
            f"{path} was captured with {name} {held!r}, this command asks for {asked!r}: use the same settings, or another --out"
        )


@dataclass(frozen=True)
class CacheWriter:
    """A cache under construction. Any number of processes may commit different shards of it."""

    store: Store
    manifest: Manifest
    plan: Plan
    # Shards before this one are those of the finished cache that is appended to; 0 where all are written here.
    first_shard: int = 0
    channels: Channels = field(default_factory=dict)

    @property
    def codec(self) -> HiddenCodec:
        """How its hidden states are stored."""
        return HiddenCodec(self.manifest.identity.codec, self.channels)

    @classmethod
    def create(
        cls,
        path: str,
        manifest: Manifest,
        plan: Tables,
        earlier: Sequence[tuple[int, str]] = (),
        channels: Channels | None = None,
        vacant: bool = False,
    ) -> "CacheWriter":
        """Lay out a new cache: root, array metadata, then the plan. Nothing there may be worth keeping.

        `earlier`: (first shard, plan_sha256) of each generation, where it is an appended cache that is made again. `channels` are
        the outlier channels of each layer, for int8 and int4. `vacant`: nothing was there, so of two processes that come at
        once one is refused, with CacheError.
        """
        store, channels = open_store(path), dict(channels or {})
        store.clean_workspaces()
        if not vacant:
            write_root(store, manifest)
        elif not begin_root(store, manifest):
            raise CacheError(
                f"{path}: another capture came first while this one was planned: let it end, then run the same command again"
            )
        write_arrays(store, manifest, channels)
        written = write_plan(store, plan, earlier_metadata(earlier) if earlier else None)
        return cls(store, manifest, written, channels=channels)

    @classmethod
    def resume(cls, path: str) -> "CacheWriter | None":
        """Go on with the unfinished cache at `path` by its own plan, or with what is being appended to a finished one.

        None where there is no such plan: it was killed before the plan was written, or everything is in.
        """
        store = open_store(path)
        store.clean_workspaces()
        manifest = read_root(store)
        plan = Plan.open(store)
        if plan is None:
            return None
        pending = read_pending(plan.metadata, store.where(PLAN))
        channels = read_channels(store, manifest.identity, manifest.identity.layers)
        if pending is None:
            return None if manifest.complete else cls(store, manifest, plan, channels=channels)
        # An unfinished cache cannot be appended to: the append came before its shards were forgotten.
        if not manifest.complete or pending == manifest:
            return None
        return cls(store, pending, plan, generations_of(pending)[-1].first_shard, channels)

    def missing_shards(self) -> list[int]:
        """The shards still to do: those without a commit record, or whose objects are not what the record says."""
        shards = range(self.first_shard, self.manifest.totals.shards)
        specs = array_specs(self.manifest.identity, shards.stop)
        # Records first: a shard that another process commits meanwhile then has its objects in the list.
        records = list(read_records(self.store, shards))
        sizes = object_sizes(self.store, [spec.name for spec in specs])
        return [
            shard
            for shard, record in zip(shards, records, strict=True)
            if not is_committed(record, self._plan_of(shard), {spec.object_key(shard) for spec in specs}, sizes)
        ]

    def _plan_of(self, shard: int) -> str:
        # The hash of the plan that the shard's record names.
        made_by = [digest for first, digest in read_earlier(self.plan.metadata) if first <= shard]
        return made_by[-1] if made_by else self.plan.sha256

    def commit_shard(self, shard: int, arrays: Mapping[str, NDArray[np.generic]]) -> int:
        """Write every array's object of one shard, each [shard_tokens, ...], then the commit record. Returns the bytes written."""
        rows = self.manifest.identity.shard_tokens
        specs = array_specs(self.manifest.identity, self.manifest.totals.shards)
        assert set(arrays) == {spec.name for spec in specs}, sorted(set(arrays) ^ {spec.name for spec in specs})
        objects = {}
        for spec in specs:
            array = arrays[spec.name]
            assert array.shape == (rows, *spec.shape[1:]) and array.dtype == np.dtype(spec.dtype), (
                spec,
                array.shape,
                array.dtype,
            )
            key = spec.object_key(shard)
            objects[key] = self.store.put(key, encode_shard(array, spec.chunk_rows, spec.shuffled_zstd))
        record = CommitRecord(
            shard=shard, rows=(shard * rows, (shard + 1) * rows), plan_sha256=self._plan_of(shard), objects=objects
        )
        self.store.put(record_name(shard), [record.model_dump_json(indent=1).encode()])
        return sum(item.bytes for item in objects.values())

    def put_file(self, key: str, data: bytes) -> None:
        """Write one of the target's files, such as "target/config.json"."""
        self.store.put(key, [data])

    def finish(self) -> Manifest:
        """Write the index, then the manifest that says complete; the plan has served. Every shard must be in.

        Raises CacheError where another process wrote other shards meanwhile, or changed what is appended to.
        """
        complete = self.manifest.model_copy(update={"complete": True})
        held = read_root(self.store)
        if held == complete:  # another process did the same and was faster
            return complete
        if missing := self.missing_shards():
            raise CacheError(
                f"{self.store.where()}: shard {missing[0]} was changed by another process meanwhile: let it end, then run the same "
                "command again"
            )
        base: list[pa.Table] = []
        if self.first_shard:
            self._check_base(held)
            base = [read_index(self.store, held)]
        write_index(self.store, pa.concat_tables([*base, self.plan.index()]))
        write_root(self.store, complete)
        self.store.delete(PLAN)
        self.store.clean_workspaces()
        return complete

    def _check_base(self, held: Manifest) -> None:
        # What was appended to must be what it was when the append was planned, and the plan still this one.
        plan = Plan.open(self.store)
        same_plan = plan is not None and plan.sha256 == self.plan.sha256
        if not same_plan or not held.complete or held.totals.shards != self.first_shard:
            raise CacheError(
                f"{self.store.where()} changed while it was appended to: the new shards are not in; run the same command again"
            )


def read_record(store: Store, shard: int) -> CommitRecord | None:
    """The commit record of a shard, or None where it was not committed; CacheError where the record is malformed."""
    return next(read_records(store, [shard]))


def read_records(store: Store, shards: Sequence[int]) -> Iterator[CommitRecord | None]:
    """`read_record` of each shard, in order."""
    keys = [record_name(shard) for shard in shards]
    for key, data in zip(keys, store.get_each(keys), strict=True):
        yield parse_record(store.where(key), data)


def parse_record(where: str, data: bytes | None) -> CommitRecord | None:
    """A commit record from its bytes; None where there are none. Raises CacheError where it is malformed."""
    if data is None:
        return None
    try:
        return parse(CommitRecord, json.loads(data), where, CacheError)
    except ValueError as fault:
        raise CacheError(f"{where} is not JSON ({fault}): the cache is damaged; capture again") from None


def object_sizes(store: Store, arrays: Sequence[str]) -> dict[str, int]:
    """The size of every object of these arrays that is there, by its key."""
    return {key: size for name in arrays for key, size in store.sizes(name).items()}


def is_committed(record: CommitRecord | None, plan_sha256: str, keys: Set[str], sizes: Mapping[str, int]) -> bool:
    """Whether a shard's record is of that plan and of these objects, and each of them is there at its size."""
    if record is None or record.plan_sha256 != plan_sha256 or record.objects.keys() != keys:
        return False
    return all(sizes.get(key) == record.objects[key].bytes for key in keys)
