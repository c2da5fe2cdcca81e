"""`run.compile`: the draft's layers compiled before the first step, on a batch of which nothing stays.

So a machine that cannot compile is known before training starts, no step waits for the compiler, and the kernels do not depend on
which batch came first: a resumed run computes with those of the uninterrupted one.
"""

import errno
import os
import tempfile

import torch

from draft.blocks import PackedSamples, make_blocks
from draft.compiled import compiled_halves
from schemas.errors import DflashError, OptionError
from train.batch import Batch
from train.step import Learner
from train.step import accumulate as gradients_of
from train.stream import MicroBatch, StreamState

# What the compiler takes for usual lengths. No two sizes of a batch are equal: it would take them for one.
BLOCKS, TOKENS = 65, 521


def compile_layers(learner: Learner, accumulate: int, backend: str = "inductor") -> None:
    """Compile the layers of a draft, in place; its parameters keep their names. Every rank must do it.

    `accumulate` is the number of micro-batches of a step. Raises OptionError where the compiler cannot run, DflashError
    where the disk is full on which it keeps what it makes.
    """
    # It takes seconds to import.
    from torch._dynamo.exc import TorchDynamoException

    learner.draft.halves = compiled_halves(backend)
    # As a step does it: all its micro-batches but one may be measured without a graph. Spread weights end as they were.
    window = [_rehearsal(learner)] * min(accumulate, 2)
    try:
        gradients_of(learner, window)
        if learner.gradient_sum is not None:
            learner.gradient_sum.finish()
    except TorchDynamoException as fault:
        raise _refusal(fault, learner.device) from fault
    finally:
        learner.draft.zero_grad(set_to_none=True)


def _rehearsal(learner: Learner) -> Batch:
    config = learner.draft.config
    hidden_TLH = torch.zeros(TOKENS, len(config.dflash_config.target_layer_ids), config.hidden_size)
    ids_T = torch.zeros(TOKENS, dtype=torch.int64)
    samples = PackedSamples(ids_T, torch.ones(TOKENS, dtype=torch.bool), hidden_TLH, (TOKENS,))
    blocks = make_blocks(samples, torch.arange(1, BLOCKS + 1), config.block_size)
    return Batch(MicroBatch(0, (), StreamState(), False), samples, blocks, 0).to(learner.device)


def _refusal(fault: Exception, device: torch.device) -> DflashError:
    # The first line names the fault; what a compiler had to say stands far below its command.
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
    said = " ".join([*lines[:1], *[line for line in lines[1:] if "error:" in line][:1]])[:300]
    if os.strerror(errno.ENOSPC) in str(fault):
        folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir()
        return DflashError(
            f"run.compile=true: torch.compile cannot keep what it makes ({said}): free some space in {folder}, or let "
            "TORCHINDUCTOR_CACHE_DIR and TMPDIR name other folders, then run the same command again"
        )
    needs = "a C++ compiler (g++, or what CXX names)" + (" and Triton" if device.type == "cuda" else "")
    return OptionError(
        f"run.compile=true: torch.compile does not run here ({said}): install {needs}, or leave run.compile false"
    )
