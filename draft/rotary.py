"""Rotary position embedding with frequencies fixed in float32, whatever the draft's own type (docs/design.md, section 4).

D head size; ... any leading shape.
"""

import torch
from torch import Tensor

from schemas.draft import DraftConfig


class Rotary:
    """The cosines and sines of a config's `rope_parameters`; no module, so no cast or state dict ever reaches the frequencies."""

    def __init__(self, config: DraftConfig) -> None:
        self.inv_freq_D, self.scaling = _frequencies(config)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [..., D/2] float32, of integer positions [...]."""
        self.inv_freq_D = self.inv_freq_D.to(positions.device)
        angles = positions[..., None].to(torch.float32) * self.inv_freq_D
        return angles.cos() * self.scaling, angles.sin() * self.scaling


def _frequencies(config: DraftConfig) -> tuple[Tensor, float]:
    """Inverse frequencies [D/2] float32 and the factor of yarn's attention, from the library that the targets run on."""
    if config.rope_parameters["rope_type"] == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return 1.0 / (config.rope_parameters["rope_theta"] ** exponents), 1.0
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    plain = Qwen3Config(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(config.rope_parameters),
    )
    inv_freq_D, scaling = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](plain, torch.device("cpu"))
    return inv_freq_D.to(torch.float32), float(scaling)


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [..., heads, D] by angles [..., D/2]: the first half of a head pairs with its second half, as in Llama and Qwen."""
    cos, sin = cos.to(states.dtype)[..., None, :], sin.to(states.dtype)[..., None, :]
    first, second = states.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
