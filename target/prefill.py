"""A long sequence in pieces: each piece attends to those before it through the key-value cache.

Exact for causal targets whose cache continues a prefill of several tokens; others are refused here, from the config where
it tells, and by comparing pieces with the whole on a few tokens once the weights are there.

Shape suffixes: b sequences, m their tokens, n tokens of a piece, H hidden size.
"""

import inspect
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from schemas.errors import OptionError, TargetError
from target.load import Target

# Their layers in transformers start anew with every prefill of more than one token, or keep a cache of their own.
FORGETTING = ("bamba", "falcon_mamba", "jamba", "mamba", "minimax", "recurrent_gemma")
# Layers that rank all the keys so far: a piece ranks others than the whole sequence does.
RANKING = ("indexed_attention", "compressed_sparse_attention", "heavily_compressed_attention")
# Median over positions of the relative difference. One position may differ by more: where two experts are nearly equal,
# rounding chooses.
TOLERANCES = {torch.float32: 3e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# Uneven on purpose: a piece of one token takes another way through linear attention.
FEW_TOKENS, FEW_ENDS = 13, (5, 6, 10)
# A window is looked across where that costs at most so many tokens.
WIDEST_WINDOW = 8192


def check_prefill(config: Any, prefill_chunk: int) -> None:
    """OptionError where a target of this config cannot be run in pieces. Needs no weights."""
    text = config.get_text_config()
    ranking = sorted({kind for kind in getattr(text, "layer_types", None) or () if kind in RANKING})
    if text.model_type in FORGETTING or ranking:
        reason = f"layers of type {ranking[0]}" if ranking else f"the layers of {text.model_type!r}"
        raise OptionError(
            f"--prefill-chunk {prefill_chunk}: {reason} do not continue a sequence exactly in transformers; leave the "
            "option out, and shorten long samples with --max-length"
        )


def forward_pieces(decoder: nn.Module, config: Any, ids_bm: Tensor, ends: Sequence[int]) -> Iterator[Tensor]:
    """The decoder's final output [b, n, H] of each piece; piece i ends before column ends[i], the last one at m.

    Between two pieces only the cache stays: take what is wanted of one before asking for the next.
    """
    cache = {cache_argument(decoder): DynamicCache(config=config), "use_cache": True}
    for start, end in pairwise((0, *ends)):
        yield decoder(input_ids=ids_bm[:, start:end], **cache).last_hidden_state


def cache_argument(module: nn.Module) -> str:
    """The name under which a model takes its cache. The library renames it; models that bring their own code keep the old one."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


def even_ends(width: int, piece: int) -> list[int]:
    """Where pieces of at most `piece` tokens end in `width` of them."""
    return [*range(piece, width, piece), width]


@torch.inference_mode()
def check_pieces(target: Target, prefill_chunk: int) -> float:
    """Compare pieces with the whole on a few tokens, and across each sliding window's edge; TargetError where they differ.

    Returns the largest relative difference that it met: rounding.

    No forward sees more than the larger of `prefill_chunk` and 13 tokens: across an edge two ways of cutting are compared.
    """
    compared = [(FEW_TOKENS, [FEW_TOKENS], [*FEW_ENDS, FEW_TOKENS])]
    for window in _windows(target.config):
        width, piece = window + FEW_TOKENS, min(prefill_chunk, window)
        whole, cut = even_ends(width, min(prefill_chunk, width)), even_ends(width, piece)
        # Cut again shortly before the window is full, and twice while it slides.
        cut = sorted({*cut, window - 2, window + 3, window + 7})
        if 3 <= window <= WIDEST_WINDOW and whole != cut:
            compared.append((width, whole, cut))
    worst = 0.0
    for width, whole, cut in compared:
        ids_bm = (torch.arange(width, device=target.device) * 7919 + 11)[None] % target.config.vocab_size
        one_mH, other_mH = (
            torch.cat(list(forward_pieces(target.decoder, target.config, ids_bm, ends)), dim=1)[0].float()
            for ends in (whole, cut)
        )
        # Behind the first cut, where the two ways begin to differ; across a window, the rows for which it slides.
        rows = slice(max(cut[0], width - FEW_TOKENS), None)
        error = ((one_mH - other_mH).norm(dim=-1) / one_mH.norm(dim=-1))[rows].median().item()
        if not error <= TOLERANCES[target.dtype]:
            raise TargetError(
                f"--prefill-chunk {prefill_chunk}: {type(target.model).__name__} does not continue a sequence exactly "
                f"(relative difference {error:.1e} on {width} tokens, rounding is {TOLERANCES[target.dtype]:.0e}); leave "
                "the option out, and shorten long samples with --max-length"
            )
        worst = max(worst, error)
    return worst


def _windows(config: Any) -> list[int]:
    sizes = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return sorted({size for size in sizes if isinstance(size, int)})
