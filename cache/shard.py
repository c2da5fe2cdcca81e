"""One Zarr v3 shard object, streamed: its chunks in order, each followed by its CRC-32C, then the index of their places.

The layout is that of the Zarr v3 sharding codec with `index_location: end` and the codecs bytes + crc32c for the index and,
with or without byte-shuffle and zstd between them, for chunks
(https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/): so the whole object is never in memory twice. Raw chunks
begin at multiples of 64 bytes: the index says where, so every reader finds them, and memory that is copied from one such place to
another moves at up to half again the speed.
"""

from collections.abc import Iterator

import numpy as np
from numcodecs.shuffle import Shuffle
from numcodecs.zstd import compress, decompress
from numpy.typing import NDArray

from cache.checksum import crc32c

# More of it takes longer and gains a percent: what is left after the shuffle is a plane of noise and a plane of few symbols.
ZSTD_LEVEL = 1
ALIGNMENT = 64


def encode_shard(
    rows: NDArray[np.generic], chunk_rows: int, shuffled_zstd: bool = False
) -> Iterator[memoryview | bytes]:
    """The parts of a shard object that holds `rows` ([shard_rows] or [shard_rows, width], C order) in chunks of whole rows.

    All-zero chunks are written like any other, so that a missing chunk is always a fault.
    """
    assert rows.flags.c_contiguous and rows.dtype.isnative and len(rows) % chunk_rows == 0
    places = np.empty((len(rows) // chunk_rows, 2), dtype="<u8")
    offset = 0
    for number in range(len(places)):
        part = rows[number * chunk_rows : (number + 1) * chunk_rows]
        chunk = shrink(part) if shuffled_zstd else _bytes_of(part)
        size = len(chunk) + 4
        gap = 0 if shuffled_zstd else -size % ALIGNMENT
        yield chunk
        yield crc32c(chunk).to_bytes(4, "little") + bytes(gap)
        places[number] = offset, size
        offset += size + gap
    index = places.tobytes()
    yield index
    yield crc32c(index).to_bytes(4, "little")


def shrink(rows: NDArray[np.generic]) -> bytes:
    """A chunk's bytes, all first bytes of its items before all second ones, compressed with zstd."""
    shuffled = Shuffle(rows.dtype.itemsize).encode(np.ascontiguousarray(rows).view(np.uint8).reshape(-1))
    return bytes(compress(shuffled, ZSTD_LEVEL))


def expand(data: memoryview, dtype: str, size: int) -> NDArray[np.generic]:
    """The items of a chunk that `shrink` made, `size` bytes of them. Raises ValueError where it did not."""
    try:
        shuffled = decompress(data)
    except RuntimeError as fault:
        raise ValueError(str(fault)) from None
    if len(shuffled) != size:
        raise ValueError(f"{len(shuffled)} bytes, not {size}")
    return np.frombuffer(Shuffle(np.dtype(dtype).itemsize).decode(shuffled), dtype=dtype)


def _bytes_of(rows: NDArray[np.generic]) -> memoryview:
    # The buffer protocol has no float16 or bool for casting, so the bytes are viewed as such first.
    return rows.view(np.uint8).data.cast("B")
