"""The plan of a capture: which sample lies where, and in which forward pass it runs. A pure function of its inputs."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from capture.lines import Scan, read_lines
from capture.samples import Sample, SampleRules, samples_of
from schemas.arrays import bytes_per_token
from schemas.errors import DataError
from schemas.index import PLAN_SCHEMA
from schemas.manifest import Identity, Source, Totals
from target.chat import Chat

# A shard stays open for later, shorter samples until so many others are: this bounds how far samples move.
OPEN_SHARDS = 64
SHARD_BYTES = 1 << 30
MOST_SHARD_TOKENS = 65_536
DUPLICATE = "duplicate"
# What another forward pass costs, in padded tokens: SmolLM2 on two cores takes as long for none as for 77 tokens (37 without its
# head). With 64 real conversations come to 1 to 3% padding in batches of 1,200 to 2,500 tokens.
BATCH_COST = 64
# Kinds of rows that are worth a word to the user.
ROW_KINDS = ("retokenised", "unnamed", "plain", "foreign")
# pyarrow's list offsets are 32-bit: a piece of the table must hold fewer tokens than that.
PIECE_TOKENS = 1 << 28


@dataclass(frozen=True)
class Collected:
    """All samples of the data, in order, with the number of their source; `seen` are the ids that occur.

    `first_skipped` says of each reason which row was the first; `counts` are the rows of each kind (samples.RowResult).
    """

    samples: list[Sample]
    source_of: list[int]
    sources: tuple[Source, ...]
    seen: frozenset[int]
    duplicates: int
    truncated: int
    first_skipped: dict[str, str]
    counts: Counter[str]


def collect(
    chat: Chat,
    scans: Sequence[Scan],
    rules: SampleRules,
    progress: Callable[[int, int], None],
    held: frozenset[str] = frozenset(),
) -> Collected:
    """Read, tokenise, mask and split every row; exact duplicates (same ids and mask) are kept once.

    `progress(rows done, rows in all)` is called now and then; `held` are the hashes of samples that are duplicates from the
    start. Raises BadRow, and DataError where no sample is left, unless they are duplicates of those.
    """
    samples: list[Sample] = []
    source_of: list[int] = []
    sources: list[Source] = []
    known = set(held)
    first_skipped: dict[str, str] = {}
    counts: Counter[str] = Counter()
    duplicates = done = 0
    total = sum(scan.rows for scan in scans)
    for number, scan in enumerate(scans):
        skipped: Counter[str] = Counter()
        kept = 0
        for result in samples_of(chat, read_lines(scan), rules):
            fresh = [sample for sample in result.samples if sample.tokens_sha256 not in known]
            known.update(sample.tokens_sha256 for sample in fresh)
            duplicates += len(result.samples) - len(fresh)
            counts.update(kind for kind in ROW_KINDS if getattr(result, kind))
            if fresh:
                kept += 1
                samples += fresh
                source_of += [number] * len(fresh)
            else:
                reason = result.skipped or DUPLICATE
                skipped[reason] += 1
                first_skipped.setdefault(reason, result.why)
            done += 1
            if done % 1000 == 0 or done == total:
                progress(done, total)
        sources.append(
            Source(
                path=scan.shown, sha256=scan.sha256, rows=scan.rows, kept=kept, skipped=dict(sorted(skipped.items()))
            )
        )
    if not samples and not (held and duplicates):
        raise DataError(_nothing_kept(scans, sources, first_skipped))
    ids = [np.unique(sample.input_ids) for sample in samples]
    seen = frozenset(np.unique(np.concatenate(ids)).tolist() if ids else ())
    truncated = sum(sample.truncated for sample in samples)
    return Collected(samples, source_of, tuple(sources), seen, duplicates, truncated, first_skipped, counts)


def _nothing_kept(scans: Sequence[Scan], sources: Sequence[Source], first_skipped: dict[str, str]) -> str:
    counts: Counter[str] = Counter()
    for source in sources:
        counts.update(source.skipped)
    names = [scan.shown for scan in scans]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    reasons = ", ".join(f"{reason}: {count}" for reason, count in counts.items())
    return (
        f"{shown}: none of {sum(scan.rows for scan in scans)} rows can be captured ({reasons}); the first: "
        f"{next(iter(first_skipped.values()))}; give other data or a longer --max-length"
    )


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


def build_plan(collected: Collected, shard_tokens: int, batch_tokens: int) -> tuple[pa.Table, Totals]:
    """The plan's table (PLAN_SCHEMA, sorted by offset) and what it adds up to."""
    lengths = np.array([len(sample.input_ids) for sample in collected.samples], dtype=np.int64)
    shard_of = np.array(pack(lengths.tolist(), shard_tokens), dtype=np.int64)
    order = np.argsort(shard_of, kind="stable")
    sorted_shards, sorted_lengths = shard_of[order], lengths[order]
    bounds = np.searchsorted(sorted_shards, np.arange(shard_of.max() + 2))
    offsets, batches = np.zeros_like(lengths), np.zeros(len(lengths), dtype=np.int32)
    for shard, (start, stop) in enumerate(pairwise(bounds)):
        inside = sorted_lengths[start:stop]
        offsets[start:stop] = shard * shard_tokens + np.cumsum(inside) - inside
        batches[start:stop] = assign_batches(inside, batch_tokens)
    samples = [collected.samples[i] for i in order]
    sources = [collected.source_of[i] for i in order]
    supervised = np.array([int(sample.loss_mask.sum()) for sample in samples], dtype=np.int32)
    columns = {
        "sample_id": [sample.sample_id for sample in samples],
        "row_id": [sample.row_id for sample in samples],
        "offset": offsets,
        "length": sorted_lengths.astype(np.int32),
        "supervised": supervised,
        "truncated": [sample.truncated for sample in samples],
        "split": [sample.split for sample in samples],
        "shard": sorted_shards.astype(np.int32),
        "source": np.array(sources, dtype=np.int32),
        "source_row": [sample.source_row for sample in samples],
        "tokens_sha256": [sample.tokens_sha256 for sample in samples],
        "input_ids": _lists([sample.input_ids for sample in samples], pa.int32()),
        "loss_mask": _lists([sample.loss_mask for sample in samples], pa.uint8()),
        "batch": batches,
    }
    arrays = [_column(columns[field.name], field.type) for field in PLAN_SCHEMA]
    totals = Totals(
        samples=len(samples),
        tokens=int(lengths.sum()),
        supervised=int(supervised.sum()),
        shards=int(shard_of.max()) + 1,
        val_samples=sum(sample.split == "val" for sample in samples),
    )
    return pa.table(arrays, schema=PLAN_SCHEMA), totals


def _column(values: object, kind: pa.DataType) -> pa.Array | pa.ChunkedArray:
    return values if isinstance(values, pa.ChunkedArray) else pa.array(values, type=kind)


def _lists(rows: Sequence[NDArray[np.generic]], kind: pa.DataType) -> pa.ChunkedArray:
    pieces, start = [], 0
    while start < len(rows):
        stop, tokens = start, 0
        while stop < len(rows) and (stop == start or tokens + len(rows[stop]) <= PIECE_TOKENS):
            tokens += len(rows[stop])
            stop += 1
        ends = np.cumsum([0] + [len(row) for row in rows[start:stop]]).astype(np.int32)
        pieces.append(pa.ListArray.from_arrays(pa.array(ends), pa.array(np.concatenate(rows[start:stop]), type=kind)))
        start = stop
    return pa.chunked_array(pieces, type=pa.list_(kind))


def default_shard_tokens(identity: Identity) -> int:
    """The largest power of two whose hidden bytes over all layers stay under 1 GiB, at most 65,536 tokens."""
    _, hidden_bytes = bytes_per_token(identity)
    tokens = MOST_SHARD_TOKENS
    while tokens > 1 and tokens * hidden_bytes >= SHARD_BYTES:
        tokens //= 2
    return tokens
