"""All samples of the data, in the order of its rows: what the index will say of them in memory, their tokens in a file."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from capture.lines import Scan, read_lines
from capture.samples import RowResult, Sample, SampleRules, samples_of
from capture.spool import TOKEN_BYTES, Spool
from schemas.errors import DataError
from schemas.index import INDEX_SCHEMA
from schemas.manifest import Source
from target.chat import Chat

DUPLICATE = "duplicate"
# Kinds of rows that are worth a word to the user.
ROW_KINDS = ("retokenised", "unnamed", "plain", "foreign")
# The index's columns that are known before the samples have a place.
COLLECTED_SCHEMA = pa.schema([field for field in INDEX_SCHEMA if field.name not in ("offset", "shard")])
# Those that a Sample holds under the same name.
OWN_COLUMNS = ("sample_id", "row_id", "truncated", "split", "source_row", "tokens_sha256")
# Rows of the index that are held as Python's objects before they become Arrow's.
BATCH_SAMPLES = 1024


class Samples(Sequence[Sample]):
    """Samples as a sequence, in memory about as large as their index: their tokens are read from the spool when asked for."""

    def __init__(self, folder: Path | None = None) -> None:
        self.spool = Spool(folder)
        self._batches: list[pa.RecordBatch] = []
        self._recent: list[tuple[Any, ...]] = []
        self._table: pa.Table | None = None
        self._starts: NDArray[np.int64] | None = None

    def append(self, sample: Sample, source: int) -> None:
        """Add a sample of the source of that number."""
        self.spool.add(sample.input_ids, sample.loss_mask)
        numbers = (len(sample.input_ids), int(sample.loss_mask.sum()), source)
        self._recent.append((*(getattr(sample, name) for name in OWN_COLUMNS), *numbers))
        self._table = self._starts = None
        if len(self._recent) == BATCH_SAMPLES:
            self._close_batch()

    def _close_batch(self) -> None:
        columns = dict(
            zip((*OWN_COLUMNS, "length", "supervised", "source"), zip(*self._recent, strict=True), strict=True)
        )
        arrays = [pa.array(columns[field.name], type=field.type) for field in COLLECTED_SCHEMA]
        self._batches.append(pa.RecordBatch.from_arrays(arrays, schema=COLLECTED_SCHEMA))
        self._recent = []

    def rows(self) -> pa.Table:
        """What is known of all samples but their tokens (COLLECTED_SCHEMA)."""
        if self._table is None:
            if self._recent:
                self._close_batch()
            self._table = pa.Table.from_batches(self._batches, schema=COLLECTED_SCHEMA)
        return self._table

    def lengths(self) -> NDArray[np.int64]:
        """How many tokens each sample has."""
        return np.asarray(self.rows()["length"].to_numpy(), dtype=np.int64)

    def starts(self) -> NDArray[np.int64]:
        """Behind how many tokens of the spool each sample begins."""
        if self._starts is None:
            lengths = self.lengths()
            self._starts = np.cumsum(lengths) - lengths
        return self._starts

    def put_in_order(self, order: NDArray[np.int64]) -> None:
        """Sample order[i] becomes number i; nothing is appended after that."""
        self._starts, self._table = self.starts()[order], self.rows().take(pa.array(order))

    def digests(self) -> Iterator[bytes]:
        """Each sample's tokens_sha256."""
        return digests_of(self.rows())

    @property
    def nbytes(self) -> int:
        """What index and tokens come to."""
        return int(self.rows().nbytes) + TOKEN_BYTES * int(self.lengths().sum())

    def __len__(self) -> int:
        return sum(len(batch) for batch in self._batches) + len(self._recent)

    def __getitem__(self, place: int) -> Sample:  # type: ignore[override]
        """One sample, with its tokens."""
        if not 0 <= place < len(self):
            raise IndexError(place)
        row = self.rows().slice(place, 1).to_pylist()[0]
        ids, mask = self.spool.take([int(self.starts()[place])], [row["length"]])
        known = {
            name: row[name] for name in ("sample_id", "row_id", "truncated", "split", "source_row", "tokens_sha256")
        }
        return Sample(input_ids=ids, loss_mask=mask, **known)


