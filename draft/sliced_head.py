"""The frozen head on a few slots at a time, forwards and backwards, in buffers that every slice uses again.

Logits of all slots never exist together, and memory fresh from the system for those of a slice would cost as much time as the
product that fills it. r slots of a slice, H hidden, V vocabulary.
"""

import torch
from torch import Tensor

from cache.head import TargetHead

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


def cross_entropy_(logits_rV: Tensor, label_r1: Tensor, top_r1: Tensor, best_r1: Tensor) -> Tensor:
    """Cross-entropy [r] of each row's label, given each row's largest logit and where it is; its gradient replaces the logits.

    The gradient is softmax - one-hot. The loss comes from the probability of the largest logit, which is at least 1 / V, and not
    of the label, which may be too small for a float32.
    """
    label_logit_r1 = logits_rV.gather(1, label_r1)
    # Each row is read in full before any of it is written: in place, and a third of the time that a fresh result takes.
    torch.softmax(logits_rV, -1, out=logits_rV)
    loss_r1 = (top_r1 - label_logit_r1) - logits_rV.gather(1, best_r1).log()
    logits_rV.scatter_add_(1, label_r1, torch.full_like(loss_r1, -1.0))
    return loss_r1[:, 0]
