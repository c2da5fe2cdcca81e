"""The losses of every kind of draft, each written once, over slices of slots (docs/design.md, section 4).

A kind is a function of all supervised slots of a micro-batch that returns what it measured: sums, and the gradient of each loss
among them, kept apart because their denominators are known only when the whole step has been measured. What it computes
from logits it writes as a `SliceLoss`, which sees a few slots at a time.

R supervised slots, t of them whose logits are looked at together, H hidden, V vocabulary, K candidates.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from cache.head import TargetHead
from draft.selector import CandidateSelector
from draft.sliced_head import cross_entropy_
from train.slices import candidates_backward, through_head


@dataclass(frozen=True)
class Slots:
    """The supervised slots of a micro-batch: states after the final norm, true tokens, weights, the true tokens before them."""

    hidden_RH: Tensor
    label_R: Tensor
    weight_R: Tensor
    predecessor_R: Tensor


@dataclass(frozen=True)
class Measured:
    """What the slots add to the step: scalar `sums`, per-slot `hits` (bool [R]), and the gradients of the losses among the sums.

    By the loss's name: `slot_gradients` with respect to `hidden_RH` (float32 [R, H]), `parameter_gradients` with respect to
    parameters that act behind the final norm (a selector's). All are gradients of the plain sum, before any denominator.
    """

    sums: Mapping[str, Tensor]
    hits: Mapping[str, Tensor]
    slot_gradients: Mapping[str, Tensor]
    parameter_gradients: Mapping[str, dict[nn.Parameter, Tensor]] = field(default_factory=dict)

    def take_parameter_gradients(self, other: "Measured") -> None:
        """Add another micro-batch's gradients of parameters to these, and leave it without: one set serves a whole step."""
        for name, gradients in other.parameter_gradients.items():
            for parameter, gradient in gradients.items():
                self.parameter_gradients[name][parameter].add_(gradient)
            gradients.clear()


@torch.no_grad()
def dflash_loss(slots: Slots, head: TargetHead, rows: int) -> Measured:
    """Weighted cross-entropy of each slot's own token (DFlash, arXiv 2602.06036, section 4).

    Sums: `base_loss` and `base_weight`, its denominator. Hits: `correct`, where the largest logit is the token's.
    """
    correct_R = torch.empty_like(slots.label_R, dtype=torch.bool)

    def slice_loss(part: slice, logits_tV: Tensor) -> Tensor:
        top_t1, best_t1 = logits_tV.max(-1, keepdim=True)
        correct_R[part] = best_t1[:, 0] == slots.label_R[part]
        return cross_entropy_(logits_tV, slots.label_R[part, None], top_t1, best_t1)

    loss_R, gradient_RH = through_head(slots.hidden_RH, head, rows, slice_loss)
    sums = {"base_loss": (loss_R * slots.weight_R).sum(), "base_weight": slots.weight_R.sum()}
    return Measured(sums, {"correct": correct_R}, {"base_loss": gradient_RH.mul_(slots.weight_R[:, None])})


@torch.no_grad()
def dflash2_loss(slots: Slots, head: TargetHead, rows: int, selector: CandidateSelector) -> Measured:
    """The backbone's cross-entropy, and the selector's over its candidates given the true token before each slot.

    A slot whose true token is no candidate is in the first and not in the second. Nothing is detached: the selector's loss also
    trains the backbone, through the candidates' logits and the hidden state. Sums: those of `dflash_loss`, `selector_loss`,
    `selector_weight`. Hits: `base_correct` of the backbone, `recalled` (the token is a candidate), `correct` of the selector.
    """
    shape, device = (len(slots.label_R), selector.top_k), slots.label_R.device
    candidate_RK = torch.empty(shape, dtype=torch.int64, device=device)
    unary_RK, score_gradient_RK = torch.empty(2, *shape, device=device)
    selector_loss_R = torch.empty(shape[0], device=device)
    hits = {name: torch.empty_like(slots.label_R, dtype=torch.bool) for name in ("base_correct", "recalled", "correct")}

    def slice_loss(part: slice, logits_tV: Tensor) -> Tensor:
        unary_tK, candidate_tK = logits_tV.topk(selector.top_k, -1)
        unary_RK[part], candidate_RK[part] = unary_tK, candidate_tK
        match_tK = candidate_tK == slots.label_R[part, None]
        scores_tK = selector.scores(slots.hidden_RH[part].float(), unary_tK, candidate_tK, slots.predecessor_R[part])
        log_probability_tK = scores_tK.log_softmax(-1)
        recalled_t = match_tK.any(1)
        hits["base_correct"][part], hits["recalled"][part] = match_tK[:, 0], recalled_t
        hits["correct"][part] = recalled_t & (scores_tK.argmax(1) == match_tK.int().argmax(1))
        # A slot without its token among the candidates has no match, hence loss 0, and its gradient is cleared.
        selector_loss_R[part] = -log_probability_tK.masked_fill(~match_tK, 0.0).sum(1)
        score_gradient_RK[part] = (log_probability_tK.exp() - match_tK.float()).masked_fill(~recalled_t[:, None], 0.0)
        return cross_entropy_(logits_tV, slots.label_R[part, None], unary_tK[:, :1], candidate_tK[:, :1])

    loss_R, base_gradient_RH = through_head(slots.hidden_RH, head, rows, slice_loss)
    weight_R = slots.weight_R
    sums = {
        "base_loss": (loss_R * weight_R).sum(),
        "base_weight": weight_R.sum(),
        "selector_loss": (selector_loss_R * weight_R).sum(),
        "selector_weight": (hits["recalled"] * weight_R).sum(),
    }
    score_gradient_RK.mul_(weight_R[:, None])
    selector_gradient_RH, parameters = selector.scores_backward(
        slots.hidden_RH.float(), candidate_RK, slots.predecessor_R, score_gradient_RK
    )
    selector_gradient_RH += candidates_backward(head, candidate_RK, unary_RK, score_gradient_RK)
    slot_gradients = {"base_loss": base_gradient_RH.mul_(weight_R[:, None]), "selector_loss": selector_gradient_RH}
    return Measured(sums, hits, slot_gradients, {"selector_loss": parameters})
