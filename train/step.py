"""One optimizer step over its micro-batches: the loss is the sum over all of them divided by the sum of their weights."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cache.head import TargetHead
from draft.model import Draft
from schemas.options import LossOptions
from train.batch import Batch
from train.metrics import add_sums
from train.objective import denominators, objective, total_loss
from train.optim import Optimizers


@dataclass(frozen=True)
class Learner:
    """What a step updates and what it needs for that. `world` is the number of ranks that share the step."""

    draft: Draft
    head: TargetHead
    optimizers: Optimizers
    loss: LossOptions
    clip: float
    mask_token_id: int
    device: torch.device
    precision: torch.dtype
    world: int = 1


def take_window(batches: Iterator[Batch], accumulate: int) -> list[Batch]:
    """The micro-batches of the next step: `accumulate` of them, or what is left of the epoch."""
    window = []
    for batch in batches:
        window.append(batch)
        if len(window) == accumulate or batch.micro.last:
            return window
    raise AssertionError("the stream has no end")


def run_step(learner: Learner, window: Sequence[Batch], lr: float) -> dict[str, float]:
    """Update the draft once; returns the step's sums, with `grad_norm` before clipping and `steps` 1.

    A step without any valid slot changes nothing: it has `grad_norm` 0. Raises NotFinite, before the update.
    """
    batches = [batch for batch in window if len(batch.blocks.anchor_N)]
    sums = over_ranks(accumulate(learner, batches), learner.world)
    sums |= {"steps": 1.0, "grad_norm": 0.0}
    sums["tokens"] = float(sum(sum(batch.samples.lengths) for batch in window))
    sums["without_anchor"] = float(sum(batch.without_anchor for batch in window))
    if sums.get("base_weight", 0.0) > 0:
        norm = learner.optimizers.gradient_norm()
        sums["grad_norm"] = norm.item()
        if not math.isfinite(sums["grad_norm"]):
            raise NotFinite("gradient", sums["grad_norm"], batches)
        learner.optimizers.clip(learner.clip, norm)
        learner.optimizers.step(lr)
    learner.optimizers.zero_grad()
    return sums


def over_ranks(sums: Mapping[str, float], world: int) -> dict[str, float]:
    """Sums over all ranks: the one place where ranks add up denominators and metrics. With one rank, the sums themselves."""
    assert world == 1, "several ranks are not available in this version"
    return dict(sums)


class NotFinite(Exception):
    """A loss or gradient that is not finite, met in one of `batches`; nothing was updated by it."""

    def __init__(self, what: str, value: float, batches: Sequence[Batch]) -> None:
        super().__init__(f"the {what} is {value}")
        self.what, self.value = what, value
        self.rows = tuple(row for batch in batches for row in batch.micro.rows)


def accumulate(learner: Learner, batches: Sequence[Batch]) -> dict[str, float]:
    """Gradients of the step's loss into the parameters; returns the sums of the micro-batches."""
    counted: dict[str, float] = {}
    if len(batches) > 1:
        # A share of the loss needs the whole step's denominators, which dflash2 knows only after a forward of every micro-batch.
        for batch in batches:
            with _autocast(learner):
                add_sums(counted, to_floats(denominators(*_arguments(learner, batch))))
    totals: dict[str, float] = {}
    for batch in batches:
        with _autocast(learner):
            sums = objective(*_arguments(learner, batch))
        values = to_floats(sums)
        for name in ("base_loss", "selector_loss"):
            if not math.isfinite(values.get(name, 0.0)):
                raise NotFinite(name, values[name], [batch])
        total_loss(sums, over_ranks(counted or values, learner.world), learner.loss).backward()  # type: ignore[no-untyped-call]
        add_sums(totals, values)
    return totals


def _arguments(learner: Learner, batch: Batch) -> tuple[Any, ...]:
    # Moved when it is used, not when it is read: a device need not hold all micro-batches of a step at once.
    batch = batch.to(learner.device)
    return learner.draft, learner.head, batch.samples, batch.blocks, learner.loss, learner.mask_token_id


def _autocast(learner: Learner) -> AbstractContextManager[Any]:
    if learner.precision == torch.float32:
        return nullcontext()
    return torch.autocast(learner.device.type, learner.precision)


def to_floats(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Scalar tensors as numbers, with a single wait for the device."""
    values = torch.stack([value.detach().double() for value in sums.values()]).tolist()
    return dict(zip(sums, values, strict=True))
