"""The losses, each written once as a function of a slice of slots that returns sums (docs/design.md, section 4).

R supervised slots of a slice, H hidden, V vocabulary, K candidates.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cache.head import TargetHead
from draft.selector import CandidateSelector


@dataclass(frozen=True)
class SliceLoss:
    """What a slice adds to the step: scalar `sums`, differentiable where they are losses, and per-slot `hits` (bool [R])."""

    sums: dict[str, Tensor]
    hits: dict[str, Tensor]


class _TokenLoss(torch.autograd.Function):
    """Cross-entropy [R] of each row's label, and the logits [R, K] of its candidates.

    Autograd's own backward of the two makes four tensors of [R, V], which dominate a step; this one makes one.
    """

    @staticmethod
    def forward(ctx: Any, logits_RV: Tensor, label_R: Tensor, candidate_RK: Tensor) -> tuple[Tensor, Tensor]:
        log_probability_RV = logits_RV.log_softmax(-1)
        ctx.save_for_backward(log_probability_RV, label_R, candidate_RK)
        loss_R = -log_probability_RV.gather(1, label_R[:, None])[:, 0]
        return loss_R, logits_RV.gather(1, candidate_RK)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        log_probability_RV, label_R, candidate_RK = ctx.saved_tensors
        loss_R1, candidate_gradient_RK = gradients[0][:, None], gradients[1]
        gradient_RV = log_probability_RV.exp().mul_(loss_R1)
        gradient_RV.scatter_add_(1, label_R[:, None], -loss_R1)
        return gradient_RV.scatter_add_(1, candidate_RK, candidate_gradient_RK), None, None


def _token_loss(logits_RV: Tensor, label_R: Tensor, candidate_RK: Tensor) -> tuple[Tensor, Tensor]:
    loss_R, unary_RK = _TokenLoss.apply(logits_RV, label_R, candidate_RK)  # type: ignore[no-untyped-call]
    return loss_R, unary_RK


def dflash_loss(hidden_RH: Tensor, label_R: Tensor, weight_R: Tensor, head: TargetHead) -> SliceLoss:
    """Weighted cross-entropy of each slot's own token (DFlash, arXiv 2602.06036, section 4).

    Sums: `base_loss` and `base_weight`, its denominator. Hits: `correct`, where the largest logit is the token's.
    """
    logits_RV = head.logits(hidden_RH).float()
    best_R1 = logits_RV.detach().argmax(-1, keepdim=True)
    loss_R, _ = _token_loss(logits_RV, label_R, best_R1)
    sums = {"base_loss": (loss_R * weight_R).sum(), "base_weight": weight_R.sum()}
    return SliceLoss(sums, {"correct": best_R1[:, 0] == label_R})


def dflash2_loss(
    hidden_RH: Tensor,
    label_R: Tensor,
    weight_R: Tensor,
    predecessor_R: Tensor,
    head: TargetHead,
    selector: CandidateSelector,
) -> SliceLoss:
    """The backbone's cross-entropy, and the selector's over its candidates given the true token before each slot.

    A slot whose true token is no candidate is in the first and not in the second. Nothing is detached: the selector's loss also
    trains the backbone through the candidates' logits. Sums: those of `dflash_loss`, `selector_loss`, `selector_weight`. Hits:
    `base_correct` of the backbone, `recalled` (the token is a candidate), `correct` of the selector.
    """
    logits_RV = head.logits(hidden_RH).float()
    candidate_RK = logits_RV.detach().topk(selector.top_k, -1).indices
    loss_R, unary_RK = _token_loss(logits_RV, label_R, candidate_RK)
    match_RK = candidate_RK == label_R[:, None]
    recalled_R = match_RK.any(1)
    kept = recalled_R.nonzero()[:, 0]
    kept_inputs = (tensor.index_select(0, kept) for tensor in (hidden_RH, unary_RK, candidate_RK, predecessor_R))
    scores_RK = selector.scores(*kept_inputs).float()
    slot_R = match_RK[kept].int().argmax(1)
    kept_weight = weight_R[kept]
    sums = {
        "base_loss": (loss_R * weight_R).sum(),
        "base_weight": weight_R.sum(),
        "selector_loss": (F.cross_entropy(scores_RK, slot_R, reduction="none") * kept_weight).sum(),
        "selector_weight": kept_weight.sum(),
    }
    correct_R = torch.zeros_like(recalled_R).index_copy(0, kept, scores_RK.argmax(1) == slot_R)
    return SliceLoss(sums, {"base_correct": match_RK[:, 0], "recalled": recalled_R, "correct": correct_R})
