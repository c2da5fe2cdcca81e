"""How hidden states become bytes and come back.

T rows of tokens, L layers, H hidden, W stored columns. On disk a bfloat16 value is its 16 bits as uint16.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache.quantise import dequantise, quantise
from schemas.arrays import OUTLIER_CHANNELS, SCALED, WITH_OUTLIERS
from schemas.errors import OptionError
from schemas.manifest import Codec

# The wide channels of each layer, ascending.
Channels = Mapping[int, tuple[int, ...]]


def check_codec(codec: Codec, hidden_size: int) -> Codec:
    """The codec, or OptionError where a target of that hidden size cannot be stored with it."""
    if codec in WITH_OUTLIERS and hidden_size <= OUTLIER_CHANNELS:
        raise OptionError(
            f"--codec {codec}: keeps {OUTLIER_CHANNELS} channels apart, the target has {hidden_size}: use bf16"
        )
    if codec == "int4" and hidden_size % 2:
        raise OptionError(f"--codec int4: packs two values to a byte, the target's {hidden_size} are odd: use int8")
    return codec


@dataclass(frozen=True)
class HiddenCodec:
    """A codec as one cache uses it; `channels` names each layer's outlier channels (int8 and int4 alone have any)."""

    name: Codec
    channels: Channels = field(default_factory=dict)

    @property
    def families(self) -> tuple[str, ...]:
        """The families of arrays that hold a layer: an array of it is called `family/layer`."""
        scale = ("hidden_scale",) if self.name in SCALED else ()
        return ("hidden", *scale, *(("hidden_outliers",) if self.name in WITH_OUTLIERS else ()))

    def apart(self, layer: int) -> tuple[int, ...]:
        """The channels of a layer that are kept apart."""
        return self.channels[layer] if self.name in WITH_OUTLIERS else ()

    def encode(self, hidden_TH: Tensor, layer: int) -> dict[str, NDArray[np.generic]]:
        """Rows of a layer as the arrays that hold them, by family. Computed on the device where they are."""
        return {family: _numpy(tensor) for family, tensor in self._arrays(hidden_TH, layer).items()}

    def decode(self, arrays: Mapping[str, NDArray[np.generic]], layer: int) -> Tensor:
        """The hidden states [T, H] of a layer that `encode` stored: float32 for f32, else bfloat16."""
        parts = {family: as_tensor(arrays[family])[None] for family in self.families}
        return PackedStates(self, (layer,), parts).decode()[:, 0]

    def roundtrip(self, hidden_TLH: Tensor, layers: Sequence[int]) -> Tensor:
        """What a draft would read of these states from a cache, [T, L, H]."""
        return self.pack(hidden_TLH, layers).decode()

    def pack(self, hidden_TLH: Tensor, layers: Sequence[int]) -> "PackedStates":
        """These states as a cache would hand them out."""
        parts = [self._arrays(hidden_TLH[:, place], layer) for place, layer in enumerate(layers)]
        stacked = {family: torch.stack([part[family] for part in parts]) for family in self.families}
        return PackedStates(self, tuple(layers), stacked)

    def _arrays(self, hidden_TH: Tensor, layer: int) -> dict[str, Tensor]:
        if self.name == "f32":
            return {"hidden": hidden_TH.to(torch.float32)}
        if self.name in ("bf16", "bf16-zstd"):
            return {"hidden": hidden_TH.to(torch.bfloat16)}
        return quantise(hidden_TH, self.name, self.apart(layer))


@dataclass(frozen=True)
class PackedStates:
    """Hidden states as they are stored, [L, T, ...] of each family: what moves to a device before it is decoded there.

    bfloat16 arrays are tensors of that type.
    """

    codec: HiddenCodec
    layers: tuple[int, ...]
    parts: Mapping[str, Tensor]

    def __len__(self) -> int:
        return self.parts["hidden"].shape[1]

    def to(self, device: torch.device | str) -> "PackedStates":
        """The same states on a device."""
        return replace(self, parts={family: part.to(device) for family, part in self.parts.items()})

    def decode(self) -> Tensor:
        """The hidden states [T, L, H]: float32 for codec f32, else bfloat16."""
        values_LTW = self.parts["hidden"]
        if self.codec.name not in SCALED:
            return values_LTW.transpose(0, 1).contiguous()
        outliers, decoded = self.parts.get("hidden_outliers"), None
        for place, layer in enumerate(self.layers):  # one after the other: float32 rows of one layer at a time
            hidden_TH = dequantise(
                values_LTW[place],
                self.parts["hidden_scale"][place],
                None if outliers is None else outliers[place],
                self.codec.name,
                self.codec.apart(layer),
            )
            if decoded is None:
                decoded = hidden_TH.new_empty(len(hidden_TH), len(self.layers), hidden_TH.shape[1])
            decoded[:, place] = hidden_TH
        assert decoded is not None, "no layers"
        return decoded


def as_tensor(array: NDArray[np.generic]) -> Tensor:
    """A tensor over the same memory; uint16 is the bits of bfloat16."""
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _numpy(tensor: Tensor) -> NDArray[np.generic]:
    if tensor.dtype == torch.bfloat16:
        return tensor.cpu().view(torch.int16).numpy().view(np.uint16)
    return tensor.cpu().numpy()
