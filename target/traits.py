"""What a draft's author wants to know of the target beyond its sizes, as the manifest's record says it.

H hidden size.
"""

import json
from typing import Any

import torch
from torch.func import functional_call

from target.layers import final_norm
from target.load import Target

OFFSET = 2.0


def target_record(target: Target) -> dict[str, str]:
    """`norm`: flavour of the final norm; `norm_eps`; `rope`: rotary theta and scaling as the config has them, in JSON."""
    norm, rope = final_norm(target.decoder), getattr(target.config, "rope_parameters", None)
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return {
        "norm": norm_flavour(norm, target.config.hidden_size),
        "norm_eps": "unknown" if epsilon is None else f"{epsilon:g}",
        "rope": "none" if not rope else json.dumps(_plain(rope), sort_keys=True),
    }


@torch.no_grad()
def norm_flavour(norm: Any, hidden_size: int) -> str:
    """ "rms, weight", "rms, 1 + weight" or "layer, weight": told by what it computes; else the name of its class."""
    x_H = torch.linspace(-1, 1, hidden_size, device=norm.weight.device) ** 3 + OFFSET
    rms_H = x_H / x_H.square().mean().sqrt()
    layer_H = (x_H - x_H.mean()) / x_H.std(unbiased=False)
    # With weights of our own: the norm's are left alone, wherever and however sharded they lie.
    at_zero_H, at_one_H = (
        functional_call(norm, {"weight": torch.full_like(x_H, value)}, (x_H[None],))[0] for value in (0.0, 1.0)
    )
    for name, unit_H in (("rms", rms_H), ("layer", layer_H)):
        for shown, offset in (("weight", 0.0), ("1 + weight", 1.0)):
            expected = zip((at_zero_H, at_one_H), (offset, offset + 1), strict=True)
            if all(torch.allclose(found_H, unit_H * scale, atol=1e-3) for found_H, scale in expected):
                return f"{name}, {shown}"
    return type(norm).__name__


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value
