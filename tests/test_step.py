"""What a step costs: how often the trunk and the head see a slot, and that one set of a selector's gradients serves all."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from train_fixtures import options, train_cache

from draft.blocks import block_valid
from draft.sliced_head import SlicedHead
from schemas.say import Silent
from train.batch import Batch, read_batches
from train.loss import Measured
from train.setup import Job, prepare
from train.step import accumulate
from train.stream import MicroBatch, StreamState


def window(tmp_path: Path, kind: str) -> tuple[Job, list[Batch]]:
    job = prepare(options(draft={"kind": kind}), train_cache(tmp_path / "c"), str(tmp_path / "r"), False, Silent())
    micros = [MicroBatch(0, rows, StreamState(), False) for rows in ((0, 1), (2,), (4, 5, 6))]
    return job, list(read_batches(job.cache, job.draw, micros))


@pytest.mark.parametrize(("kind", "forwards"), [("dflash", 3), ("dflash2", 3 + 2)])
def test_each_slot_reaches_the_head_once_and_the_trunk_is_run_again_only_for_a_selector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, forwards: int
) -> None:
    job, batches = window(tmp_path, kind)
    through_head: list[int] = []
    with_graph: list[bool] = []
    real = SlicedHead.multiply

    def watched(self: SlicedHead, hidden_rH: Tensor) -> None:
        through_head.append(len(hidden_rH))
        real(self, hidden_rH)

    monkeypatch.setattr(SlicedHead, "multiply", watched)
    job.learner.draft.register_forward_hook(lambda _m, _i, output: with_graph.append(output.requires_grad))
    sums = accumulate(job.learner, batches).sums
    valid = sum(int(block_valid(batch.samples, batch.blocks).sum()) for batch in batches)
    assert sum(through_head) == valid == sums["valid"] > 0
    assert len(with_graph) == forwards and sum(with_graph) == 3, "a graph that is not used, or none where one is"


def test_a_window_holds_one_set_of_the_selectors_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The codebooks of a large vocabulary are as large as a head: one gradient each, however many micro-batches."""
    job, batches = window(tmp_path, "dflash2")
    left: list[int] = []
    real = Measured.take_parameter_gradients

    def watched(self: Measured, other: Measured) -> None:
        real(self, other)
        left.append(sum(len(gradients) for gradients in other.parameter_gradients.values()))

    monkeypatch.setattr(Measured, "take_parameter_gradients", watched)
    accumulate(job.learner, batches)
    assert left == [0, 0]


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_a_step_has_the_same_bits_again(tmp_path: Path, kind: str) -> None:
    job, batches = window(tmp_path, kind)
    seen = []
    for _ in range(2):
        job.learner.optimizers.zero_grad()
        accumulate(job.learner, batches)
        seen.append(
            [parameter.grad.clone() for parameter in job.learner.draft.parameters() if parameter.grad is not None]
        )
    assert len(seen[0]) == len(list(job.learner.draft.parameters()))
    assert all(torch.equal(one, two) for one, two in zip(*seen, strict=True))
