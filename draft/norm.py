"""Root-mean-square norm with float32 weights: in bfloat16 a weight that starts at 1.0 is too coarse to leave it."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Qwen3's norm: statistics in float32, the result in the input's type. The weight stays float32 under any cast of the draft."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        """Normalise the last axis of [..., size]."""
        wide = states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(states.dtype) * wide.to(states.dtype)
