"""Does the loaded target do what a cache takes it to do? A few tokens tell.

Shape suffixes: b sequences (one), T positions, H hidden size.
"""

from typing import Any

import torch
from torch import Tensor, nn

from cache.peers import whole
from schemas.errors import TargetError
from target.faults import reported
from target.head import HeadTraits
from target.layers import tap_layers
from target.load import Target

# Largest difference as a share of the largest value. Sequences of other lengths round differently, in bfloat16 visibly.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
LENGTH_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 5e-2}
TOKENS, FEWER = 8, 5


@torch.inference_mode()
def check_decoder(target: Target, traits: HeadTraits) -> None:
    """TargetError where a decoder layer gives something else than one state a token, a later token changes an earlier state,
    or embedding rows enter the first layer otherwise than times `traits.embedding_scale`.

    Padding is on the right without a mask, and a draft starts from the same rows: each would be wrong numbers, silently.
    Every process that holds a part of the target must ask.
    """
    kind = type(target.model).__name__
    ids_bT = torch.arange(TOKENS, device=target.device)[None] % target.config.vocab_size
    entered: list[Tensor] = []

    def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered.append(args[0] if args else kwargs["hidden_states"])

    first = target.layers[0].register_forward_pre_hook(keep, with_kwargs=True)
    try:
        with (
            reported(kind, "run a few tokens", "choose another --attn, --dtype or --device"),
            tap_layers(target.layers, range(len(target.layers))) as taken,
        ):
            final_bTH = target.decoder(input_ids=ids_bT, use_cache=False).last_hidden_state
            shapes = [tuple(taken[layer].shape) for layer in sorted(taken)]
            fewer_bTH = target.decoder(input_ids=ids_bT[:, :FEWER], use_cache=False).last_hidden_state
    finally:
        first.remove()
    expected = (1, TOKENS, target.config.hidden_size)
    if shapes != [expected] * len(target.layers):
        wrong = next((shape for shape in shapes if shape != expected), None)
        raise TargetError(
            f"{kind}: a decoder layer gives states of shape {wrong} for {TOKENS} tokens, not {expected}: this architecture is "
            "not supported"
        )
    if not _close(fewer_bTH, final_bTH[:, :FEWER], LENGTH_TOLERANCES[target.dtype]):
        raise TargetError(
            f"{kind} is not causal as it runs here (later tokens change a token's hidden state): choose another --attn, or a "
            "causal language model"
        )
    rows_TH = whole(target.model.get_input_embeddings().weight)[ids_bT[0]].float() * traits.embedding_scale
    if not _close(entered[0][0].float(), rows_TH, TOLERANCES[target.dtype]):
        raise TargetError(
            f"{kind} does more to its embedding rows before the first layer than times {traits.embedding_scale:g}, which is "
            "all that a draft repeats: this architecture is not supported"
        )


def _close(ours: Tensor, theirs: Tensor, tolerance: float) -> bool:
    # What is not finite passes: the capture names sample, position and layer.
    return not bool((ours - theirs).abs().max() > tolerance * theirs.abs().max())
