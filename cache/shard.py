"""One Zarr v3 shard object, streamed: its chunks in order, each followed by its CRC-32C, then the index of their places.

The layout is that of the Zarr v3 sharding codec with `index_location: end` and the codecs bytes + crc32c for chunks and index
(https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/): so the whole object is never in memory twice.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from cache.checksum import crc32c


def encode_shard(rows: NDArray[np.generic], chunk_rows: int) -> Iterator[memoryview | bytes]:
    """The parts of a shard object that holds `rows` ([shard_rows] or [shard_rows, width], C order) in chunks of whole rows.

    All-zero chunks are written like any other, so that a missing chunk is always a fault.
    """
    assert rows.flags.c_contiguous and rows.dtype.isnative and len(rows) % chunk_rows == 0
    places = np.empty((len(rows) // chunk_rows, 2), dtype="<u8")
    offset = 0
    for number in range(len(places)):
        chunk = _bytes_of(rows[number * chunk_rows : (number + 1) * chunk_rows])
        yield chunk
        yield crc32c(chunk).to_bytes(4, "little")
        places[number] = offset, len(chunk) + 4
        offset += len(chunk) + 4
    index = places.tobytes()
    yield index
    yield crc32c(index).to_bytes(4, "little")


def _bytes_of(rows: NDArray[np.generic]) -> memoryview:
    # The buffer protocol has no float16 or bool for casting, so the bytes are viewed as such first.
    return rows.view(np.uint8).data.cast("B")
