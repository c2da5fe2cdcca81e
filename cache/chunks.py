"""Rows of an array by their byte ranges, straight into the memory where they are wanted.

With a raw codec rows that follow each other are one run of bytes but for a checksum of 4 after each chunk, so reading them is one
call, and plain Zarr, which costs a millisecond of Python a sample and array, is what the tests compare with. A chunk is verified
against its CRC-32C when it is first read, whole and while it is still in the processor's cache; later only now and then, and
where it is not, no more than the rows asked for is read.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.buffers import Buffers
from cache.checksum import crc32c
from cache.shard import expand
from cache.store import Run, Span, Store
from schemas.arrays import ArraySpec
from schemas.errors import CacheDamaged

CHECKSUM = 4
# Rows of so many bytes are read in one call: an object store then still has several to answer side by side.
RUN_BYTES = 8 << 20
# As many pieces of memory one call takes on Linux.
RUN_PIECES = 1024
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

    def is_due(self, shard: int, number: int) -> bool:
        """Whether a chunk is to be verified when it is read now."""
        visits = int(self._visits(shard)[number])
        return visits == 0 or self.spec.shuffled_zstd or (visits + number) % self.verify_every == 0

    def visited(self, shard: int, number: int) -> None:
        """Count a reading; of one that was due only when it was verified."""
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
    """One chunk, and the rows of it that are wanted: (where they go, as bytes; the chunk's first of them)."""

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
    wanted = [
        chunk for reader, out in zip(readers, outs, strict=True) for chunk in _chunks(reader, spans, bytes_of(out))
    ]
    if not wanted:
        return list(outs)
    _read_indexes(wanted)
    largest = max(reader.chunk_bytes * (2 if reader.spec.shuffled_zstd else 1) for reader in readers) + 64
    scratch = buffers.array((largest,), np.uint8).data
    checksum, ignored = memoryview(bytearray(CHECKSUM)), memoryview(bytearray(CHECKSUM))
    jobs = list(_jobs(wanted, scratch, checksum, ignored))
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


def _chunks(reader: ChunkReader, spans: Sequence[tuple[int, int]], out: memoryview) -> Iterable[_Wanted]:
    """The chunks that hold these rows, each once, in the order in which they are first needed."""
    wanted: dict[tuple[int, int], _Wanted] = {}
    done, spec, row_bytes = 0, reader.spec, reader.spec.row_bytes
    for offset, length in spans:
        end = done + length
        while done < end:
            shard, row = divmod(offset + length - (end - done), spec.shard_rows)
            number, first = divmod(row, spec.chunk_rows)
            taken = min(end - done, spec.chunk_rows - first)
            use = out[done * row_bytes : (done + taken) * row_bytes], first
            if (known := wanted.get((shard, number))) is None:
                wanted[shard, number] = _Wanted(reader, shard, number, [use])
            else:
                known.uses.append(use)
            done += taken
    return wanted.values()


def _read_indexes(wanted: Sequence[_Wanted]) -> None:
    unknown = list(
        {(id(chunk.reader), chunk.shard): chunk for chunk in wanted if chunk.shard not in chunk.reader.places}.values()
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


def _jobs(wanted: Sequence[_Wanted], scratch: memoryview, checksum: memoryview, ignored: memoryview) -> Iterator[_Job]:
    """Runs to read, in order. Rows that need no verification are joined with those before them where they follow in the object."""
    open_job: _Job | None = None
    for chunk in wanted:
        reader, shard, number = chunk.reader, chunk.shard, chunk.number
        key, (offset, size) = reader.spec.object_key(shard), reader.chunk_place(shard, number)
        if reader.is_due(shard, number):
            if open_job is not None:
                yield open_job
                open_job = None
            whole = size - CHECKSUM
            direct = not reader.spec.shuffled_zstd and len(chunk.uses) == 1 and len(chunk.uses[0][0]) == whole
            place = chunk.uses[0][0] if direct else scratch[:whole]
            yield _Job(Run(key, offset, [place, checksum], size), reader, shard, number, chunk, direct)
            continue
        reader.visited(shard, number)
        for use, first in chunk.uses:
            start = offset + first * reader.spec.row_bytes
            if open_job is not None and (joined := _joined(open_job, key, start, use, ignored)) is not None:
                open_job = joined
                continue
            if open_job is not None:
                yield open_job
            open_job = _Job(Run(key, start, [use], len(use)), reader, shard, number)
    if open_job is not None:
        yield open_job


def _joined(job: _Job, key: str, start: int, use: memoryview, ignored: memoryview) -> _Job | None:
    run = job.run
    follows = run.key == key and start == run.offset + run.size + CHECKSUM
    if not follows or run.size + len(use) > RUN_BYTES or len(run.into) + 2 > RUN_PIECES:
        return None
    run.into.extend([ignored, use])
    job.run = run._replace(size=run.size + CHECKSUM + len(use))
    return job


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
    reader.visited(shard, number)
