"""The halves of a layer, compiled: its norms, convolutions, projections, MLP and residuals, in fewer passes over memory.

What lies between the halves, the scores, stays as it is: their chunks are other ones in every batch (the split), or a kernel
of its own (flex). N blocks and T context tokens vary from batch to batch and are the first axis of every tensor; all other sizes
are compiled in. So each half is compiled once for its layers with a graph, once for the first layer, whose input needs no gradient,
and once without a graph.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from draft.model import Halves, after_attention, before_attention


def compiled_halves(backend: str = "inductor") -> Halves:
    """`EAGER`'s values to rounding. Compiling happens at the first calls, which raise torch's TorchDynamoException if it fails."""
    return Halves(_compiled(before_attention, backend), _compiled(after_attention, backend))


def _compiled(half: Callable[..., Any], backend: str) -> Callable[..., Any]:
    assert isinstance(half, FunctionType)
    # The compiler counts, and limits, what it made of a code object: another draft in this process is not to use up this one's.
    own = FunctionType(half.__code__.replace(), half.__globals__, half.__name__)
    # Deterministic: no kernel is chosen by a stopwatch, so a resumed run computes with the same ones.
    choices: dict[str, Any] | None = {"deterministic": True} if backend == "inductor" else None
    # Not dynamic but for the axes marked below: else what another draft was compiled for, even in an earlier process, would make more of
    # the sizes vary.
    fast = torch.compile(own, backend=backend, options=choices, dynamic=False, fullgraph=True)

    def call(*arguments: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
        # The compiler takes lengths of 0 and 1 for cases of their own, in any combination. So small a batch needs none.
        if min(len(tensor) for tensor in tensors) < 2:
            return half(*arguments)
        for tensor in tensors:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)  # type: ignore[no-untyped-call]
        return fast(*arguments)

    return call