def digests_of(index: pa.Table) -> Iterator[bytes]:
    """The tokens_sha256 of an index's rows, 32 bytes each, of which a million fit where their texts would need twice as much."""
    for chunk in index["tokens_sha256"].chunks:
        for start in range(0, len(chunk), BATCH_SAMPLES):
            yield from map(bytes.fromhex, chunk.slice(start, BATCH_SAMPLES).to_pylist())


@dataclass(frozen=True)
class Collected:
    """All samples of the data, in order; `seen` are the ids that occur.

    `first_skipped` says of each reason which row was the first; `counts` are the rows of each kind (samples.RowResult).
    """

    samples: Samples
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
    held: Set[bytes] = frozenset(),
    folder: Path | None = None,
) -> Collected:
    """Read, tokenise, mask and split every row; exact duplicates (same ids and mask) are kept once.

    `progress(rows done, rows in all)` is called now and then; `held` are the tokens_sha256 (32 bytes each) of samples that are
    duplicates from the start; `folder` is where tokens are kept until they are planned. Raises BadRow, DflashError where that
    refuses, and DataError where no sample is left, unless they are duplicates of those.
    """
    gathered = Gathered(Samples(folder), set(held))
    sources: list[Source] = []
    done, total = 0, sum(scan.rows for scan in scans)
    for number, scan in enumerate(scans):
        skipped: Counter[str] = Counter()
        kept = 0
        for result in samples_of(chat, read_lines(scan), rules):
            reason = gathered.add(result, number)
            kept += reason is None
            if reason is not None:
                skipped[reason] += 1
            done += 1
            if done % 1000 == 0 or done == total:
                progress(done, total)
        sources.append(
            Source(
                path=scan.shown, sha256=scan.sha256, rows=scan.rows, kept=kept, skipped=dict(sorted(skipped.items()))
            )
        )
    if not gathered.samples and not (held and gathered.duplicates):
        raise DataError(_nothing_kept(scans, sources, gathered.first_skipped))
    return gathered.collected(tuple(sources))


class Gathered:
    """What rows come to, as they come."""

    def __init__(self, samples: Samples, known: set[bytes]) -> None:
        self.samples, self.known = samples, known
        self.first_skipped: dict[str, str] = {}
        self.counts: Counter[str] = Counter()
        self.duplicates = self.truncated = 0
        self.seen = np.zeros(1 << 16, dtype=bool)

    def add(self, result: RowResult, source: int) -> str | None:
        """Take a row's samples that are new; the reason where none is."""
        fresh = 0
        for sample in result.samples:
            digest = bytes.fromhex(sample.tokens_sha256)
            if digest in self.known:
                self.duplicates += 1
                continue
            fresh += 1
            self.keep(sample, source)
        # Only now: equal turns of one row are as many samples.
        self.known.update(bytes.fromhex(sample.tokens_sha256) for sample in result.samples)
        self.counts.update(kind for kind in ROW_KINDS if getattr(result, kind))
        if fresh:
            return None
        reason = result.skipped or DUPLICATE
        self.first_skipped.setdefault(reason, result.why)
        return reason

    def keep(self, sample: Sample, source: int) -> None:
        """Take a sample that is known to be new."""
        self.samples.append(sample, source)
        self.truncated += sample.truncated
        ids = sample.input_ids
        most = int(ids.max())
        if most >= len(self.seen):
            self.seen = np.concatenate([self.seen, np.zeros(most + 1, dtype=bool)])
        self.seen[ids] = True

    def collected(self, sources: tuple[Source, ...]) -> Collected:
        """All of it, once every row is in."""
        seen = frozenset(np.flatnonzero(self.seen).tolist())
        counts = self.counts
        return Collected(self.samples, sources, seen, self.duplicates, self.truncated, self.first_skipped, counts)


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
