"""The losses of a slice against loops over its slots."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from reference import VOCAB, random_head
from torch import Tensor

from cache.head import TargetHead
from draft.selector import CandidateSelector
from draft.sliced_head import cross_entropy_
from train.loss import Slots, dflash2_loss, dflash_loss

ROWS = 7


def slots(count: int = 9) -> Slots:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(count, 32, generator=generator)
    labels, before = torch.randint(0, VOCAB, (2, count), generator=generator)
    return Slots(hidden, labels, torch.rand(count, generator=generator) + 0.1, before)


def lively_selector() -> CandidateSelector:
    selector = CandidateSelector(VOCAB, 32, 6, 12)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in selector.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return selector


def naive_logits(hidden: Tensor, head: TargetHead) -> list[float]:
    logits = [float(row.double() @ hidden.double()) * head.logit_scale for row in head.lm_head_VH]
    cap = head.logit_softcap
    return logits if cap is None else [cap * math.tanh(value / cap) for value in logits]


def cross_entropy(scores: list[float], index: int) -> float:
    return math.log(sum(math.exp(score) for score in scores)) - scores[index]


@pytest.mark.parametrize("scales", [{}, {"logit_scale": 0.5, "logit_softcap": 2.0}])
def test_dflash_is_weighted_cross_entropy(scales: dict[str, Any]) -> None:
    given, head = slots(), random_head(**scales)
    hidden, labels, weights = given.hidden_RH, given.label_R, given.weight_R
    found = dflash_loss(given, head, ROWS)
    logits = [naive_logits(row, head) for row in hidden]
    expected = sum(w * cross_entropy(row, int(y)) for row, y, w in zip(logits, labels, weights.tolist(), strict=True))
    assert found.sums["base_loss"].item() == pytest.approx(expected, rel=1e-5)
    assert found.sums["base_weight"].item() == pytest.approx(weights.sum().item())
    assert found.hits["correct"].tolist() == [max(row) == row[int(y)] for row, y in zip(logits, labels, strict=True)]


def test_dflash2_adds_the_selector_over_its_candidates() -> None:
    given, head, selector = slots(40), random_head(), lively_selector()
    hidden, labels, weights, before = given.hidden_RH, given.label_R, given.weight_R, given.predecessor_R
    found = dflash2_loss(given, head, ROWS, selector)
    assert found.sums["base_loss"].item() == pytest.approx(dflash_loss(given, head, ROWS).sums["base_loss"].item())
    total, weight, correct, recalled = 0.0, 0.0, [], []
    for row, label, slot_weight, previous in zip(
        hidden, labels.tolist(), weights.tolist(), before.tolist(), strict=True
    ):
        logits = naive_logits(row, head)
        candidates = sorted(range(VOCAB), key=lambda token: -logits[token])[: selector.top_k]
        recalled.append(label in candidates)
        left = (selector.predecessor_codebook[previous] * (selector.hidden_projection.weight @ row)).detach()
        scores = [logits[token] + float(left @ selector.successor_codebook[token].detach()) for token in candidates]
        correct.append(recalled[-1] and candidates[scores.index(max(scores))] == label)
        if recalled[-1]:
            total += slot_weight * cross_entropy(scores, candidates.index(label))
            weight += slot_weight
    assert 0 < sum(recalled) < 40 and any(correct), "the slots show nothing"
    assert found.sums["selector_loss"].item() == pytest.approx(total, rel=1e-4)
    assert found.sums["selector_weight"].item() == pytest.approx(weight, rel=1e-5)
    assert found.hits["recalled"].tolist() == recalled
    assert found.hits["correct"].tolist() == correct


def test_the_selectors_loss_reaches_the_backbone() -> None:
    found = dflash2_loss(slots(40), random_head(), ROWS, lively_selector())
    gradient, recalled = found.slot_gradients["selector_loss"], found.hits["recalled"]
    assert (gradient[recalled].abs().sum(1) > 0).all() and (gradient[~recalled] == 0).all()


def test_no_candidate_is_the_true_token() -> None:
    given, head, selector = slots(), random_head(), lively_selector()
    worst = replace(given, label_R=head.logits(given.hidden_RH).argmin(-1))
    found = dflash2_loss(worst, head, ROWS, selector)
    assert found.sums["selector_loss"] == 0 and found.sums["selector_weight"] == 0
    assert not found.hits["correct"].any() and not found.hits["recalled"].any()
    assert all((gradient == 0).all() for gradient in found.parameter_gradients["selector_loss"].values())


@pytest.mark.parametrize("spread", [1e-4, 1.0, 300.0])
def test_cross_entropy_in_place_is_the_definition_however_far_the_logits_spread(spread: float) -> None:
    """At a spread of 300 the label's own probability is below the smallest float32: its loss must not be infinite."""
    generator = torch.Generator().manual_seed(0)
    logits, label = torch.randn(30, 50, generator=generator) * spread, torch.arange(30)
    wide = logits.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(wide, label, reduction="none")
    expected.sum().backward()
    loss = cross_entropy_(logits, label[:, None], *logits.max(-1, keepdim=True))
    assert torch.allclose(loss.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    assert wide.grad is not None and torch.allclose(logits.double(), wide.grad, atol=2e-6 * max(1.0, spread))
