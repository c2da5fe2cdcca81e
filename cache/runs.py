"""Rows read by their byte ranges, straight into the memory where they are wanted.

With a raw codec rows that follow each other are one run of bytes but for a checksum of 4 after each chunk, so reading them is one
call. A chunk that is to be verified is read whole, and looked at while it is still in the processor's cache; of others no more
than the rows asked for is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cache.chunks import CHECKSUM, ChunkReader, Due, Piece, bytes_of
from cache.shard import expand
from cache.spans import Run

# Rows of so many bytes are read in one call: an object store then still has several to answer side by side.
RUN_BYTES = 8 << 20
# As many pieces of memory one call takes on Linux.
RUN_PIECES = 1024
# What lies between rows that are read in one call goes here, unread: a checksum and what aligns the next chunk.
GAP = memoryview(bytearray(128))


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


def read_runs(found: Sequence[Piece], due: Due) -> None:
    """Read pieces of arrays of one store, verifying those of their chunks that are due. Raises ChunkDamaged."""
    readers = [piece.reader for piece in found]
    largest = max(reader.chunk_bytes * (2 if reader.spec.shuffled_zstd else 1) for reader in readers) + 64
    scratch, checksum = readers[0].buffers.array((largest,), np.uint8).data, memoryview(bytearray(CHECKSUM))
    jobs = _jobs(found, due, scratch, checksum)
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


def _jobs(found: Sequence[Piece], due: Due, scratch: memoryview, checksum: memoryview) -> list[_Job]:
    """What to read, in order: each chunk that is due by itself and once, rows of others in runs as long as they follow each other."""
    jobs: list[_Job] = []
    wanted: dict[tuple[tuple[int, int], int], _Wanted] = {}
    for piece in found:
        reader, shard, checked = piece.reader, piece.shard, due.get(piece.key, ())
        row_bytes, rows = reader.spec.row_bytes, reader.spec.chunk_rows
        place = 0
        run: _Job | None = None
        for number in range(*piece.chunks):
            inside = max(piece.first - number * rows, 0)
            size = min((rows - inside) * row_bytes, len(piece.out) - place)
            use = piece.out[place : place + size]
            if number in checked:
                run, key = None, (piece.key, number)
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
            place += size
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
    reader.check(shard, number, data, checksum)
    if not job.direct:
        if reader.spec.shuffled_zstd:
            try:
                data = bytes_of(expand(data, reader.spec.dtype, reader.chunk_bytes))
            except ValueError as fault:
                raise reader.damaged(shard, f"chunk {number} cannot be expanded ({fault})", number) from None
        for use, first in chunk.uses:
            start = first * reader.spec.row_bytes
            use[:] = data[start : start + len(use)]
