"""What processes that work together share: where they meet, and telling the end of another from a fault of one's own."""

import pytest
import torch
import torch.distributed as dist

from cache.peers import lost_peer, meet, whole
from schemas.ranks import ALONE


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711\nmore"), "Connection closed"),
        (RuntimeError("NCCL error: remote process exited"), "NCCL error"),
        (dist.DistNetworkError("failed to recv, got 0 bytes"), "got 0 bytes"),
        (RuntimeError("shape '[3]' is invalid, the state was restored"), None),
        (torch.OutOfMemoryError("CUDA out of memory"), None),
        (ValueError("gloo"), None),
        (RuntimeError(), None),
    ],
)  # fmt: skip
def test_a_lost_process_is_told_from_a_fault_of_ones_own(fault, said):
    found = lost_peer(fault)
    assert (found is None) == (said is None)
    assert said is None or (said in found and "\n" not in found)


def test_one_process_meets_itself():
    store = meet(ALONE, "work")
    store.set("key", "value")
    assert store.get("key") == b"value" and not store.check(["other"])


def test_a_tensor_that_is_not_spread_is_whole():
    tensor = torch.ones(2)
    assert whole(tensor) is tensor
