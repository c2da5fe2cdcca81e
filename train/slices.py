"""The frozen head on a few slots at a time, forwards and backwards: the logits of all slots never exist together.

R supervised slots, r slots of a slice, H hidden, V vocabulary, K candidates.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from cache.head import TargetHead

# Takes the slots of a slice and their logits (float32 [r, V]); returns each slot's loss [r] and leaves in place of the logits
# that loss's gradient with respect to them. What else it wants to know of the logits, it keeps itself.
SliceLoss = Callable[[slice, Tensor], Tensor]

# On a CPU, rows enough for the head's weights to be read seldom, and few enough for the slice to stay small beside them; a GPU
# needs more rows to fill its processors, and has the memory for them.
CPU_VALUES, CPU_ROWS = 1 << 20, 256
GPU_VALUES, GPU_ROWS = 1 << 27, 256


def slice_rows(vocab_size: int, device: torch.device) -> int:
    """How many slots a slice holds by default: whole tiles of a GPU's product."""
    values, least = (CPU_VALUES, CPU_ROWS) if device.type == "cpu" else (GPU_VALUES, GPU_ROWS)
    return max(least, values // vocab_size // 128 * 128)


class SlicedHead:
    """`TargetHead.logits` and its backward pass for at most `rows` slots, in buffers that every slice uses again.

    The products run in the head's own type; logits and gradients are float32 between them.
    """

    def __init__(self, head: TargetHead, rows: int) -> None:
        self.head, weight_VH = head, head.lm_head_VH
        self._product_RV = weight_VH.new_empty(rows, len(weight_VH))
        float32 = weight_VH.dtype == torch.float32
        self._logits_RV = self._product_RV if float32 else torch.empty_like(self._product_RV, dtype=torch.float32)
        self._slope_RV = None if head.logit_softcap is None else torch.empty_like(self._logits_RV)

    def logits(self, hidden_rH: Tensor) -> Tensor:
        """Logits [r, V], in a buffer that the caller may overwrite and the next call will."""
        product_rV, logits_rV = self._product_RV[: len(hidden_rH)], self._logits_RV[: len(hidden_rH)]
        weight_VH, cap = self.head.lm_head_VH, self.head.logit_softcap
        torch.mm(hidden_rH.to(weight_VH.dtype), weight_VH.T, out=product_rV)
        if self._logits_RV is not self._product_RV:
            logits_rV.copy_(product_rV)
        if self.head.logit_scale != 1.0:
            logits_rV.mul_(self.head.logit_scale)
        if cap is not None:
            assert self._slope_RV is not None
            logits_rV.div_(cap).tanh_()
            torch.mul(logits_rV, logits_rV, out=self._slope_RV[: len(hidden_rH)]).neg_().add_(1.0)
            logits_rV.mul_(cap)
        return logits_rV

    def backward(self, gradient_rV: Tensor, out_rH: Tensor) -> None:
        """From the gradient of the last slice's logits (their buffer, overwritten) to that of its hidden states."""
        if self._slope_RV is not None:
            gradient_rV.mul_(self._slope_RV[: len(gradient_rV)])
        product_rV = self._product_RV[: len(gradient_rV)]
        if self._logits_RV is not self._product_RV:
            product_rV.copy_(gradient_rV)
        # Copied where the head's type is not float32, otherwise computed in place.
        same = out_rH.dtype == product_rV.dtype
        hidden_rH = torch.mm(product_rV, self.head.lm_head_VH, out=out_rH if same else None)
        if not same:
            out_rH.copy_(hidden_rH)
        if self.head.logit_scale != 1.0:
            out_rH.mul_(self.head.logit_scale)


def through_head(hidden_RH: Tensor, head: TargetHead, rows: int, slice_loss: SliceLoss) -> tuple[Tensor, Tensor]:
    """Each slot's loss [R], and that loss's gradient with respect to the slot's hidden state, both float32.

    Two products with the head per slot, the fewest there can be, and `rows` slots of logits at a time.
    """
    sliced = SlicedHead(head, min(rows, len(hidden_RH)))
    loss_R = torch.empty(len(hidden_RH), device=hidden_RH.device)
    gradient_RH = torch.empty_like(hidden_RH, dtype=torch.float32)
    for start in range(0, len(hidden_RH), rows):
        part = slice(start, min(start + rows, len(hidden_RH)))
        logits_rV = sliced.logits(hidden_RH[part])
        loss_R[part] = slice_loss(part, logits_rV)
        sliced.backward(logits_rV, gradient_RH[part])
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
