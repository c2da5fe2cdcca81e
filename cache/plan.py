"""plan.parquet: the work list of a capture, one row group a shard, so that a worker holds the samples of one shard alone.

On disk and in an object store alike it is read by byte ranges. A worker needs the footer and then a row group at a time, not
the whole file, which for many shards is larger than any of them; so it is not fetched.
"""

import hashlib
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cache.spans import Span
from cache.store import Store
from schemas.errors import CacheError
from schemas.index import INDEX_SCHEMA, PLAN_SCHEMA, check_table

PLAN = "plan.parquet"
# A plan to write: all of it, or piece by piece.
Tables: TypeAlias = pa.Table | Iterable[pa.Table]
BLOCK_BYTES = 8 << 20
READERS = 8


@dataclass(frozen=True)
class Plan:
    """The plan of a capture, by shard. `groups` says which row group a shard is, `lengths` how many tokens its samples have."""

    store: Store
    sha256: str
    size: int
    footer: Any
    groups: dict[int, int]
    lengths: dict[int, int]

    @classmethod
    def open(cls, store: Store) -> "Plan | None":
        """The plan in a store, or None where there is none. Raises CacheError where it cannot be read."""
        size = store.size(PLAN)
        if size is None:
            return None
        digest = hashlib.sha256()
        blocks = [Span(PLAN, start, BLOCK_BYTES) for start in range(0, size, BLOCK_BYTES)]
        try:
            for block in store.read(blocks):
                digest.update(block)
            footer = pq.read_metadata(_SpanFile(store, PLAN, size))
        except (OSError, pa.ArrowException) as fault:
            raise _unreadable(store, fault) from None
        groups, lengths = _shards_of(footer, store.where(PLAN))
        return cls(store, digest.hexdigest(), size, footer, groups, lengths)

    @property
    def metadata(self) -> Mapping[bytes, bytes]:
        """What the file says of itself, beside its columns."""
        return self.footer.metadata or {}

    @property
    def shards(self) -> list[int]:
        """The shards that are planned, in order."""
        return list(self.groups)

    @property
    def samples(self) -> int:
        """How many samples are planned."""
        return int(self.footer.num_rows)

    def tokens(self, shards: Iterable[int]) -> int:
        """How many tokens the samples of these shards have."""
        return sum(self.lengths[shard] for shard in shards)

    def shard(self, shard: int) -> pa.Table:
        """The plan's rows of one shard (PLAN_SCHEMA). Raises CacheError where they cannot be read."""
        return self._rows(self.groups[shard], PLAN_SCHEMA)

    def index(self) -> pa.Table:
        """All rows without ids, masks and batches (INDEX_SCHEMA): what index.parquet will hold."""
        with ThreadPoolExecutor(READERS) as pool:
            parts = list(pool.map(lambda group: self._rows(group, INDEX_SCHEMA), self.groups.values()))
        return pa.concat_tables(parts).combine_chunks()

    def _rows(self, group: int, schema: pa.Schema) -> pa.Table:
        try:
            file = pq.ParquetFile(
                _SpanFile(self.store, PLAN, self.size),
                metadata=self.footer,
                pre_buffer=True,
                page_checksum_verification=True,
            )
            table = file.read_row_group(group, columns=schema.names, use_threads=False)
        except (OSError, pa.ArrowException) as fault:
            raise _unreadable(self.store, fault) from None
        return check_table(table, schema, self.store.where(PLAN))


def write_plan(store: Store, plan: Tables, metadata: Mapping[bytes, bytes] | None = None) -> Plan:
    """Write a plan (PLAN_SCHEMA, sorted by shard) and open it. Its bytes are a pure function of rows and metadata.

    `plan` is one table or several, none of which begins in the middle of a shard; one is held at a time.
    """
    store.put(PLAN, _encoded(plan, metadata))
    return _opened(store)


