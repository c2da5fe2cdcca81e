"""What a command's process does with memory: it keeps what it has freed for the next tensor, and it ends without a last walk."""

import atexit
import ctypes
import gc
import os
import sys

# Of glibc's mallopt(3).
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
# What else sets these, as a variable MALLOC_..._ or in GLIBC_TUNABLES.
SETTINGS = ("MMAP_MAX", "MMAP_THRESHOLD", "TRIM_THRESHOLD", "TOP_PAD")


def settle_memory() -> None:
    """Call once, when the process begins. Without glibc, whose functions these are, memory stays as it is.

    The C library gives blocks from 32 MB on back to the system as soon as they are free, and each page of the next one is cleared
    and mapped anew: on a CPU an eighth to a half of a step, and a tenth to a quarter of a capture. Kept, the process holds its
    peak, which lies some tenth higher, until it ends. Whoever sets glibc's own variables for this has decided.

    Where Python ends, the garbage collector walks all that torch and transformers ever made: over a second, for memory that goes
    with the process.
    """
    atexit.register(gc.freeze)
    if sys.platform != "linux" or _is_set():
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # Nothing lies in a mapping of its own, and nothing at the end of the heap is given back.
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


def _is_set() -> bool:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return any(f"MALLOC_{name}_" in os.environ or f"glibc.malloc.{name.lower()}=" in tunables for name in SETTINGS)
