"""A command's process keeps the memory it has freed, and ends without walking it."""

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import torch
from pipeline.own_memory import settle_memory
if sys.argv[1] == "settled":
    settle_memory()
torch.set_num_threads(1)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**26, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
# Something small may come to lie where the first block was, so that the second does not fit there again.
print(min(faults() for _ in range(64)))
"""
COLLECTED = """
import gc, sys
from pipeline.own_memory import settle_memory
class Told:
    def __del__(self):
        print("walked")
told = Told()
told.itself = told
del told
gc.disable()
if sys.argv[1] == "settled":
    settle_memory()
"""


def said(script: str, mode: str, **variables: str) -> str:
    words = [sys.executable, "-c", script, mode]
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    return subprocess.run(words, check=True, capture_output=True, text=True, env=own | variables).stdout


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_memory_that_was_freed_is_used_again_without_the_system():
    fresh = int(said(FAULTS, "as it is"))
    assert int(said(FAULTS, "settled")) < fresh / 4
    for word in ({"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=33554432"}):
        assert int(said(FAULTS, "settled", **word)) > fresh / 2, "the user's word counts"
    assert int(said(FAULTS, "settled", GLIBC_TUNABLES="glibc.malloc.tcache_count=7")) < fresh / 4, "another matter"


def test_the_end_of_a_process_walks_nothing():
    assert said(COLLECTED, "as it is") == "walked\n"
    assert said(COLLECTED, "settled") == ""