def write_new_plan(store: Store, plan: Tables, metadata: Mapping[bytes, bytes]) -> Plan | None:
    """`write_plan` where there is no plan; None where there is one, which stays as it is."""
    written = store.put_new(PLAN, _encoded(plan, metadata))
    return _opened(store) if written else None


def plan_sha256(plan: Tables, metadata: Mapping[bytes, bytes] | None = None) -> str:
    """The hash that this plan with this metadata has once it is written."""
    digest = hashlib.sha256()
    for part in _encoded(plan, metadata):
        digest.update(part)
    return digest.hexdigest()


def _opened(store: Store) -> Plan:
    plan = Plan.open(store)
    assert plan is not None
    return plan


def _encoded(plan: Tables, metadata: Mapping[bytes, bytes] | None) -> Iterator[bytes]:
    sink, last = _Sink(), -1
    schema = PLAN_SCHEMA.with_metadata(dict(metadata)) if metadata else PLAN_SCHEMA
    with pq.ParquetWriter(sink, schema, compression="zstd", write_page_checksum=True) as writer:
        for given in (plan,) if isinstance(plan, pa.Table) else plan:
            table = check_table(given, PLAN_SCHEMA, "the plan")
            shards = table["shard"].to_numpy()
            assert len(shards) and shards[0] > last and (np.diff(shards) >= 0).all(), "by shard, and none in two tables"
            last = int(shards[-1])
            bounds = [0, *(np.flatnonzero(np.diff(shards)) + 1).tolist(), len(shards)]
            for start, stop in pairwise(bounds):
                writer.write_table(table.slice(start, stop - start).combine_chunks(), row_group_size=stop - start)
                yield from sink.drain()
    assert last >= 0, "a plan is not empty"
    yield from sink.drain()


def _shards_of(footer: Any, where: str) -> tuple[dict[int, int], dict[int, int]]:
    # All of it stands in the footer: a row group's smallest and largest shard, and how many list items it holds.
    columns = {footer.row_group(0).column(place).path_in_schema: place for place in range(footer.num_columns)}
    ids = next((place for path, place in columns.items() if path.split(".")[0] == "input_ids"), None)
    groups, lengths = {}, {}
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        statistics = group.column(columns["shard"]).statistics if "shard" in columns else None
        if ids is None or statistics is None or not statistics.has_min_max or statistics.min != statistics.max:
            raise CacheError(
                f"{where} was written by another version of the program: capture again into another folder"
            )
        groups[statistics.min], lengths[statistics.min] = number, group.column(ids).num_values
    return groups, lengths


def _unreadable(store: Store, fault: BaseException) -> CacheError:
    if isinstance(fault, OSError) and store.size(PLAN) is None:
        return CacheError(
            f"{store.where(PLAN)} is gone: another process finished or replaced this cache meanwhile; run the same command again"
        )
    return CacheError(
        f"{store.where(PLAN)} cannot be read ({str(fault).splitlines()[0]}): capture again into another folder"
    )


class _Sink(io.RawIOBase):
    """A file to write to that hands on what it was given."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.written = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.written

    def write(self, data: Any) -> int:
        self.parts.append(bytes(data))
        self.written += len(self.parts[-1])
        return len(self.parts[-1])

    def drain(self) -> list[bytes]:
        parts, self.parts = self.parts, []
        return parts


class _SpanFile(io.RawIOBase):
    """An object of a store as a file to read and seek in."""

    def __init__(self, store: Store, key: str, size: int) -> None:
        self.store, self.key, self.size, self.place = store, key, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.place = {os.SEEK_SET: 0, os.SEEK_CUR: self.place, os.SEEK_END: self.size}[whence] + offset
        return self.place

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self.size - self.place)
        size = left if size is None or size < 0 else min(size, left)
        spans = [
            Span(self.key, self.place + start, min(BLOCK_BYTES, size - start)) for start in range(0, size, BLOCK_BYTES)
        ]
        data = b"".join(self.store.read(spans))
        self.place += len(data)
        return data
