"""Rows of an array by their byte ranges, straight into the memory where they are wanted.

With a raw codec rows that follow each other are one run of bytes but for a checksum of 4 after each chunk, so reading them is one
call, and plain Zarr, which costs a millisecond of Python a sample and array, is what the tests compare with. A chunk is verified
against its CRC-32C when it is first read, whole and while it is still in the processor's cache; later only now and then, and
where it is not, no more than the rows asked for is read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.buffers import Buffers
from cache.checksum import crc32c
from cache.shard import expand
from cache.spans import Run, Span
from cache.store import Store
from schemas.arrays import ArraySpec
from schemas.errors import CacheDamaged

CHECKSUM = 4
# Rows of so many bytes are read in one call: an object store then still has several to answer side by side.
RUN_BYTES = 8 << 20
# As many pieces of memory one call takes on Linux.
RUN_PIECES = 1024
# What lies between rows that are read in one call goes here, unread: a checksum and what aligns the next chunk.
GAP = memoryview(bytearray(128))
# Visits are counted up to here and go on from 1: 0 is a chunk that was never verified.
MOST_VISITS = 65_535


class ChunkDamaged(CacheDamaged):
    """Rows `rows` (from, up to) of an array that cannot be read; whoever knows the samples in them adds their names."""

    def __init__(self, where: str, how: str, rows: tuple[int, int], samples: str = "") -> None:
        super().__init__(f"{where}: {how}{samples}: the cache is damaged; capture again")
        self.where, self.how, self.rows = where, how, rows


@dataclass(frozen=True)
class ChunkReader:
    """Reads one array of a cache. `places` keeps each shard's index once it was read: [chunks, 2], offset and size.

    A chunk is verified at its first reading and then at every `verify_every`-th (1: always), so that about that share of all
    chunks is verified at any time; which ones depends on what was read alone.
    """

    store: Store
    spec: ArraySpec
    verify_every: int = 1
    buffers: Buffers = field(default_factory=Buffers)
    places: dict[int, NDArray[np.uint64]] = field(default_factory=dict)
    visits: dict[int, NDArray[np.uint16]] = field(default_factory=dict)

    def rows(self, offset: int, length: int) -> NDArray[np.generic]:
        """Rows offset .. offset + length - 1. Raises CacheDamaged, naming array and shard."""
        return read_rows([self], [(offset, length)])[0]

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk's rows."""
        return self.spec.chunk_rows * self.spec.row_bytes

    def index_span(self, shard: int) -> Span:
        """Where the places of a shard's chunks lie: at the object's end."""
        size = self.spec.shard_rows // self.spec.chunk_rows * 16 + CHECKSUM
        return Span(self.spec.object_key(shard), -size, size)

    def chunk_place(self, shard: int, number: int) -> tuple[int, int]:
        """Offset and size of a chunk with its checksum. Raises ChunkDamaged for a size that it cannot have."""
        offset, size = self.places[shard][number].tolist()
        expected = self.chunk_bytes + CHECKSUM
        # What zstd cannot make smaller grows by a little.
        if size != expected if not self.spec.shuffled_zstd else not CHECKSUM < size < 2 * expected + 64:
            raise self.damaged(shard, f"chunk {number} has {size} bytes", number)
        return offset, size

    def due(self, shard: int, first: int, end: int) -> list[bool]:
        """Which of the chunks first .. end - 1 are to be verified when they are read now; the others count as read."""
        if self.verify_every == 1 or self.spec.shuffled_zstd:
            return [True] * (end - first)
        visits = self._visits(shard)[first:end]
        due = (visits == 0) | ((visits + np.arange(first, end)) % self.verify_every == 0)
        visits[~due] = visits[~due] % MOST_VISITS + 1
        return due.tolist()  # type: ignore[no-any-return]

    def verified(self, shard: int, number: int) -> None:
        """Count the reading of a chunk that was due."""
        visits = self._visits(shard)
        visits[number] = int(visits[number]) % MOST_VISITS + 1

    def _visits(self, shard: int) -> NDArray[np.uint16]:
        if shard not in self.visits:
            self.visits[shard] = np.zeros(self.spec.shard_rows // self.spec.chunk_rows, np.uint16)
        return self.visits[shard]

    def damaged(self, shard: int, how: str, number: int | None = None) -> ChunkDamaged:
        """The error that says so, of a shard or of one of its chunks."""
        first, rows = shard * self.spec.shard_rows, self.spec.shard_rows
        if number is not None:
            first, rows = first + number * self.spec.chunk_rows, self.spec.chunk_rows
        return ChunkDamaged(f"{self.store.where()}: {self.spec.name}, shard {shard}", how, (first, first + rows))


@dataclass
class _Wanted:
    """A chunk that is to be verified, and the rows of it that are wanted: (where they go, as bytes; the chunk's first of them)."""

    reader: ChunkReader
    shard: int
    number: int
    uses: list[tuple[memoryview, int]]


@dataclass
class _Job:
    """One run of bytes to read. `wanted` is the chunk to verify and hand out from there, or None where all goes straight into place."""

    run: Run
    reader: ChunkReader
    shard: int
    number: int
    wanted: _Wanted | None = None
    direct: bool = False


@dataclass(frozen=True)
class _Piece:
    """Rows `first` .. `first + count - 1` of a shard, and where they go, as bytes."""

    reader: ChunkReader
    shard: int
    first: int
    count: int
    out: memoryview


def read_rows(
    readers: Sequence[ChunkReader], spans: Sequence[tuple[int, int]], outs: Sequence[NDArray[Any]] | None = None
) -> list[NDArray[Any]]:
    """Rows of several arrays of one store: for each array those of all (offset, length), end to end.

    They go into `outs` (C order, [rows, ...] each) where these are given, else into memory of the first reader's buffers. One call
    for all of them, so that a chunk is read once and an object store is asked for many side by side. Raises CacheDamaged.
    """
    buffers = readers[0].buffers
    if outs is None:
        total = sum(length for _, length in spans)
        outs = [buffers.array((total, *reader.spec.shape[1:]), reader.spec.dtype) for reader in readers]
    found = [
        piece for reader, out in zip(readers, outs, strict=True) for piece in _pieces(reader, spans, bytes_of(out))
    ]
    if not found:
        return list(outs)
    _read_indexes(found)
    largest = max(reader.chunk_bytes * (2 if reader.spec.shuffled_zstd else 1) for reader in readers) + 64
    scratch, checksum = buffers.array((largest,), np.uint8).data, memoryview(bytearray(CHECKSUM))
    jobs = _jobs(found, scratch, checksum)
    answers = readers[0].store.fill([job.run for job in jobs])
    for job in jobs:
        try:
            read = next(answers)
        except OSError as fault:
            raise job.reader.damaged(job.shard, f"cannot be opened ({fault.strerror or fault})") from None
        if read != job.run.size:
            raise job.reader.damaged(job.shard, f"chunk {job.number} is cut short", job.number)
        if job.wanted is not None:
            _hand_out(job, job.wanted, checksum)
    return list(outs)


def bytes_of(array: NDArray[Any]) -> memoryview:
    """An array's memory (C order), as bytes."""
    assert array.flags.c_contiguous
    return array.reshape(-1).view(np.uint8).data


def _pieces(reader: ChunkReader, spans: Sequence[tuple[int, int]], out: memoryview) -> Iterator[_Piece]:
    """The rows of all spans, cut where shards end."""
    place, shard_rows, row_bytes = 0, reader.spec.shard_rows, reader.spec.row_bytes
    for offset, length in spans:
        end = offset + length
        while offset < end:
            shard, first = divmod(offset, shard_rows)
            count = min(end - offset, shard_rows - first)
            yield _Piece(reader, shard, first, count, out[place : place + count * row_bytes])
            offset, place = offset + count, place + count * row_bytes


def _read_indexes(found: Sequence[_Piece]) -> None:
    unknown = list(
        {(id(chunk.reader), chunk.shard): chunk for chunk in found if chunk.shard not in chunk.reader.places}.values()
    )
    if not unknown:
        return
    answers = unknown[0].reader.store.read([chunk.reader.index_span(chunk.shard) for chunk in unknown])
    for chunk in unknown:
        reader, shard = chunk.reader, chunk.shard
        try:
            data = next(answers)
        except OSError as fault:
            raise reader.damaged(shard, f"cannot be opened ({fault.strerror or fault})") from None
        if len(data) != reader.index_span(shard).size:
            raise reader.damaged(shard, "the index is cut short")
        if crc32c(data[:-CHECKSUM]) != int.from_bytes(data[-CHECKSUM:], "little"):
            raise reader.damaged(shard, "the index does not match its checksum")
        reader.places[shard] = np.frombuffer(data[:-CHECKSUM], dtype="<u8").reshape(-1, 2)


def _jobs(found: Sequence[_Piece], scratch: memoryview, checksum: memoryview) -> list[_Job]:
    """What to read, in order: each chunk that is due by itself and once, rows of others in runs as long as they follow each other."""
    jobs: list[_Job] = []
    wanted: dict[tuple[int, int, int], _Wanted] = {}
    for piece in found:
        reader, shard = piece.reader, piece.shard
        first, row_bytes, rows = piece.first, reader.spec.row_bytes, reader.spec.chunk_rows
        last = (first + piece.count - 1) // rows
        due = reader.due(shard, first // rows, last + 1)
        place = 0
        run: _Job | None = None
        for number in range(first // rows, last + 1):
            inside = first - number * rows
            size = (min(rows, inside + piece.count - place // row_bytes) - inside) * row_bytes
            use = piece.out[place : place + size]
            if due[number - last - 1]:
                key, run = (id(reader), shard, number), None
                if key in wanted:
                    wanted[key].uses.append((use, inside))
                else:
                    wanted[key] = chunk = _Wanted(reader, shard, number, [(use, inside)])
                    jobs.append(_Job(Run("", 0, [], 0), reader, shard, number, chunk))
            else:
                start = reader.chunk_place(shard, number)[0] + inside * row_bytes
                if run is None or not _joined(run, start, use):
                    run = _Job(Run(reader.spec.object_key(shard), start, [use], size), reader, shard, number)
                    jobs.append(run)
            first, place = first + size // row_bytes, place + size
    for job in jobs:
        if job.wanted is not None:
            _settle(job, job.wanted, scratch, checksum)
    return jobs


def _joined(job: _Job, start: int, use: memoryview) -> bool:
    """Read these rows in the same call, and what lies between; not where the call would grow too large."""
    run = job.run
    gap = start - run.offset - run.size
    if not 0 <= gap <= len(GAP) or run.size + len(use) > RUN_BYTES or len(run.into) + 2 > RUN_PIECES:
        return False
    run.into.append(GAP[:gap])
    run.into.append(use)
    job.run = Run(run.key, run.offset, run.into, run.size + gap + len(use))
    return True


def _settle(job: _Job, chunk: _Wanted, scratch: memoryview, checksum: memoryview) -> None:
    # All uses of a chunk are known only now: where there is one, of all of it, it is read straight into place.
    reader, shard = chunk.reader, chunk.shard
    offset, size = reader.chunk_place(shard, chunk.number)
    whole = size - CHECKSUM
    job.direct = not reader.spec.shuffled_zstd and len(chunk.uses) == 1 and len(chunk.uses[0][0]) == whole
    place = chunk.uses[0][0] if job.direct else scratch[:whole]
    job.run = Run(reader.spec.object_key(shard), offset, [place, checksum], size)


def _hand_out(job: _Job, chunk: _Wanted, checksum: memoryview) -> None:
    """Verify a chunk that was read whole, and copy from it what did not go straight into place."""
    reader, shard, number, data = chunk.reader, chunk.shard, chunk.number, job.run.into[0]
    if crc32c(data) != int.from_bytes(checksum, "little"):
        raise reader.damaged(shard, f"chunk {number} does not match its checksum", number)
    if not job.direct:
        if reader.spec.shuffled_zstd:
            try:
                data = bytes_of(expand(data, reader.spec.dtype, reader.chunk_bytes))
            except ValueError as fault:
                raise reader.damaged(shard, f"chunk {number} cannot be expanded ({fault})", number) from None
        for use, first in chunk.uses:
            start = first * reader.spec.row_bytes
            use[:] = data[start : start + len(use)]
    reader.verified(shard, number)
