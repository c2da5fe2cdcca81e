"""`run.float8`: the products of a draft's layers in float8 (torchao), their weights in float32 under their own names as before.

Each operand is scaled by the largest of its values, anew in every product. What stays as it is: the head and the embedding, which are
the target's; fc, whose inputs are the target's states, with channels that drown the others; norms, convolutions and
selector, whose products are small.
"""

from typing import Any

import torch
from torch import nn

from draft.model import Draft
from schemas.errors import OptionError

SUBLAYERS = ("self_attn", "mlp")
LEAST_CAPABILITY = (8, 9)
# The kernels' tile: both sizes of a weight must be whole multiples.
TILE = 16
OTHERWISE = "or leave run.float8 false"


def check_float8(device: torch.device, precision: str) -> None:
    """OptionError where a run on `device` cannot have float8 products."""
    needs = "run.float8=true needs a CUDA device of compute capability 8.9 or higher"
    if device.type != "cuda":
        raise OptionError(f"{needs}, and the run is on {device}: train on such a device, {OTHERWISE}")
    if (capability := torch.cuda.get_device_capability(device)) < LEAST_CAPABILITY:
        has = ".".join(map(str, capability))
        raise OptionError(f"{needs}, and {device} has {has}: train on such a device, {OTHERWISE}")
    if precision != "bfloat16":
        raise OptionError(
            f"run.float8=true computes in bfloat16 around its products, and run.precision is {precision}: use bfloat16, {OTHERWISE}"
        )
    _torchao()


def float8_names(draft: Draft) -> tuple[list[str], list[str]]:
    """The layers' products that float8 can take, and those that it cannot for their sizes, by module name."""
    taken: list[str] = []
    left: list[str] = []
    for name, module in draft.named_modules():
        parts = name.split(".")
        if isinstance(module, nn.Linear) and parts[0] == "layers" and parts[-2] in SUBLAYERS:
            whole = module.in_features % TILE == module.out_features % TILE == 0
            (taken if whole else left).append(name)
    return taken, left


def to_float8(draft: Draft, config: Any = None) -> tuple[list[str], list[str]]:
    """Convert a draft's products, in place and with the same parameters; returns `float8_names` of before.

    `config` is torchao's Float8LinearConfig. Raises OptionError where no product has the sizes, or torchao is missing.
    """
    taken, left = float8_names(draft)
    if not taken:
        sizes = ", ".join(
            sorted({f"{m.in_features} x {m.out_features}" for n in left for m in [draft.get_submodule(n)]})
        )
        raise OptionError(
            f"run.float8=true: no product of the layers ({sizes}) has two sizes that are multiples of {TILE}: choose others, {OTHERWISE}"
        )
    torchao = _torchao()
    names = frozenset(taken)
    # The rows of a batch are the inner size of a weight's gradient, and seldom whole tiles.
    config = config or torchao.Float8LinearConfig(pad_inner_dim=True)
    torchao.convert_to_float8_training(draft, module_filter_fn=lambda _module, name: name in names, config=config)
    return taken, left


def _torchao() -> Any:
    try:
        import torchao.float8
    except ImportError as fault:
        raise OptionError(
            f"run.float8=true needs torchao ({fault}): pip install 'dflash-pipeline[float8]', {OTHERWISE}"
        ) from None
    return torchao.float8
