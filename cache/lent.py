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


class _Copy(NamedTuple):
    """Bytes of some chunks and where they go; `check` is the one chunk that they are of, where it is to be verified before."""

    into: Tensor
    held: Tensor
    check: tuple[Piece, int, NDArray[np.uint8]] | None


def copy_lent(pieces: Sequence[Piece], due: Due) -> list[Piece]:
    """Copy the rows of the pieces that are lent; gives the others, to be read. What is verified here is no longer `due`.

    Raises ChunkDamaged.
    """
    copies: list[_Copy] = []
    others: list[Piece] = []
    # Copying flushes the processor's caches, after which Python is at a third of its speed: all of that comes first.
    for piece in pieces:
        data = _lent(piece)
        if data is None:
            others.append(piece)
        else:
            copies.extend(_copies(piece, data, due))
    for into, held, check in copies:
        if check is not None:
            # What was looked at is still in the processor's cache when it is copied.
            piece, number, chunk = check
            piece.reader.check(piece.shard, number, chunk[:-CHECKSUM], chunk[-CHECKSUM:].tobytes())
        into.copy_(held)
    return others


def _lent(piece: Piece) -> NDArray[np.uint8] | None:
    # All chunks of a piece, and what lies between them.
    reader, shard, (first, end) = piece.reader, piece.shard, piece.chunks
    if shard not in reader.spaced:
        return None
    start, distance = reader.spaced[shard]
    size = (end - first - 1) * distance + reader.chunk_bytes + CHECKSUM
    return reader.store.lend(reader.spec.object_key(shard), start + first * distance, size)


def _copies(piece: Piece, data: NDArray[np.uint8], due: Due) -> Iterator[_Copy]:
    reader, (first, end) = piece.reader, piece.chunks
    row_bytes, whole, distance = reader.spec.row_bytes, reader.chunk_bytes, reader.spaced[piece.shard][1]
    numbers = due[piece.key].intersection(range(first, end)) if piece.key in due else set[int]()
    # Torch copies words a tenth faster than the C library copies bytes, and whole chunks, which lie apart, in one call.
    word, width = (torch.uint8, 1) if (row_bytes | distance) % 8 else (torch.int64, 8)
    step = distance // width
    out = torch.frombuffer(piece.out, dtype=word)
    held = torch.from_numpy(data[: len(data) - len(data) % width]).view(word)
    checked = tuple(sorted(number - first for number in numbers))
    place = (piece.first * row_bytes - first * whole) // width
    for chunk, count, skip, done, size in _cuts(end - first, place, len(out), whole // width, checked):
        check, shape = None, (count, size)
        if chunk in checked:
            at = chunk * distance
            check = piece, first + chunk, data[at : at + whole + CHECKSUM]
        into = out.as_strided(shape, (size, 1), done)
        yield _Copy(into, held.as_strided(shape, (step, 1), chunk * step + skip), check)
    if numbers:
        due[piece.key] -= numbers


@lru_cache
def _cuts(
    chunks: int, skip: int, total: int, whole: int, checked: tuple[int, ...]
) -> list[tuple[int, int, int, int, int]]:
    """What is copied at once of so many chunks of `whole` words, `total` words from word `skip` of the first on.

    (first chunk, how many, words left out of each at its beginning, words copied before, words of each.) All layers of a cache
    are cut alike. The outer chunks, of which not all may be wanted, go by themselves, and so do those that are verified.
    """
    cuts, chunk, done = list[tuple[int, int, int, int, int]](), 0, 0
    while chunk < chunks:
        alone = chunk in checked or chunk in (0, chunks - 1)
        stop = chunk + 1 if alone else next((each for each in checked if each > chunk), chunks - 1)
        size = min(whole - skip, total - done)
        cuts.append((chunk, stop - chunk, skip, done, size))
        done, chunk, skip = done + (stop - chunk) * size, stop, 0
    return cuts
