"""Files lent as the page cache's own memory, mapped: the kernel copies to a reader at 0.6 of the speed of copying memory.

What is not in memory yet is left to a plain read, which asks the disk for all of it at once, where touching mapped pages asks
piece by piece. So is what would fault: bytes are lent only where a look finds all of them in the page cache. (A file that is cut
off in the moments between that look and the copy ends the process; one that is replaced or removed does not.)
"""

import ctypes
import mmap
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# So much stays mapped, the longest unused given up first: mapping it anew costs a sixth of copying it. Most displays count it as
# the process's own memory, though it is the page cache's and is taken back as that is. Systems bound the number of mappings too.
MAPPED_BYTES = 1 << 30
MAPPED_FILES = 4096


def _look_up() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    call = ctypes.CDLL(None).mincore
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return call


_mincore = _look_up()


class _Found(NamedTuple):
    """Memory for what a look finds, of one thread."""

    pages: bytearray
    address: int

    @staticmethod
    def of(count: int) -> "_Found":
        pages = bytearray(count)
        return _Found(pages, ctypes.addressof(ctypes.c_char.from_buffer(pages)))


class MappedFile:
    """A whole file, and what tells it from another of the same name. What it lends stays good when the file is given up."""

    def __init__(self, path: str, identity: tuple[int, int, int], own: threading.local) -> None:
        self.identity = identity
        self._data = _map(path, identity[-1])
        self._address = self._data.ctypes.data
        self._own = own

    def __len__(self) -> int:
        return len(self._data)

    def lend(self, offset: int, size: int) -> NDArray[np.uint8] | None:
        """Bytes of the file, not to be written to; None where they are not all in memory."""
        if offset + size > len(self._data) or not self._present(self._address + offset, size):
            return None
        return self._data[offset : offset + size]

    def _present(self, address: int, size: int) -> bool:
        """Whether all pages of this range of a mapping are in memory; 4 nanoseconds a small page that was touched before."""
        assert _mincore is not None
        first = address // mmap.PAGESIZE * mmap.PAGESIZE
        pages = -(-(address + size - first) // mmap.PAGESIZE)
        found: _Found | None = getattr(self._own, "found", None)
        if found is None or len(found.pages) < pages:
            found = self._own.found = _Found.of(pages)
        # One byte a page; all bits but the lowest are 0, or mean what no reader needs to know.
        return not _mincore(first, pages * mmap.PAGESIZE, found.address) and found.pages.find(0, 0, pages) < 0


class MappedFiles:
    """Those used last. Any number of threads may ask, and borrow of what they get."""

    def __init__(self, mapped_bytes: int = MAPPED_BYTES) -> None:
        self.mapped_bytes = mapped_bytes
        self._held: OrderedDict[str, MappedFile] = OrderedDict()
        self._held_bytes = 0
        self._lock = threading.Lock()
        self._own = threading.local()

    def file(self, path: str) -> MappedFile | None:
        """A file as it is now; None where it cannot be mapped here."""
        if _mincore is None:
            return None
        try:
            return self._file(path)
        except (OSError, ValueError):  # no such file, too many mappings, a file system that maps nothing
            return None

    def _file(self, path: str) -> MappedFile:
        state = os.stat(path)
        identity = (state.st_dev, state.st_ino, state.st_size)
        with self._lock:
            held = self._held.get(path)
            if held is None or held.identity != identity:
                self._give_up(self._held.pop(path, None))
                held = self._held[path] = MappedFile(path, identity, self._own)
                self._held_bytes += len(held)
                while len(self._held) > 1 and (self._held_bytes > self.mapped_bytes or len(self._held) > MAPPED_FILES):
                    self._give_up(self._held.popitem(last=False)[1])
            else:
                self._held.move_to_end(path)
        return held

    def _give_up(self, file: MappedFile | None) -> None:
        self._held_bytes -= 0 if file is None else len(file)


def _map(path: str, size: int) -> NDArray[np.uint8]:
    file = os.open(path, os.O_RDONLY)
    try:
        # A private mapping, over which torch makes tensors: they cannot be told not to be written to.
        return np.frombuffer(mmap.mmap(file, size, access=mmap.ACCESS_COPY), np.uint8)
    finally:
        os.close(file)
