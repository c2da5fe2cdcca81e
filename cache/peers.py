"""Processes that work together: the store they meet in, a tensor that is spread over them, and what the end of one looks like."""

import os
import time
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from schemas.ranks import Ranks

# How long whoever stops because of another lets that one end first: where a launcher will end it, and alone.
LAUNCHED_SECONDS, STAND_BY_SECONDS = 20.0, 1.0
MEETING = timedelta(minutes=10)


def meet(ranks: Ranks, purpose: str) -> dist.Store:
    """The key-value store that the processes have in common, by what their launcher put into the environment; one process has its own."""
    if ranks.world == 1:
        return dist.HashStore()
    store, _, _ = next(dist.rendezvous("env://", ranks.rank, ranks.world, timeout=MEETING))
    return dist.PrefixStore(purpose, store)


def stand_by() -> None:
    """Let the process that failed end first, since a launcher takes the first that ends for it, and gives its exit code.

    Ending takes Python seconds on a busy machine. torch's launcher stops this wait as soon as it sees one process gone.
    """
    time.sleep(LAUNCHED_SECONDS if "TORCHELASTIC_RUN_ID" in os.environ else STAND_BY_SECONDS)


def lost_peer(fault: BaseException) -> str | None:
    """What the network says, in a line, where a fault is that of a process that is gone; None for any other fault."""
    text = str(fault).splitlines()[0][:120] if str(fault) else ""
    if isinstance(fault, (dist.DistNetworkError, dist.DistStoreError)):
        return text
    # The collectives' faults are plain RuntimeErrors, told apart only by their text.
    words = ("gloo", "nccl", "connection")
    return text if isinstance(fault, RuntimeError) and any(word in text.lower() for word in words) else None


def is_spread(tensor: Tensor) -> bool:
    """Whether a tensor's parts lie in several processes: a DTensor, known by its method, as importing the class takes half a second."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """A tensor in full, wherever its parts lie; every process that holds one must ask."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full
