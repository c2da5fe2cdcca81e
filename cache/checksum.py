"""CRC-32C of any buffer: what Zarr's chunks end in and what commit records name."""

import google_crc32c
import numpy as np


def crc32c(data: bytes | memoryview, before: int = 0) -> int:
    """The checksum of `data`, going on from `before` (the checksum of what precedes it)."""
    # The C extension takes buffers that need no release, which a memoryview is not; an array over the same bytes is.
    return int(google_crc32c.extend(before, np.frombuffer(data, np.uint8)))
