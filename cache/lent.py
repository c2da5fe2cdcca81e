"""Rows copied from where they lie in memory already: in a local file's pages that the system keeps.

One copy, where a read would be another; and a chunk of which only some rows are wanted is verified where it lies.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache.chunks import CHECKSUM, Due, Piece
from cache.mapped import MappedFile


class _Lent(NamedTuple):
    """A piece that lies in memory: chunks to verify (number, bytes), then what to copy (where to, from where)."""

    piece: Piece
    checks: list[tuple[int, NDArray[np.uint8]]]
    copies: list[tuple[Tensor, Tensor]]


def copy_lent(pieces: Sequence[Piece], due: Due) -> list[Piece]:
    """Copy the rows of the pieces that are lent; gives the others, to be read. What is verified here is no longer `due`.

    Raises ChunkDamaged.
    """
    files: dict[tuple[int, int], MappedFile | None] = {}
    found: list[_Lent] = []
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
            found.append(_Lent(piece, _checks(piece, data, due.get(key)), _copies(piece, data)))
    for piece, checks, copies in found:
        for number, chunk in checks:
            piece.reader.check(piece.shard, number, chunk[:-CHECKSUM], chunk[-CHECKSUM:].tobytes())
        # What was looked at is still in the processor's cache.
        for into, held in copies:
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


def _checks(piece: Piece, data: NDArray[np.uint8], due: set[int] | None) -> list[tuple[int, NDArray[np.uint8]]]:
    first, end = piece.chunks
    numbers = sorted(due.intersection(range(first, end))) if due else []
    if not due or not numbers:
        return []
    due.difference_update(numbers)
    distance, size = piece.reader.spaced[piece.shard][1], piece.reader.chunk_bytes + CHECKSUM
    starts = [(number - first) * distance for number in numbers]
    return [(number, data[start : start + size]) for number, start in zip(numbers, starts, strict=True)]


def _copies(piece: Piece, data: NDArray[np.uint8]) -> list[tuple[Tensor, Tensor]]:
    reader, (first, end) = piece.reader, piece.chunks
    row_bytes, whole, distance = reader.spec.row_bytes, reader.chunk_bytes, reader.spaced[piece.shard][1]
    # Torch copies words a tenth faster than the C library copies bytes, and whole chunks, which lie apart, in one call.
    word, width = (torch.uint8, 1) if (row_bytes | distance) % 8 else (torch.int64, 8)
    step = distance // width
    out = torch.frombuffer(piece.out, dtype=word)
    held = torch.from_numpy(data[: len(data) - len(data) % width]).view(word)
    skipped = (piece.first * row_bytes - first * whole) // width
    return [
        (
            out.as_strided((count, size), (size, 1), done),
            held.as_strided((count, size), (step, 1), chunk * step + skip),
        )
        for chunk, count, skip, done, size in _cuts(end - first, skipped, len(piece.out) // width, whole // width)
    ]


@lru_cache
def _cuts(chunks: int, skip: int, total: int, whole: int) -> list[tuple[int, int, int, int, int]]:
    """What is copied at once of so many chunks of `whole` words, `total` words from word `skip` of the first on.

    (first chunk, how many, words left out of each at its beginning, words copied before, words of each): the first chunk and the
    last, of which not all may be wanted, and those between. All layers of a cache are cut alike.
    """
    cuts, done = list[tuple[int, int, int, int, int]](), 0
    for start, stop in ((0, 1), (1, chunks - 1), (max(1, chunks - 1), chunks)):
        if start < stop:
            size = min(whole - skip, total - done)
            cuts.append((start, stop - start, skip, done, size))
            done, skip = done + (stop - start) * size, 0
    return cuts
