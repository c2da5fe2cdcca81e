"""One optimizer step over its micro-batches: the loss is the sum over all of them divided by the sum of their weights."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cache.head import TargetHead
from cache.peers import whole
from draft.model import Draft
from schemas.options import LossOptions
from train.batch import Batch
from train.gradients import GradientSum
from train.loss import Measured
from train.metrics import add_sums
from train.objective import attach, base_weight, measure, states, total_loss
from train.optim import Optimizers
from train.stream import MicroBatch
from train.team import SOLO, Team


@dataclass(frozen=True)
class Learner:
    """What a step updates and what it needs for that. The ranks of `team` share the step.

    `gradient_sum` adds up their gradients, where there are several and no one else does.
    """

    draft: Draft
    head: TargetHead
    optimizers: Optimizers
    loss: LossOptions
    clip: float
    mask_token_id: int
    device: torch.device
    precision: torch.dtype
    team: Team = SOLO
    gradient_sum: GradientSum | None = None


def take_window(batches: Iterator[Batch], accumulate: int) -> list[Batch]:
    """The micro-batches of the next step: `accumulate` of them, or what is left of the epoch."""
    window = []
    for batch in batches:
        window.append(batch)
        if len(window) == accumulate or batch.micro.last:
            return window
    raise AssertionError("the stream has no end")


def run_step(learner: Learner, window: Sequence[Batch], lr: float) -> dict[str, float]:
    """Update the draft once; returns the step's sums over all ranks, with `grad_norm` before clipping and `steps` 1.

    A step without any valid slot changes nothing: it has `grad_norm` 0. Raises NotFinite, on every rank and before the update.
    Each rank adds up its own micro-batches, then the ranks are added up: the last bits depend on how many there are.
    """
    gathered = accumulate(learner, _taking_part(learner, window))
    gathered.sums["tokens"] = float(sum(sum(batch.samples.lengths) for batch in window))
    gathered.sums["without_anchor"] = float(sum(batch.without_anchor for batch in window))
    sums = learner.team.sums(gathered.sums)
    if not all(map(math.isfinite, sums.values())):
        faults = [fault for each in learner.team.gather(gathered.faults) for fault in each]
        raise NotFinite(faults[0].what, faults[0].value, [fault.micro for fault in faults])
    if learner.gradient_sum is not None:
        learner.gradient_sum.finish()
    sums |= {"steps": 1.0, "grad_norm": 0.0}
    if sums.get("base_weight", 0.0) > 0:
        norm = learner.optimizers.gradient_norm()
        sums["grad_norm"] = whole(norm).item()
        if not math.isfinite(sums["grad_norm"]):
            micros = [micro for each in learner.team.gather([batch.micro for batch in window]) for micro in each]
            raise NotFinite("gradient", sums["grad_norm"], micros)
        learner.optimizers.clip(learner.clip, norm)
        learner.optimizers.step(lr)
    learner.optimizers.zero_grad()
    return sums


def _taking_part(learner: Learner, window: Sequence[Batch]) -> list[Batch]:
    # One rank alone passes over what has nothing to train on; among several each does as many passes as the others.
    if learner.team.world == 1:
        return [batch for batch in window if len(batch.blocks.anchor_N)]
    config = learner.draft.config
    return [batch.or_nothing(len(config.dflash_config.target_layer_ids), config.hidden_size) for batch in window]


@dataclass(frozen=True)
class Fault:
    """A sum of a micro-batch that is not finite."""

    what: str
    value: float
    micro: MicroBatch


class NotFinite(Exception):
    """A loss or gradient that is not finite, met in one of `micros`, of any rank; nothing was updated by it."""

    def __init__(self, what: str, value: float, micros: Sequence[MicroBatch]) -> None:
        super().__init__(f"the {what} is {value}")
        self.what, self.value = what, value
        self.micros = sorted((micro for micro in micros if micro.rows), key=lambda micro: (micro.epoch, micro.position))


@dataclass
class Gathered:
    """The sums of the micro-batches so far, of this rank alone, and which losses among them are not finite."""

    sums: dict[str, float] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def add(self, measured: Measured, micro: MicroBatch) -> None:
        """Take in a micro-batch that has been measured."""
        values = to_floats(measured.sums)
        bad = [name for name in measured.slot_gradients if not math.isfinite(values[name])]
        self.faults.extend(Fault(name, values[name], micro) for name in bad[:1])
        add_sums(self.sums, values)


def accumulate(learner: Learner, batches: Sequence[Batch]) -> Gathered:
    """Gradients of the step's loss into the parameters; returns the sums of this rank's micro-batches.

    A share of the loss needs the whole step's denominators. The base's is the masks' alone. The selector's depends on the weights
    of the moment (which slots have their token among the candidates), so all micro-batches are measured first, each leaving
    the gradient with respect to its hidden states, and then brought back through the trunk. That takes one more forward of the
    trunk for every micro-batch but one, whose graph is still there, and never one more of the head. (The other way, a
    backward pass each for base and selector, would cost the trunk twice as much, and a second set of gradients.)
    """
    if learner.draft.candidate_selector is not None:
        return _measure_then_backward(learner, batches)
    weights = [base_weight(batch.samples, batch.blocks, learner.loss).item() for batch in batches]
    denominators = learner.team.sums({"base_weight": math.fsum(weights)})
    gathered = Gathered()
    for number, batch in enumerate(batches, 1):
        batch = batch.to(learner.device)
        part = _measure(learner, batch, graph=True)
        gathered.add(part.measured, batch.micro)
        _backward(learner, batch, part, denominators, last=number == len(batches))
    return gathered


def _measure_then_backward(learner: Learner, batches: Sequence[Batch]) -> Gathered:
    gathered = Gathered()
    parts: list[_Part] = []
    for batch in batches:
        # Moved when it is used, not when it is read: a device need not hold all micro-batches of a step at once.
        batch = batch.to(learner.device)
        part = _measure(learner, batch, graph=len(parts) == len(batches) - 1)
        gathered.add(part.measured, batch.micro)
        if parts:
            part.measured.take_parameter_gradients(parts[-1].measured)
        parts.append(part)
    weights = {name: gathered.sums.get(name, 0.0) for name in ("base_weight", "selector_weight")}
    denominators = learner.team.sums(weights)
    for batch in reversed(batches):
        part = parts.pop()
        _backward(learner, batch.to(learner.device), part, denominators, last=not parts)
    return gathered


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


def _backward(learner: Learner, batch: Batch, part: _Part, denominators: Mapping[str, float], *, last: bool) -> None:
    hidden_NBH = _states(learner, batch) if part.hidden_NBH is None else part.hidden_NBH
    sums = attach(part.measured, hidden_NBH, batch.samples, batch.blocks)
    if last and learner.gradient_sum is not None:
        selector = learner.draft.candidate_selector
        behind_norm = [] if selector is None else list(selector.parameters())
        still = {p for owned in part.measured.parameter_gradients.values() for p in owned}
        learner.gradient_sum.begin(complete=[p for p in behind_norm if p not in still])
    total_loss(sums, denominators, learner.loss).backward()  # type: ignore[no-untyped-call]


def _states(learner: Learner, batch: Batch) -> Tensor:
    with _autocast(learner):
        return states(learner.draft, learner.head, batch.samples, batch.blocks, learner.mask_token_id)


def _autocast(learner: Learner) -> AbstractContextManager[Any]:
    if learner.precision == torch.float32:
        return nullcontext()
    return torch.autocast(learner.device.type, learner.precision)


def to_floats(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Scalar tensors as numbers, with a single wait for the device."""
    values = torch.stack([value.detach().double() for value in sums.values()]).tolist()
    return dict(zip(sums, values, strict=True))
