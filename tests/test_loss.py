"""The losses of a slice against loops over its slots."""

import math
from typing import Any

import pytest
import torch
from reference import VOCAB, random_head
from torch import Tensor

from cache.head import TargetHead
from draft.selector import CandidateSelector
from train.loss import dflash2_loss, dflash_loss


def slots(count: int = 9) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, labels, weights and predecessors."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(count, 32, generator=generator)
    labels, before = torch.randint(0, VOCAB, (2, count), generator=generator)
    return hidden, labels, torch.rand(count, generator=generator) + 0.1, before


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
    hidden, labels, weights, _ = slots()
    head = random_head(**scales)
    found = dflash_loss(hidden, labels, weights, head)
    logits = [naive_logits(row, head) for row in hidden]
    expected = sum(w * cross_entropy(row, int(y)) for row, y, w in zip(logits, labels, weights.tolist(), strict=True))
    assert found.sums["base_loss"].item() == pytest.approx(expected, rel=1e-5)
    assert found.sums["base_weight"].item() == pytest.approx(weights.sum().item())
    assert found.hits["correct"].tolist() == [max(row) == row[int(y)] for row, y in zip(logits, labels, strict=True)]


def test_dflash2_adds_the_selector_over_its_candidates() -> None:
    hidden, labels, weights, before = slots(40)
    head, selector = random_head(), lively_selector()
    found = dflash2_loss(hidden, labels, weights, before, head, selector)
    assert found.sums["base_loss"].item() == pytest.approx(
        dflash_loss(hidden, labels, weights, head).sums["base_loss"].item()
    )
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
    hidden, labels, weights, before = slots(40)
    hidden.requires_grad_()
    found = dflash2_loss(hidden, labels, weights, before, random_head(), lively_selector())
    (gradient,) = torch.autograd.grad(found.sums["selector_loss"], hidden)
    recalled = found.hits["recalled"]
    assert (gradient[recalled].abs().sum(1) > 0).all() and (gradient[~recalled] == 0).all()


def test_no_candidate_is_the_true_token() -> None:
    hidden, _, weights, before = slots()
    head, selector = random_head(), lively_selector()
    worst = head.logits(hidden).argmin(-1)
    found = dflash2_loss(hidden, worst, weights, before, head, selector)
    assert found.sums["selector_loss"] == 0 and found.sums["selector_weight"] == 0
    assert not found.hits["correct"].any() and not found.hits["recalled"].any()
