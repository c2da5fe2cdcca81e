"""Where the chunks of an array lie, and which of them are to be verified when they are read."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache.buffers import Buffers
from cache.checksum import crc32c
from cache.spans import Span
from cache.store import Store
from schemas.arrays import ArraySpec
from schemas.errors import CacheDamaged

CHECKSUM = 4
# Multiples of it fall evenly between whole numbers, whatever the order of reading repeats after.
GOLDEN = 0.6180339887498949
# The numbers of chunks that are to be verified, by reader and shard (`Piece.key`).
Due = dict[tuple[int, int], set[int]]


class ChunkDamaged(CacheDamaged):
    """Rows `rows` (from, up to) of an array that cannot be read; whoever knows the samples in them adds their names."""

    def __init__(self, where: str, how: str, rows: tuple[int, int], samples: str = "") -> None:
        super().__init__(f"{where}: {how}{samples}: the cache is damaged; capture again")
        self.where, self.how, self.rows = where, how, rows


@dataclass(frozen=True)
class ChunkReader:
    """Reads one array of a cache. `places` keeps each shard's index once it was read: [chunks, 2], offset and size.

    `spaced` keeps, of a shard whose chunks lie as we write raw ones, where the first begins and at what distance they follow.
    A chunk is verified at its first reading (`verified` then has a 1 for it), later when it is its turn: at each of the
    `readings` of a shard it is that of one in `verify_every` chunks (1: of all). Whose depends on what was read alone.
    """

    store: Store
    spec: ArraySpec
    verify_every: int = 1
    buffers: Buffers = field(default_factory=Buffers)
    places: dict[int, NDArray[np.uint64]] = field(default_factory=dict)
    spaced: dict[int, tuple[int, int]] = field(default_factory=dict)
    readings: dict[int, int] = field(default_factory=dict)
    verified: dict[int, bytearray] = field(default_factory=dict)

    @cached_property
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

    def keep_index(self, shard: int, places: NDArray[np.uint64]) -> None:
        """Remember where the chunks of a shard lie."""
        gaps = np.diff(places[:, 0].astype(np.int64))
        distance = int(gaps[0]) if len(gaps) else 0
        even = bool((gaps == distance).all()) and (distance > self.chunk_bytes or not len(gaps))
        if even and not self.spec.shuffled_zstd and bool((places[:, 1] == self.chunk_bytes + CHECKSUM).all()):
            self.spaced[shard] = int(places[0, 0]), distance
        self.places[shard] = places

    def due(self, shard: int, first: int, end: int) -> Sequence[int]:
        """Those of the chunks first .. end - 1 that are to be verified when they are read now; counts as a reading of the shard."""
        every = self.verify_every
        if every == 1 or self.spec.shuffled_zstd:
            return range(first, end)
        verified = self._verified(shard)
        self.readings[shard] = readings = self.readings.get(shard, 0) + 1
        turn = range(first + (int(readings * GOLDEN % 1.0 * every) - first) % every, end, every)
        if verified.find(0, first, end) < 0:
            return turn
        return [number for number in range(first, end) if not verified[number] or number in turn]

    def check(
        self, shard: int, number: int, data: memoryview | NDArray[np.uint8], checksum: bytes | memoryview
    ) -> None:
        """Verify a chunk against its checksum. Raises ChunkDamaged."""
        if crc32c(data) != int.from_bytes(checksum, "little"):
            raise self.damaged(shard, f"chunk {number} does not match its checksum", number)
        self._verified(shard)[number] = 1

    def _verified(self, shard: int) -> bytearray:
        # Looked up by threads side by side: none may put its own in another's place.
        held = self.verified.get(shard)
        return held or self.verified.setdefault(shard, bytearray(self.spec.shard_rows // self.spec.chunk_rows))

    def damaged(self, shard: int, how: str, number: int | None = None) -> ChunkDamaged:
        """The error that says so, of a shard or of one of its chunks."""
        first, rows = shard * self.spec.shard_rows, self.spec.shard_rows
        if number is not None:
            first, rows = first + number * self.spec.chunk_rows, self.spec.chunk_rows
        return ChunkDamaged(f"{self.store.where()}: {self.spec.name}, shard {shard}", how, (first, first + rows))


class Piece(NamedTuple):
    """Rows `first` .. `first + length - 1` of a shard, where they go, as bytes, and the chunks that hold them: from, up to."""

    reader: ChunkReader
    shard: int
    first: int
    length: int
    out: memoryview
    chunks: tuple[int, int]

    @property
    def key(self) -> tuple[int, int]:
        """What tells the shard from all others of one call."""
        return id(self.reader), self.shard


def bytes_of(array: NDArray[Any]) -> memoryview:
    """An array's memory (C order), as bytes."""
    assert array.flags.c_contiguous
    return array.reshape(-1).view(np.uint8).data
