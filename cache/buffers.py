"""Memory to read into: used again, since fresh memory costs as much as the reading, and pinned where there is a GPU.

What is lent comes back by itself when the last array or tensor over it is gone.
"""

import mmap
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

ALIGNMENT = 64
# Less than this is taken from the heap, which uses it again itself.
SMALL_BYTES = 128 << 10
# What may lie idle; more of it is given up, the longest idle first.
IDLE_BYTES = 1 << 30


class Buffers:
    """Lends arrays over memory that others have had. Any number of threads may ask and give back."""

    def __init__(self) -> None:
        self._idle: list[NDArray[np.uint8]] = []
        self._lock = threading.Lock()
        self._lent: dict[int, tuple[weakref.ref[Any], NDArray[np.uint8]]] = {}
        self._returned: deque[NDArray[np.uint8]] = deque()

    def array(self, shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
        """An array of whatever was there before, aligned to 64 bytes."""
        kind = np.dtype(dtype)
        size = prod(shape) * kind.itemsize
        if size < SMALL_BYTES:
            small = np.empty(size + ALIGNMENT, np.uint8)
            start = -small.ctypes.data % ALIGNMENT
            return small[start : start + size].view(kind).reshape(shape)
        whole = self._take(size)
        # A memoryview between the two, which numpy does not look through: it lives exactly as long as what was lent.
        lent = np.frombuffer(whole.data[:size], kind)
        lender = weakref.ref(lent.base, self._give_back)
        self._lent[id(lender)] = lender, whole
        return lent.reshape(shape)

    def _give_back(self, lender: "weakref.ref[Any]") -> None:
        # May be called inside any allocation, also one made under the lock: it only leaves the memory here.
        self._returned.append(self._lent.pop(id(lender))[1])

    def _take(self, size: int) -> NDArray[np.uint8]:
        with self._lock:
            while self._returned:
                self._idle.append(self._returned.popleft())
            fitting = [each for each in self._idle if size <= each.nbytes <= 2 * size]
            if fitting:
                best = min(fitting, key=lambda each: each.nbytes)
                self._idle = [each for each in self._idle if each is not best]
                return best
            while sum(each.nbytes for each in self._idle) > IDLE_BYTES:
                self._idle.pop(0)
        return _fresh(size + size // 4)


def _fresh(size: int) -> NDArray[np.uint8]:
    size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    if torch.cuda.is_available():
        pinned: NDArray[np.uint8] = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
        return pinned
    # Pages that are not written to cost nothing. Huge ones, where the system has them, are filled a tenth faster.
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.frombuffer(mmap.mmap(-1, size), np.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
