"""How hidden states become bytes and come back.

T rows of tokens, H hidden. On disk a bfloat16 value is its 16 bits as uint16.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from schemas.errors import OptionError
from schemas.manifest import Codec

AVAILABLE: tuple[Codec, ...] = ("f32", "bf16")


def check_codec(codec: Codec) -> Codec:
    """The codec, or OptionError where this version of the program cannot write or read it yet."""
    if codec not in AVAILABLE:
        raise OptionError(
            f"codec {codec}: the format defines it, this version writes and reads {', '.join(AVAILABLE)}: use one of them"
        )
    return codec


def encode(hidden_TH: Tensor, codec: Codec) -> dict[str, NDArray[np.generic]]:
    """Rows of hidden states as the arrays that hold them, by family ("hidden", later "hidden_scale" ...)."""
    if codec == "f32":
        return {"hidden": hidden_TH.to(torch.float32).cpu().numpy()}
    if codec == "bf16":
        return {"hidden": hidden_TH.to(torch.bfloat16).cpu().view(torch.int16).numpy().view(np.uint16)}
    raise AssertionError(f"codec {codec} was not checked")


def decode(arrays: dict[str, NDArray[np.generic]], codec: Codec) -> Tensor:
    """The hidden states [T, H] that `encode` stored: float32 for f32, bfloat16 for bf16."""
    hidden = np.ascontiguousarray(arrays["hidden"])
    if codec == "f32":
        return torch.from_numpy(hidden)
    if codec == "bf16":
        return torch.from_numpy(hidden.view(np.int16)).view(torch.bfloat16)
    raise AssertionError(f"codec {codec} was not checked")


def roundtrip(hidden: Tensor, codec: Codec) -> Tensor:
    """What a draft would read of these states (any shape [..., H]) from a cache: same shape, the codec's own precision."""
    if codec == "f32":
        return hidden.to(torch.float32)
    if codec == "bf16":
        return hidden.to(torch.bfloat16)
    raise AssertionError(f"codec {codec} was not checked")
