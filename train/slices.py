"""The frozen head on a few slots at a time, forwards and backwards: the logits of all slots never exist together.

R supervised slots, t of them whose logits are looked at together, H hidden, V vocabulary, K candidates.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from cache.head import TargetHead
from draft.sliced_head import SlicedHead, cut, tile_rows

# Takes some slots and their logits (float32 [t, V]); returns each slot's loss [t] and leaves in place of the logits
# that loss's gradient with respect to them. What else it wants to know of the logits, it keeps itself.
SliceLoss = Callable[[slice, Tensor], Tensor]


def through_head(hidden_RH: Tensor, head: TargetHead, rows: int, slice_loss: SliceLoss) -> tuple[Tensor, Tensor]:
    """Each slot's loss [R], and that loss's gradient with respect to the slot's hidden state, both float32.

    Two products with the head per slot, the fewest there can be, and `rows` slots of logits at a time.
    """
    rows = min(rows, len(hidden_RH))
    sliced = SlicedHead(head, rows, tile_rows(hidden_RH.device, rows))
    loss_R = torch.empty(len(hidden_RH), device=hidden_RH.device)
    gradient_RH = torch.empty_like(hidden_RH, dtype=torch.float32)
    for part in cut(0, len(hidden_RH), max(rows, 1)):
        sliced.multiply(hidden_RH[part])
        for slots in cut(part.start, part.stop, sliced.tile):
            within = slice(slots.start - part.start, slots.stop - part.start)
            logits_tV = sliced.logits(within)
            loss_R[slots] = slice_loss(slots, logits_tV)
            sliced.take(within, logits_tV)
        sliced.backward(gradient_RH[part])
    return loss_R, gradient_RH


def candidates_backward(head: TargetHead, candidate_RK: Tensor, logit_RK: Tensor, gradient_RK: Tensor) -> Tensor:
    """From the gradient of a few logits of each slot to that of its hidden state, [R, H] float32.

    `logit_RK` are the logits of `candidate_RK` (after multiplier and soft cap): K rows of the head a slot, instead of V.
    """
    gradient_RK = gradient_RK * head.logit_scale
    if head.logit_softcap is not None:
        gradient_RK = gradient_RK * (1.0 - (logit_RK / head.logit_softcap).square())
    weight_VH = head.lm_head_VH
    per_sample_RK = gradient_RK.to(weight_VH.dtype)
    return F.embedding_bag(candidate_RK, weight_VH, per_sample_weights=per_sample_RK, mode="sum").float()
