"""CRC-32C of any buffer: what Zarr's chunks end in and what commit records name."""

import numpy as np
from awscrt import checksums
from numpy.typing import NDArray


def crc32c(data: bytes | memoryview | NDArray[np.uint8], before: int = 0) -> int:
    """The checksum of `data`, going on from `before` (the checksum of what precedes it)."""
    return int(checksums.crc32c(data, before))
