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


class _File(NamedTuple):
    """A whole file, and what tells it from another of the same name."""

    identity: tuple[int, int, int]
    data: NDArray[np.uint8]
    address: int


class _Found(NamedTuple):
    """Memory for what a look finds, of one thread."""

    pages: bytearray
    address: int

    @staticmethod
    def of(count: int) -> "_Found":
        pages = bytearray(count)
        return _Found(pages, ctypes.addressof(ctypes.c_char.from_buffer(pages)))


class MappedFiles:
    """Those used last. Any number of threads may borrow; what was lent stays good when its file is given up here."""

    def __init__(self, mapped_bytes: int = MAPPED_BYTES) -> None:
        self.mapped_bytes = mapped_bytes
        self._held: OrderedDict[str, _File] = OrderedDict()
        self._held_bytes = 0
        self._lock = threading.Lock()
        self._own = threading.local()

    def lend(self, path: str, offset: int, size: int) -> NDArray[np.uint8] | None:
        """Bytes of a file, not to be written to; None where they are not in memory, or cannot be mapped here."""
        if _mincore is None:
            return None
        try:
            file = self._file(path)
        except (OSError, ValueError):  # no such file, too many mappings, a file system that maps nothing
            return None
        if offset + size > len(file.data) or not self._present(file.address + offset, size):
            return None
        return file.data[offset : offset + size]

    def _file(self, path: str) -> _File:
        state = os.stat(path)
        identity = (state.st_dev, state.st_ino, state.st_size)
        with self._lock:
            held = self._held.get(path)
            if held is None or held.identity != identity:
                self._give_up(self._held.pop(path, None))
                data = _map(path, state.st_size)
                held = self._held[path] = _File(identity, data, data.ctypes.data)
                self._held_bytes += len(data)
                while len(self._held) > 1 and (self._held_bytes > self.mapped_bytes or len(self._held) > MAPPED_FILES):
                    self._give_up(self._held.popitem(last=False)[1])
            else:
                self._held.move_to_end(path)
        return held

    def _give_up(self, file: _File | None) -> None:
        self._held_bytes -= 0 if file is None else len(file.data)

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


def _map(path: str, size: int) -> NDArray[np.uint8]:
    file = os.open(path, os.O_RDONLY)
    try:
        # A private mapping, over which torch makes tensors: they cannot be told not to be written to.
        return np.frombuffer(mmap.mmap(file, size, access=mmap.ACCESS_COPY), np.uint8)
    finally:
        os.close(file)
