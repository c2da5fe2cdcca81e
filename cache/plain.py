"""Plain Zarr as a reader: for arrays whose codecs are not those we write, such as a cache that another tool compressed.

Slower, and without checksums where the array has none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import zarr
from numpy.typing import NDArray

from cache.buffers import Buffers
from cache.chunks import ChunkDamaged
from cache.store import Store
from schemas.arrays import ArraySpec


@dataclass(frozen=True)
class PlainReader:
    """Reads one array by zarr-python."""

    store: Store
    spec: ArraySpec
    buffers: Buffers

    def fill(self, spans: Sequence[tuple[int, int]], out: NDArray[Any]) -> None:
        """The rows of all spans, end to end, into `out`. Raises CacheDamaged."""
        done = 0
        for offset, length in spans:
            try:
                array = zarr.open_array(self.store.zarr_store(), path=self.spec.name, mode="r")
                out[done : done + length] = array[offset : offset + length]
            except Exception as fault:  # whatever a codec raises for what it cannot read
                shard, where = offset // self.spec.shard_rows, f"{self.store.where()}: {self.spec.name}"
                how = (
                    f"plain Zarr cannot read it ({str(fault).splitlines()[0] if str(fault) else type(fault).__name__})"
                )
                raise ChunkDamaged(f"{where}, shard {shard}", how, (offset, offset + length)) from None
            done += length
