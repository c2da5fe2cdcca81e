"""The frozen head on a few slots at a time, forwards and backwards, in buffers that every slice uses again.

Logits of all slots never exist together, and memory fresh from the system for those of a slice would cost as much time as the
product that fills it. r slots of a slice, t of them at a time, H hidden, V vocabulary.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from cache.head import TargetHead

# On a CPU, rows enough for the head's weights to be read seldom (256 in float32, 512 in bfloat16), and few enough for the slice to
# stay small beside them; a GPU needs more rows to fill its processors, and has the memory for them.
CPU_VALUES, CPU_BYTES = 1 << 20, 1024
GPU_VALUES, GPU_ROWS = 1 << 27, 256
# The logits of a slice are gone over several times: on a CPU few enough at a time for them to stay in its cache, 6 MB of 49,152.
CPU_TILE = 32


def slice_rows(vocab_size: int, device: torch.device, dtype: torch.dtype) -> int:
    """How many slots a slice holds by default, of products in `dtype`: whole tiles of a GPU's product."""
    values, least = (CPU_VALUES, CPU_BYTES // dtype.itemsize) if device.type == "cpu" else (GPU_VALUES, GPU_ROWS)
    return max(least, values // vocab_size // 128 * 128)


def tile_rows(device: torch.device, rows: int) -> int:
    """How many slots of a slice have their logits looked at together."""
    return min(rows, max(CPU_TILE, torch.get_num_threads())) if device.type == "cpu" else rows


def cut(start: int, stop: int, rows: int) -> Iterator[slice]:
    """What lies from `start` to `stop`, `rows` at a time."""
    return (slice(first, min(first + rows, stop)) for first in range(start, stop, rows))


class SlicedHead:
    """`TargetHead.logits` and its backward pass for a slice of at most `rows` slots, in buffers that every slice uses again.

    The products run over the slice, in the head's own type; between them are logits and gradients in float32, of `tile` slots
    at a time. `multiply`, then `logits` and `take` for each run of slots, then `backward`.
    """

    def __init__(self, head: TargetHead, rows: int, tile: int) -> None:
        self.head, self.tile = head, tile
        self._product_RV = head.lm_head_VH.new_empty(rows, len(head.lm_head_VH))
        part_tV = self._product_RV[:tile]
        # Where the products are in float32, their own buffer holds the logits.
        apart = head.lm_head_VH.dtype != torch.float32
        self._apart_tV = torch.empty_like(part_tV, dtype=torch.float32) if apart else None
        self._slope_tV = None if head.logit_softcap is None else torch.empty_like(part_tV, dtype=torch.float32)

    def multiply(self, hidden_rH: Tensor) -> None:
        """Take the next slice's states."""
        weight_VH = self.head.lm_head_VH
        torch.mm(hidden_rH.to(weight_VH.dtype), weight_VH.T, out=self._product_RV[: len(hidden_rH)])

    def logits(self, part: slice) -> Tensor:
        """Logits [t, V] of a run of the slice's slots, in a buffer that the caller may overwrite and the next call will."""
        logits_tV, cap = self._product_RV[part], self.head.logit_softcap
        if self._apart_tV is not None:
            logits_tV = self._apart_tV[: len(logits_tV)].copy_(logits_tV)
        if self.head.logit_scale != 1.0:
            logits_tV.mul_(self.head.logit_scale)
        if cap is not None:
            assert self._slope_tV is not None
            logits_tV.div_(cap).tanh_()
            torch.mul(logits_tV, logits_tV, out=self._slope_tV[: len(logits_tV)]).neg_().add_(1.0)
            logits_tV.mul_(cap)
        return logits_tV

    def all_logits(self, hidden_rH: Tensor) -> Tensor:
        """Logits [r, V] of at most `tile` slots, where no gradient is to follow."""
        self.multiply(hidden_rH)
        return self.logits(slice(0, len(hidden_rH)))

    def take(self, part: slice, gradient_tV: Tensor) -> None:
        """The gradient of the logits last asked for, in their own buffer, which is overwritten."""
        if self._slope_tV is not None:
            gradient_tV.mul_(self._slope_tV[: len(gradient_tV)])
        if self._apart_tV is not None:
            self._product_RV[part].copy_(gradient_tV)

    def backward(self, out_rH: Tensor) -> None:
        """From the gradients of the slice's logits, all taken, to those of its states."""
        product_rV = self._product_RV[: len(out_rH)]
        # Copied where the head's type is not float32, otherwise computed in place.
        same = out_rH.dtype == product_rV.dtype
        hidden_rH = torch.mm(product_rV, self.head.lm_head_VH, out=out_rH if same else None)
        if not same:
            out_rH.copy_(hidden_rH)
        if self.head.logit_scale != 1.0:
            out_rH.mul_(self.head.logit_scale)


def cross_entropy_(logits_tV: Tensor, label_t1: Tensor, top_t1: Tensor, best_t1: Tensor) -> Tensor:
    """Cross-entropy [t] of each row's label, given each row's largest logit and where it is; its gradient replaces the logits.

    The gradient is softmax - one-hot. The loss comes from the probability of the largest logit, which is at least 1 / V, and not
    of the label, which may be too small for a float32.
    """
    label_logit_t1 = logits_tV.gather(1, label_t1)
    # Each row is read in full before any of it is written: in place, and a third of the time that a fresh result takes.
    torch.softmax(logits_tV, -1, out=logits_tV)
    loss_t1 = (top_t1 - label_logit_t1) - logits_tV.gather(1, best_t1).log()
    logits_tV.scatter_add_(1, label_t1, torch.full_like(loss_t1, -1.0))
    return loss_t1[:, 0]
