"""The plan of a capture: which sample lies where, and in which forward pass it runs. A pure function of its inputs."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache.append import moved
from cache.index import totals_of
from capture.collect import Collected, Samples
from schemas.arrays import bytes_per_token
from schemas.index import PLAN_SCHEMA
from schemas.manifest import Identity, Totals

# A shard stays open for later, shorter samples until so many others are: this bounds how far samples move.
OPEN_SHARDS = 64
SHARD_BYTES = 1 << 30
MOST_SHARD_TOKENS = 65_536
# What another forward pass costs, in padded tokens: SmolLM2's layers take as long for none as for 37 tokens on two cores. With 40
# real conversations come to 1 to 3% padding in batches of some 1,200 tokens; more would be few and large ones.
BATCH_COST = 40


def pack(lengths: Sequence[int], shard_tokens: int, open_shards: int = OPEN_SHARDS) -> list[int]:
    """The shard of each sample, numbered from 0 as they are begun; no shard holds more than `shard_tokens`.

    Best fit, online: each sample goes to the fullest open shard that has room, else begins one; of more than
    `open_shards` the fullest closes.
    """
    room: list[tuple[int, int]] = []
    shard_of: list[int] = []
    shards = 0
    for length in lengths:
        assert length <= shard_tokens
        place = bisect_left(room, (length, -1))
        if place < len(room):
            left, shard = room.pop(place)
        else:
            left, shard = shard_tokens, shards
            shards += 1
        shard_of.append(shard)
        if left > length:
            insort(room, (left - length, shard))
        if len(room) > open_shards:
            room.pop(0)
    return shard_of


def assign_batches(lengths: NDArray[np.int64], batch_tokens: int) -> NDArray[np.int32]:
    """The forward pass of each sample of a shard, numbered from 0, longest first; samples x longest <= `batch_tokens`.

    A sample longer than that runs alone. Of all ways to cut the samples, sorted by length, into batches it is the one with
    the least padding, where a batch more counts as BATCH_COST tokens of padding. Example: lengths 100, 99, 20, 19 run as
    two batches (2 padded rows), not as one (162).
    """
    order = np.argsort(-lengths, kind="stable")
    longest_first = lengths[order]
    count = len(lengths)
    # cost[n]: the least for the n longest; begin[n]: where the last batch of that begins.
    cost, begin = np.full(count + 1, np.iinfo(np.int64).max), np.zeros(count + 1, dtype=np.int64)
    cost[0] = 0
    for first, longest in enumerate(longest_first.tolist()):
        most = min(count - first, max(1, batch_tokens // longest))
        candidates = cost[first] + BATCH_COST + np.arange(1, most + 1) * longest
        ends = slice(first + 1, first + most + 1)
        better = candidates < cost[ends]
        cost[ends][better], begin[ends][better] = candidates[better], first
    starts, place = [], count
    while place:
        place = int(begin[place])
        starts.append(place)
    batch_of = np.zeros(count, dtype=np.int32)
    batch_of[order] = np.searchsorted(np.array(starts[::-1]), np.arange(count), side="right") - 1
    return batch_of


class Shards(Protocol):
    """A plan's rows: tables (PLAN_SCHEMA) in order, a shard's each, made when they are reached, any number of times."""

    def __iter__(self) -> Iterator[pa.Table]: ...

    @property
    def nbytes(self) -> int:
        """What they come to in memory."""


@dataclass(frozen=True)
class Planned:
    """Where samples lie, by shard: shard s holds `places[bounds[s]:bounds[s + 1]]`, places among the samples as they were read.

    `offsets` and `batches` are in the order of `places`. Shards begin behind `first_shard` others, sources behind `first_source`.
    """

    samples: Samples
    shard_tokens: int
    places: NDArray[np.int64]
    bounds: NDArray[np.int64]
    offsets: NDArray[np.int64]
    batches: NDArray[np.int32]
    first_shard: int = 0
    first_source: int = 0

    @property
    def nbytes(self) -> int:
        """What the plan's rows come to in memory."""
        own = (self.places, self.bounds, self.offsets, self.batches)
        return self.samples.nbytes + sum(array.nbytes for array in own)

    def __iter__(self) -> Iterator[pa.Table]:
        index, lengths, starts = self.samples.rows(), self.samples.lengths(), self.samples.starts()
        for shard, (first, last) in enumerate(pairwise(self.bounds.tolist())):
            inside = slice(first, last)
            places = self.places[inside]
            # A shard's samples lie near each other: to take them from all would cost as much as all, every time.
            near = index.slice(places[0], places[-1] - places[0] + 1).combine_chunks()
            rows = near.take(pa.array(places - places[0]))
            columns = {name: rows[name] for name in rows.column_names} | {
                "offset": self.offsets[inside],
                "shard": np.full(last - first, shard, dtype=np.int32),
                "batch": self.batches[inside],
            }
            ends = np.concatenate([[0], np.cumsum(lengths[places])]).astype(np.int32)
            tokens = self.samples.spool.take(starts[places].tolist(), lengths[places].tolist())
            for name, values in zip(("input_ids", "loss_mask"), tokens, strict=True):
                columns[name] = pa.ListArray.from_arrays(pa.array(ends), pa.array(values))
            arrays = [_column(columns[field.name], field.type) for field in PLAN_SCHEMA]
            table = pa.table(arrays, schema=PLAN_SCHEMA)
            yield moved(table, self.first_shard, self.first_source, self.shard_tokens)

    def behind(self, shards: int, sources: int) -> "Planned":
        """The same behind so many shards and sources of others."""
        return replace(self, first_shard=shards, first_source=sources)


@dataclass(frozen=True)
class Joined:
    """Several plans as one, in order."""

    parts: Sequence[Shards]

    @property
    def nbytes(self) -> int:
        """What all rows come to in memory."""
        return sum(part.nbytes for part in self.parts)

    def __iter__(self) -> Iterator[pa.Table]:
        return chain.from_iterable(self.parts)


def build_plan(collected: Collected, shard_tokens: int, batch_tokens: int) -> tuple[Planned, Totals]:
    """The plan, sorted by offset, and what it adds up to."""
    samples = collected.samples
    lengths = samples.lengths()
    shard_of = np.array(pack(samples.rows()["length"].to_pylist(), shard_tokens), dtype=np.int64)
    order = np.argsort(shard_of, kind="stable")
    shards = int(shard_of.max()) + 1
    bounds = np.searchsorted(shard_of[order], np.arange(shards + 1))
    offsets, batches = np.zeros_like(lengths), np.zeros(len(lengths), dtype=np.int32)
    for shard, (start, stop) in enumerate(pairwise(bounds)):
        inside = lengths[order[start:stop]]
        offsets[start:stop] = shard * shard_tokens + np.cumsum(inside) - inside
        batches[start:stop] = assign_batches(inside, batch_tokens)
    totals = totals_of(samples.rows(), shards)
    return Planned(samples, shard_tokens, order, bounds, offsets, batches), totals


def _column(values: object, kind: pa.DataType) -> pa.Array | pa.ChunkedArray:
    return values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values, type=kind)


def default_shard_tokens(identity: Identity) -> int:
    """The largest power of two whose hidden bytes over all layers stay under 1 GiB, at most 65,536 tokens."""
    _, hidden_bytes = bytes_per_token(identity)
    tokens = MOST_SHARD_TOKENS
    while tokens > 1 and tokens * hidden_bytes >= SHARD_BYTES:
        tokens //= 2
    return tokens
