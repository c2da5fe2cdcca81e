"""Writing a cache, shard by shard: what is committed stays, what is not is done again (format 1, section 3.4).

A folder becomes a cache with its zarr.json (complete: false), is ready for work with its plan.parquet, and is finished by
index.parquet and a zarr.json that says complete: true.
"""

import hashlib
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from cache.layout import read_root, write_arrays, write_root
from cache.shard import encode_shard
from cache.store import LocalStore, check_place
from schemas.arrays import array_specs
from schemas.errors import CacheError
from schemas.index import INDEX_SCHEMA, PLAN_SCHEMA, check_table
from schemas.manifest import Identity, Manifest, first_difference
from schemas.records import CommitRecord, record_name
from schemas.strict import parse

PLAN = "plan.parquet"
INDEX = "index.parquet"


def existing_manifest(path: str) -> Manifest | None:
    """The manifest of the cache at `path`, or None where nothing is there yet.

    Raises CacheError where it holds something else, OptionError where nothing can be written there.
    """
    folder = Path(path)
    if not os.path.exists(folder) or (folder.is_dir() and not any(folder.iterdir())):
        check_place(path)
        return None
    if not folder.is_dir():
        raise CacheError(f"--out {path} is a file: give a new folder, or one that a capture began")
    if not (folder / "zarr.json").exists():
        if all(entry.name.startswith(".tmp-") for entry in folder.iterdir()):
            return None
        raise CacheError(
            f"--out {path} holds something else ({sorted(e.name for e in folder.iterdir())[0]!r}): give a new or empty folder"
        )
    return read_root(LocalStore(folder))


def check_same(path: str, found: Manifest, identity: Identity, sources: Sequence[tuple[str, str, int]]) -> None:
    """Refuse to go on with a cache of other settings or data: CacheError names the first field that differs and both values.

    `sources` are (path, sha256, rows) of the data now asked for; a file that moved is the same data.
    """
    if (difference := first_difference(identity, found.identity)) is not None:
        name, asked, held = difference
        raise CacheError(
            f"{path} was captured with {name} {held!r}, this command asks for {asked!r}: use the same settings, or another --out"
        )
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


@dataclass(frozen=True)
class CacheWriter:
    """A cache under construction. Any number of processes may commit different shards of it."""

    store: LocalStore
    manifest: Manifest
    plan: pa.Table
    plan_sha256: str

    @classmethod
    def create(cls, path: str, manifest: Manifest, plan: pa.Table) -> "CacheWriter":
        """Lay out a new cache: root, array metadata, then the plan. Nothing there may be worth keeping."""
        store = LocalStore(Path(path))
        store.clean_workspaces()
        write_root(store, manifest)
        write_arrays(store, manifest)
        buffer = io.BytesIO()
        pq.write_table(check_table(plan, PLAN_SCHEMA, "the plan"), buffer, compression="zstd")
        store.put(PLAN, [buffer.getvalue()])
        return cls(store, manifest, plan, hashlib.sha256(buffer.getvalue()).hexdigest())

    @classmethod
    def resume(cls, path: str) -> "CacheWriter | None":
        """Go on with the incomplete cache at `path`, by its own plan; None where it was killed before its plan was written."""
        store = LocalStore(Path(path))
        store.clean_workspaces()
        manifest = read_root(store)
        data = store.get(PLAN)
        if data is None:
            return None
        try:
            table = pq.read_table(io.BytesIO(data))
        except pa.ArrowException as fault:
            raise CacheError(
                f"{path}/{PLAN} cannot be read ({str(fault).splitlines()[0]}): capture again into another folder"
            ) from None
        plan = check_table(table, PLAN_SCHEMA, f"{path}/{PLAN}")
        return cls(store, manifest, plan, hashlib.sha256(data).hexdigest())

    def missing_shards(self) -> list[int]:
        """The shards still to do: those without a commit record, or whose objects are not what the record says."""
        specs = array_specs(self.manifest.identity, self.manifest.totals.shards)
        return [
            shard
            for shard in range(self.manifest.totals.shards)
            if not _is_committed(self.store, shard, self.plan_sha256, [spec.object_key(shard) for spec in specs])
        ]

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
            objects[key] = self.store.put(key, encode_shard(array, spec.chunk_rows))
        record = CommitRecord(
            shard=shard, rows=(shard * rows, (shard + 1) * rows), plan_sha256=self.plan_sha256, objects=objects
        )
        self.store.put(record_name(shard), [record.model_dump_json(indent=1).encode()])
        return sum(item.bytes for item in objects.values())

    def put_file(self, key: str, data: bytes) -> None:
        """Write one of the target's files, such as "target/config.json"."""
        self.store.put(key, [data])

    def finish(self) -> Manifest:
        """Write the index, then the manifest that says complete; the plan has served. Every shard must be in."""
        assert not self.missing_shards()
        buffer = io.BytesIO()
        pq.write_table(self.plan.select(INDEX_SCHEMA.names), buffer, compression="zstd")
        self.store.put(INDEX, [buffer.getvalue()])
        complete = self.manifest.model_copy(update={"complete": True})
        write_root(self.store, complete)
        self.store.delete(PLAN)
        self.store.clean_workspaces()
        return complete


def read_record(store: LocalStore, shard: int) -> CommitRecord | None:
    """The commit record of a shard, or None where it was not committed; CacheError where the record is malformed."""
    data = store.get(record_name(shard))
    if data is None:
        return None
    try:
        return parse(CommitRecord, json.loads(data), f"{store.root}/{record_name(shard)}", CacheError)
    except ValueError as fault:
        raise CacheError(
            f"{store.root}/{record_name(shard)} is not JSON ({fault}): the cache is damaged; capture again"
        ) from None


def _is_committed(store: LocalStore, shard: int, plan_sha256: str, keys: Sequence[str]) -> bool:
    record = read_record(store, shard)
    if record is None or record.plan_sha256 != plan_sha256 or set(record.objects) != set(keys):
        return False
    return all(store.size(key) == record.objects[key].bytes for key in keys)
