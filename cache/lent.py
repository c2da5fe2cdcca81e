"""Rows copied from where they lie in memory already: in a local file's pages that the system keeps.

One copy, where a read would be another; and a chunk of which only some rows are wanted is verified where it lies.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache.chunks import CHECKSUM, Due, Piece
from cache.mapped import MappedFile

# So much is verified and then copied at a time: it is still in the processor's cache.
VERIFIED_BYTES = 4 << 20


class _Copy(NamedTuple):
    """Bytes of a piece and where they go; the chunks of them that are to be verified before (number, bytes)."""

    piece: Piece
    checks: list[tuple[int, NDArray[np.uint8]]]
    into: Tensor
    held: Tensor


def copy_lent(pieces: Sequence[Piece], due: Due) -> list[Piece]:
    """Copy the rows of the pieces that are lent; gives the others, to be read. What is verified here is no longer `due`.

    Raises ChunkDamaged.
    """
    files: dict[tuple[int, int], MappedFile | None] = {}
    copies: list[_Copy] = []
    others: list[Piece] = []
    # Copying flushes the processor's caches, after which Python is at a third of its speed: all of that comes first.
    for piece in pieces:
        key = piece.key
        if key not in files:
            files[key] = _file(piece)
        file = files[key]
        data = None if file is None else _lend(piece, file)
        if data is None:
            others.append(piece)
        else:
            copies.extend(_copies(piece, data, _taken(piece, due.get(key, set()))))
    for piece, checks, into, held in copies:
        for number, chunk in checks:
            piece.reader.check(piece.shard, number, chunk[:-CHECKSUM], chunk[-CHECKSUM:].tobytes())
        into.copy_(held)
    return others


def _file(piece: Piece) -> MappedFile | None:
    # One whose chunks are packed or lie unevenly is read.
    reader, shard = piece.reader, piece.shard
    return reader.store.mapped_file(reader.spec.object_key(shard)) if shard in reader.spaced else None


def _lend(piece: Piece, file: MappedFile) -> NDArray[np.uint8] | None:
    # All chunks of a piece, and what lies between them.
    first, end = piece.chunks
    start, distance = piece.reader.spaced[piece.shard]
    return file.lend(start + first * distance, (end - first - 1) * distance + piece.reader.chunk_bytes + CHECKSUM)


def _taken(piece: Piece, due: set[int]) -> list[int]:
    # Which chunks to verify here. Whatever other piece shares one comes after.
    numbers = sorted(due.intersection(range(*piece.chunks)))
    due.difference_update(numbers)
    return numbers


def _copies(piece: Piece, data: NDArray[np.uint8], numbers: list[int]) -> Iterator[_Copy]:
    reader, (first, end) = piece.reader, piece.chunks
    row_bytes, whole, distance = reader.spec.row_bytes, reader.chunk_bytes, reader.spaced[piece.shard][1]
    # Torch copies words a tenth faster than the C library copies bytes, and whole chunks, which lie apart, in one call.
    word, width = (torch.uint8, 1) if (row_bytes | distance) % 8 else (torch.int64, 8)
    step = distance // width
    out = torch.frombuffer(piece.out, dtype=word)
    held = torch.from_numpy(data[: len(data) - len(data) % width]).view(word)
    skipped = (piece.first * row_bytes - first * whole) // width
    most = max(1, VERIFIED_BYTES // whole) if len(numbers) * whole > VERIFIED_BYTES else end - first
    for chunk, count, skip, done, size in _cuts(end - first, skipped, len(piece.out) // width, whole // width, most):
        checks = [
            (number, data[(number - first) * distance :][: whole + CHECKSUM])
            for number in numbers
            if chunk <= number - first < chunk + count
        ]
        into = out.as_strided((count, size), (size, 1), done)
        yield _Copy(piece, checks, into, held.as_strided((count, size), (step, 1), chunk * step + skip))


@lru_cache
def _cuts(chunks: int, skip: int, total: int, whole: int, most: int) -> list[tuple[int, int, int, int, int]]:
    """What is copied at once of so many chunks of `whole` words, `total` words from word `skip` of the first on.

    (first chunk, how many, words left out of each at its beginning, words copied before, words of each): the first chunk and the
    last, of which not all may be wanted, and those between, at most `most` together. All layers of a cache are cut alike.
    """
    cuts, chunk, done = list[tuple[int, int, int, int, int]](), 0, 0
    while chunk < chunks:
        count = 1 if chunk in (0, chunks - 1) else min(most, chunks - 1 - chunk)
        size = min(whole - skip, total - done)
        cuts.append((chunk, count, skip, done, size))
        chunk, done, skip = chunk + count, done + count * size, 0
    return cuts
