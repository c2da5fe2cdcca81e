"""Rows of several arrays at once: from memory where they lie in it, read where not.

Plain Zarr, which costs a millisecond of Python a sample and array, is what the tests compare with. A chunk is verified against
its CRC-32C when it is first read, later only now and then.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache.checksum import crc32c
from cache.chunks import CHECKSUM, ChunkReader, Due, Piece, bytes_of
from cache.lent import copy_lent
from cache.runs import read_runs


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
    found: list[Piece] = []
    places: dict[tuple[int, int], list[_Place]] = {}  # all layers are cut alike
    for reader, out in zip(readers, outs, strict=True):
        sizes = reader.spec.shard_rows, reader.spec.chunk_rows
        if sizes not in places:
            places[sizes] = list(_places(spans, *sizes))
        found += _pieces(reader, places[sizes], bytes_of(out))
    if not found:
        return list(outs)
    _read_indexes(found)
    due: Due = {}
    for piece in found:
        if numbers := piece.reader.due(piece.shard, *piece.chunks):
            due.setdefault(piece.key, set()).update(numbers)
    # What is lent verifies its chunks first, each for all that share it.
    if elsewhere := copy_lent(found, due):
        read_runs(elsewhere, due)
    return list(outs)


class _Place(NamedTuple):
    """Rows `first` .. `first + length - 1` of a shard, the chunks that hold them (from, up to), and how many rows come before."""

    shard: int
    first: int
    length: int
    chunks: tuple[int, int]
    before: int


def _places(spans: Sequence[tuple[int, int]], shard_rows: int, chunk_rows: int) -> Iterator[_Place]:
    """The rows of all spans, cut where shards end."""
    before = 0
    for offset, length in spans:
        end = offset + length
        while offset < end:
            shard, first = divmod(offset, shard_rows)
            count = min(end - offset, shard_rows - first)
            yield _Place(shard, first, count, (first // chunk_rows, (first + count - 1) // chunk_rows + 1), before)
            offset, before = offset + count, before + count


def _pieces(reader: ChunkReader, places: Sequence[_Place], out: memoryview) -> Iterator[Piece]:
    size = reader.spec.row_bytes
    for shard, first, length, chunks, before in places:
        yield Piece(reader, shard, first, length, out[before * size : (before + length) * size], chunks)


def _read_indexes(found: Sequence[Piece]) -> None:
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
        reader.keep_index(shard, np.frombuffer(data[:-CHECKSUM], dtype="<u8").reshape(-1, 2))
