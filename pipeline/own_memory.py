"""What a command's process does with memory: it keeps what it has freed for the next tensor, and it ends without a last walk."""

import atexit
import ctypes
import gc
import os

# glibc's mallopt(3). Its largest value keeps every block of up to 2 GB.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, LARGEST = -1, -3, 2**31 - 1


def settle_memory() -> None:
    """Call once, when the process begins. Without glibc, whose functions these are, memory stays as it is.

    The C library gives blocks from 32 MB on back to the system as soon as they are free, and each page of the next one is cleared
    and mapped anew: on a CPU an eighth to a half of a step, and a tenth to a quarter of a capture. Kept, the process holds its peak, which
    lies some tenth higher, until it ends. Who sets glibc's own variables (MALLOC_TRIM_THRESHOLD_, GLIBC_TUNABLES) has decided.

    Where Python ends, the garbage collector walks all that torch and transformers ever made: over a second, for memory that goes
    with the process.
    """
    atexit.register(gc.freeze)
    decided = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"} & os.environ.keys()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not decided and "glibc.malloc" not in os.environ.get("GLIBC_TUNABLES", ""):
        for parameter in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            mallopt(parameter, LARGEST)
