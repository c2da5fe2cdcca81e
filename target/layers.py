"""The target's decoder layers: where they are, which to capture by default, and a tap on the chosen ones.

Shape suffixes: b sequences, T positions, H hidden size.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from schemas.errors import OptionError, TargetError

ASSUMED_DRAFT_LAYERS = 5
# The last two: nemotron_h, dbrx and mpt; lfm2, which names the norm after its last layer for the embedding.
NORM_NAMES = ("norm", "final_layernorm", "ln_f", "final_norm", "norm_f", "embedding_norm")


def find_layers(decoder: nn.Module, num_hidden_layers: int) -> nn.ModuleList:
    """The list of decoder layers: the ModuleList of that length which is nearest to the root of `decoder`.

    Raises TargetError where there is none.
    """
    lists = [(name, module) for name, module in decoder.named_modules() if isinstance(module, nn.ModuleList)]
    fitting = [(name.count("."), name, module) for name, module in lists if len(module) == num_hidden_layers]
    if not fitting:
        raise TargetError(
            f"{type(decoder).__name__} has no list of {num_hidden_layers} decoder layers: this architecture is not "
            "supported"
        )
    return min(fitting, key=lambda item: item[:2])[2]


def final_norm(decoder: nn.Module) -> Any:
    """The norm after the last decoder layer. Raises TargetError where there is none of the usual names with a weight."""
    for name in NORM_NAMES:
        if getattr(getattr(decoder, name, None), "weight", None) is not None:
            return getattr(decoder, name)
    raise TargetError(
        f"{type(decoder).__name__} has no final norm of a known name with a weight: this architecture is not supported"
    )


def default_layers(num_hidden_layers: int, draft_layers: int = ASSUMED_DRAFT_LAYERS) -> tuple[int, ...]:
    """The layers that a draft of `draft_layers` layers conditions on (docs/design.md, conventions).

    round(1 + i*(n-4)/(d-1)) by Python's rounding, clamped to 0..n-2, without duplicates, ascending; n // 2 for d = 1.
    36 layers and 5 give 1, 9, 17, 25, 33.
    """
    n, d = num_hidden_layers, draft_layers
    if d == 1:
        return (n // 2,)
    return tuple(sorted({min(max(round(1 + i * (n - 4) / (d - 1)), 0), max(n - 2, 0)) for i in range(d)}))


def check_layers(layers: Sequence[int], num_hidden_layers: int) -> tuple[int, ...]:
    """The layers in ascending order; OptionError for none at all, one out of range or one given twice."""
    if not layers:
        raise OptionError("--layers names no layer: give at least one, such as --layers 1,9,17")
    for layer in layers:
        if not 0 <= layer < num_hidden_layers:
            raise OptionError(
                f"layer {layer} is out of range: the target has {num_hidden_layers} decoder layers, numbered 0 to "
                f"{num_hidden_layers - 1}; correct --layers"
            )
        if list(layers).count(layer) > 1:
            raise OptionError(f"layer {layer} is given twice: name each layer once in --layers")
    return tuple(sorted(layers))


@contextmanager
def tap_layers(layers: nn.ModuleList, ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Within the block, each forward pass fills the dictionary: layer id -> hidden_bTH, that decoder layer's output.

    The tensors are the model's own, before the final norm; nothing is copied and no other layer's output is kept.
    """
    taken: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            taken[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [layers[layer].register_forward_hook(keep(layer)) for layer in ids]
    try:
        yield taken
    finally:
        for handle in handles:
            handle.remove()
