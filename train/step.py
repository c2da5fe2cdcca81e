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
from train.loss import Measured
from train.metrics import add_sums
from train.objective import attach, base_weight, measure, states, total_loss
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
    """Gradients of the step's loss into the parameters; returns the sums of the micro-batches.

    A share of the loss needs the whole step's denominators. The base's is the masks' alone. The selector's depends on the weights
    of the moment (which slots have their token among the candidates), so all micro-batches are measured first, each leaving
    the gradient with respect to its hidden states, and then brought back through the trunk. That takes one more forward of the
    trunk for every micro-batch but one, whose graph is still there, and never one more of the head. (The other way, a
    backward pass each for base and selector, would cost the trunk twice as much, and a second set of gradients.)
    """
    if learner.draft.candidate_selector is not None:
        return _measure_then_backward(learner, batches)
    weights = [base_weight(batch.samples, batch.blocks, learner.loss).item() for batch in batches]
    denominators = over_ranks({"base_weight": math.fsum(weights)}, learner.world)
    totals: dict[str, float] = {}
    for batch in batches:
        batch = batch.to(learner.device)
        part = _measure(learner, batch, graph=True)
        add_sums(totals, _finite(part, batch))
        _backward(learner, batch, part, denominators)
    return totals


def _measure_then_backward(learner: Learner, batches: Sequence[Batch]) -> dict[str, float]:
    totals: dict[str, float] = {}
    parts: list[_Part] = []
    for batch in batches:
        # Moved when it is used, not when it is read: a device need not hold all micro-batches of a step at once.
        batch = batch.to(learner.device)
        part = _measure(learner, batch, graph=len(parts) == len(batches) - 1)
        add_sums(totals, _finite(part, batch))
        if parts:
            part.measured.take_parameter_gradients(parts[-1].measured)
        parts.append(part)
    weights = {name: totals.get(name, 0.0) for name in ("base_weight", "selector_weight")}
    denominators = over_ranks(weights, learner.world)
    for batch in reversed(batches):
        _backward(learner, batch.to(learner.device), parts.pop(), denominators)
    return totals


@dataclass(frozen=True)
class _Part:
    """A micro-batch that has been measured, and its hidden states where their graph was kept."""

    measured: Measured
    hidden_NBH: Tensor | None


def _measure(learner: Learner, batch: Batch, graph: bool) -> _Part:
    with torch.set_grad_enabled(graph):
        hidden_NBH = _states(learner, batch)
    measured = measure(learner.draft, learner.head, batch.samples, batch.blocks, learner.loss, hidden_NBH)
    return _Part(measured, hidden_NBH if graph else None)


def _backward(learner: Learner, batch: Batch, part: _Part, denominators: Mapping[str, float]) -> None:
    hidden_NBH = _states(learner, batch) if part.hidden_NBH is None else part.hidden_NBH
    sums = attach(part.measured, hidden_NBH, batch.samples, batch.blocks)
    total_loss(sums, denominators, learner.loss).backward()  # type: ignore[no-untyped-call]


def _states(learner: Learner, batch: Batch) -> Tensor:
    with _autocast(learner):
        return states(learner.draft, learner.head, batch.samples, batch.blocks, learner.mask_token_id)


def _finite(part: _Part, batch: Batch) -> dict[str, float]:
    """The sums as numbers. Raises NotFinite."""
    values = to_floats(part.measured.sums)
    for name in part.measured.slot_gradients:
        if not math.isfinite(values[name]):
            raise NotFinite(name, values[name], [batch])
    return values


def _autocast(learner: Learner) -> AbstractContextManager[Any]:
    if learner.precision == torch.float32:
        return nullcontext()
    return torch.autocast(learner.device.type, learner.precision)


def to_floats(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Scalar tensors as numbers, with a single wait for the device."""
    values = torch.stack([value.detach().double() for value in sums.values()]).tolist()
    return dict(zip(sums, values, strict=True))
