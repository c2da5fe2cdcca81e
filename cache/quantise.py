"""Hidden states in 8 or 4 bits: one float32 scale a row, and for int8 and int4 the widest channels kept apart in bfloat16.

T rows of tokens, H hidden, C outlier channels. A value is quantised as value / scale, rounded to nearest, ties to even, where
scale = largest magnitude of the row (outlier channels aside) / LARGEST. A row of zeros has scale 0 and comes back as zeros.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from schemas.manifest import Codec

# The largest value that is used: symmetric, so int4 never is -8. 448 is the largest of float8_e4m3fn.
LARGEST: dict[Codec, float] = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}


def quantise(hidden_TH: Tensor, codec: Codec, channels: Sequence[int]) -> dict[str, Tensor]:
    """The arrays of a layer's rows, by family: "hidden", "hidden_scale" [T] and, with channels, "hidden_outliers" [T, C].

    "hidden" is uint8 [T, H] (the bits of float8_e4m3fn), int8 [T, H] (0 in outlier channels) or uint8 [T, H/2].
    """
    largest, rows_TH, arrays = LARGEST[codec], hidden_TH.float(), dict[str, Tensor]()
    if channels:
        channel_C = torch.tensor(channels, device=rows_TH.device)
        arrays["hidden_outliers"] = rows_TH.index_select(1, channel_C).to(torch.bfloat16)
        rows_TH = rows_TH.index_fill(1, channel_C, 0.0)
    scale_T = rows_TH.abs().amax(1) / largest
    # The scale is rounded, so the largest value may come out a little above; where it underflowed to 0 all is 0.
    values_TH = torch.where(scale_T[:, None] > 0, rows_TH / scale_T[:, None], 0.0).clamp_(-largest, largest)
    arrays["hidden_scale"] = scale_T
    if codec == "fp8":
        arrays["hidden"] = values_TH.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        whole_TH = values_TH.round_().to(torch.int8)
        arrays["hidden"] = whole_TH if codec == "int8" else pack_nibbles(whole_TH)
    return arrays


def dequantise(
    values_TW: Tensor, scale_T: Tensor, outliers_TC: Tensor | None, codec: Codec, channels: Sequence[int]
) -> Tensor:
    """The rows [T, H] in bfloat16; computed in float32."""
    if codec == "fp8":
        rows_TH = values_TW.view(torch.float8_e4m3fn).float()
    else:
        rows_TH = (values_TW if codec == "int8" else unpack_nibbles(values_TW)).float()
    hidden_TH = rows_TH.mul_(scale_T[:, None]).to(torch.bfloat16)
    if outliers_TC is not None:
        hidden_TH.index_copy_(1, torch.tensor(channels, device=hidden_TH.device), outliers_TC)
    return hidden_TH


def pack_nibbles(values_TH: Tensor) -> Tensor:
    """int8 values of -8..7 as two's complement nibbles, two to a byte, the first in the low one: [1, -1] is 0xF1."""
    nibble_TH = values_TH.view(torch.uint8) & 0xF
    return nibble_TH[:, 0::2] | (nibble_TH[:, 1::2] << 4)


def unpack_nibbles(packed_TW: Tensor) -> Tensor:
    """The int8 values [T, 2W] of packed nibbles."""
    byte_TW = packed_TW.view(torch.int8)
    low_TW, high_TW = (byte_TW << 4) >> 4, byte_TW >> 4
    return torch.stack([low_TW, high_TW], 2).flatten(1)
