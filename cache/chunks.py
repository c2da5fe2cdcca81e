"""Where the chunks of an array lie, and which of them are to be verified when they are read."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.buffers import Buffers
from cache.checksum import crc32c
from cache.spans import Span
from cache.store import Store
from schemas.arrays import ArraySpec
from schemas.errors import CacheDamaged

CHECKSUM = 4
# Visits are counted up to here and go on from 1: 0 is a chunk that was never verified.
MOST_VISITS = 65_535
# Reader, shard and number.
ChunkKey = tuple[int, int, int]


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

    def check(
        self, shard: int, number: int, data: memoryview | NDArray[np.uint8], checksum: bytes | memoryview
    ) -> None:
        """Verify a chunk that was due against its checksum, and count this reading of it. Raises ChunkDamaged."""
        if crc32c(data) != int.from_bytes(checksum, "little"):
            raise self.damaged(shard, f"chunk {number} does not match its checksum", number)
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


@dataclass(frozen=True)
class Piece:
    """Rows `first` .. `first + count - 1` of a shard, and where they go, as bytes."""

    reader: ChunkReader
    shard: int
    first: int
    count: int
    out: memoryview

    @property
    def chunks(self) -> tuple[int, int]:
        """The chunks that hold them: from, up to."""
        rows = self.reader.spec.chunk_rows
        return self.first // rows, (self.first + self.count - 1) // rows + 1

    def key(self, number: int) -> ChunkKey:
        """What tells a chunk from all others of one call."""
        return id(self.reader), self.shard, number


def bytes_of(array: NDArray[Any]) -> memoryview:
    """An array's memory (C order), as bytes."""
    assert array.flags.c_contiguous
    return array.reshape(-1).view(np.uint8).data
