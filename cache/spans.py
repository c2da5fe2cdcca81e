"""Places in the objects of a store, and reading one into memory that is already there."""

import os
from collections.abc import Iterator
from typing import NamedTuple

# An object that is gone through as a whole is read so many bytes at a time.
PIECE_BYTES = 8 << 20


class Span(NamedTuple):
    """`size` bytes of an object from `offset` on; a negative offset counts from the object's end."""

    key: str
    offset: int
    size: int


class Run(NamedTuple):
    """`size` bytes of an object from `offset` on, and the pieces of memory that they fill, one after the other."""

    key: str
    offset: int
    into: list[memoryview]
    size: int


def pieces_of(key: str, size: int) -> Iterator[Span]:
    """All `size` bytes of an object, piece by piece."""
    return (Span(key, start, min(PIECE_BYTES, size - start)) for start in range(0, size, PIECE_BYTES))


def read_run(file: int, run: Run) -> int:
    """Read a run of an open file; gives how many bytes of it there were."""
    read = os.preadv(file, run.into, run.offset)
    # A call may give less than was asked for; that nothing is left it says by giving nothing.
    while read < run.size:
        rest, skip = [], read
        for piece in run.into:
            rest.append(piece[skip:])
            skip = max(0, skip - len(piece))
        more = os.preadv(file, [piece for piece in rest if len(piece)], run.offset + read)
        if more == 0:
            break
        read += more
    return read
