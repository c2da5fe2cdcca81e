"""The frozen ends of the target that a draft borrows: its embedding rows and its language-model head.

R rows, V vocabulary, H hidden.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class TargetHead:
    """The target's embedding and head, as `target/head.safetensors` holds them; `lm_head_VH` is `embed_VH` where they are tied."""

    embed_VH: Tensor
    lm_head_VH: Tensor
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    def embed(self, ids: Tensor) -> Tensor:
        """Embedding rows times the target's embedding scale: [...] ids -> [..., H]."""
        rows = F.embedding(ids, self.embed_VH)
        return rows if self.embedding_scale == 1.0 else rows * self.embedding_scale

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Logits [R, V], after the target's multiplier and soft cap. The gradient reaches `hidden_RH` alone."""
        logits_RV = F.linear(hidden_RH, self.lm_head_VH)
        if self.logit_scale != 1.0:
            logits_RV = logits_RV * self.logit_scale
        if self.logit_softcap is not None:
            logits_RV = torch.tanh(logits_RV / self.logit_softcap) * self.logit_softcap
        return logits_RV

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "TargetHead":
        """The same head elsewhere; tied weights stay one tensor."""
        embed_VH = self.embed_VH.to(device, dtype)
        lm_head_VH = embed_VH if self.lm_head_VH is self.embed_VH else self.lm_head_VH.to(device, dtype)
        return TargetHead(embed_VH, lm_head_VH, self.embedding_scale, self.logit_scale, self.logit_softcap)
