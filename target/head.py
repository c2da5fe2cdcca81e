"""The target's head: what of its arithmetic a draft must repeat, its weights for training, and its top-k distribution.

Shape suffixes: R rows (positions), H hidden size, V vocabulary, K top-k, b sequences, T positions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from cache.peers import whole
from schemas.errors import TargetError
from target.faults import reported
from target.layers import final_norm
from target.load import Target
from target.parallel import storage_of

# Float32 logits of a slice, two copies of which are alive at once. Every slice reads the whole head from memory, which for 64 MB
# of logits is a tenth of the product's time on a CPU, for 16 MB a third; 256 MB fill a GPU.
SLICE_VALUES_CPU, SLICE_VALUES_GPU = 1 << 24, 1 << 26
GROUP = 64
DENSE = (torch.float32, torch.bfloat16, torch.float16)
# The product of these model types' config.logits_scaling and the logits is taken; all others divide by it.
MULTIPLYING = ("hyperclovax",)


@dataclass(frozen=True)
class HeadTraits:
    """Row * embedding_scale enters the first layer; logits are softcap * tanh(head(h) * logit_scale / softcap)."""

    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None


def head_traits(config: Any) -> HeadTraits:
    """The scales that the architecture applies around its embedding and head; `check_head` proves them.

    Facts of transformers' modeling files: embedding_multiplier (granite, falcon_h1, hyperclovax), embedding_scale (hrm_text),
    scale_emb (minicpm3), the square root of the hidden size (gemma; afmoe with mup_enabled); lm_head_multiplier (falcon_h1),
    logit_scale (cohere), output_multiplier (muse), logits_scaling as a divisor (granite, minicpm3) or a factor (hyperclovax),
    logits_mup_width_multiplier as a divisor (inkling); final_logit_softcapping (gemma, nanochat, mistral_large4).
    """
    kind = str(config.model_type)
    embedding = _first_of(config, "embedding_multiplier", "embedding_scale", "scale_emb")
    if embedding is None:
        embedding = config.hidden_size**0.5 if "gemma" in kind or getattr(config, "mup_enabled", False) else 1.0
    scale = _first_of(config, "lm_head_multiplier", "logit_scale", "output_multiplier")
    if scale is None and (divisor := _first_of(config, "logits_scaling", "logits_mup_width_multiplier")) is not None:
        scale = divisor if kind.startswith(MULTIPLYING) else 1.0 / divisor
    softcap = getattr(config, "final_logit_softcapping", None)
    return HeadTraits(
        float(embedding), float(1.0 if scale is None else scale), None if softcap is None else float(softcap)
    )


def _first_of(config: Any, *names: str) -> float | None:
    found = (getattr(config, name, None) for name in names)
    return next((float(value) for value in found if value is not None), None)


def logits_of(hidden_RH: Tensor, target: Target, traits: HeadTraits) -> Tensor:
    """Logits [R, V] of the decoder's final output (after the final norm), in the target's data type."""
    logits_RV: Tensor = target.lm_head(hidden_RH)
    if traits.logit_scale != 1.0:
        logits_RV = logits_RV * traits.logit_scale
    if traits.logit_softcap is not None:
        logits_RV = torch.tanh(logits_RV / traits.logit_softcap) * traits.logit_softcap
    return logits_RV


def topk_of(
    hidden_RH: Tensor, target: Target, traits: HeadTraits, top_k: int, slice_rows: int | None = None
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """The next-token distribution after each row, a slice of rows at a time, from the decoder's final output.

    Yields (rows, ids_RK int32, logprobs_RK float16, rest_R float32): the `top_k` most likely tokens, descending, their
    natural log-probabilities over the full vocabulary, computed in float32, and the log of the probability outside them
    (-inf where nothing is left).
    """
    vocabulary = int(target.lm_head.weight.shape[0])
    values = SLICE_VALUES_CPU if hidden_RH.device.type == "cpu" else SLICE_VALUES_GPU
    step = slice_rows or max(1, values // vocabulary)
    for start in range(0, len(hidden_RH), step):
        rows = slice(start, min(start + step, len(hidden_RH)))
        yield rows, *_distribution(logits_of(hidden_RH[rows], target, traits).float(), top_k)


def _distribution(logits_RV: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, log-probabilities and the log of the rest, of logits that may be overwritten.

    One pass of exponentials over the vocabulary: those outside the top are summed, with the largest of them as the
    reference, and the top is added to that sum. So the rest keeps its digits where it is 1e-6 of the whole.
    """
    vocabulary = logits_RV.shape[1]
    if vocabulary <= top_k:
        logprobs_RK, ids_RK = torch.log_softmax(logits_RV, dim=-1).sort(dim=-1, descending=True)
        return ids_RK.int(), logprobs_RK.half(), logits_RV.new_full((len(logits_RV),), -torch.inf)
    values_RK1, ids_RK1 = largest(logits_RV, top_k + 1)
    top_RK, ids_RK, next_R1 = values_RK1[:, :top_k], ids_RK1[:, :top_k], ids_RK1[:, top_k:]
    others_RV = torch.log_softmax(logits_RV.scatter_(1, ids_RK, -torch.inf), dim=-1)
    # All relative to the largest, so that a token that is all but certain keeps the digits of its distance from 0.
    first_R, reference_R = values_RK1[:, 0], values_RK1[:, top_k]
    rest_R = (reference_R - first_R) - others_RV.gather(1, next_R1)[:, 0]
    rest_R = rest_R.masked_fill(reference_R == -torch.inf, -torch.inf)
    above_RK = top_RK - first_R[:, None]
    whole_R = torch.logaddexp(rest_R, above_RK.logsumexp(dim=-1))
    return ids_RK.int(), (above_RK - whole_R[:, None]).half(), rest_R - whole_R


def largest(values_RV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest values of each row, descending, and where they are: torch.topk, at half its cost on a CPU.

    They lie in the `count` groups of neighbours whose own largest values are the largest: only these are ranked.
    """
    rows, width = values_RV.shape
    groups = width // GROUP
    if groups <= 2 * count:
        return values_RV.topk(count, dim=-1)
    grouped_RGg = values_RV[:, : groups * GROUP].view(rows, groups, GROUP)
    best_Rc = grouped_RGg.amax(dim=-1).topk(count, dim=-1, sorted=False).indices
    few_RS = grouped_RGg.gather(1, best_Rc[:, :, None].expand(-1, -1, GROUP)).flatten(1)
    places_RS = (best_Rc[:, :, None] * GROUP + torch.arange(GROUP, device=values_RV.device)).flatten(1)
    if groups * GROUP < width:
        tail = torch.arange(groups * GROUP, width, device=values_RV.device).expand(rows, -1)
        few_RS = torch.cat([few_RS, values_RV[:, groups * GROUP :]], dim=1)
        places_RS = torch.cat([places_RS, tail], dim=1)
    top_RK, within_RK = few_RS.topk(count, dim=-1)
    return top_RK, places_RS.gather(1, within_RK)


@torch.inference_mode()
def check_head(target: Target, traits: HeadTraits) -> None:
    """Compare our logits with the model's own on a few tokens; TargetError where this architecture does more to them.

    Without it an unknown multiplier, soft cap or bias would be stored as wrong probabilities. TargetError, too, where the
    model cannot run here. Values that are not finite pass: the capture names sample, position and layer.
    """
    kind = type(target.model).__name__
    ids_bT = torch.arange(8, device=target.device)[None] % target.config.vocab_size
    with reported(kind, "run a few tokens", "choose another --attn, --dtype or --device"):
        theirs_TV = target.model(input_ids=ids_bT, use_cache=False).logits[0].float()
        final_TH = target.decoder(input_ids=ids_bT, use_cache=False).last_hidden_state[0]
    ours_TV = logits_of(final_TH, target, traits).float()
    tolerance = 1e-4 if target.dtype == torch.float32 else 2e-2
    if ours_TV.shape != theirs_TV.shape or (ours_TV - theirs_TV).abs().max() > tolerance * theirs_TV.abs().max():
        raise TargetError(
            f"{kind} computes its logits in a way that is not known here (beyond scale and soft cap): it is not supported"
        )


def head_file(target: Target, tied: bool) -> bytes:
    """target/head.safetensors: the tensors of `head_tensors`, as they are. Raises TargetError.

    Every process that holds a part of the target must ask.
    """
    tensors = {name: whole(tensor).detach().cpu().contiguous() for name, tensor in head_tensors(target, tied).items()}
    return bytes(save(tensors))


def head_tensors(target: Target, tied: bool) -> dict[str, Tensor]:
    """The target's own embed_tokens.weight, lm_head.weight (absent when tied) and norm.weight.

    Raises TargetError where the model's head is not what a draft's runtime can use (a bias), or `tied` is not what the
    config says.
    """
    embedding, head = target.model.get_input_embeddings().weight, target.lm_head
    if getattr(head, "bias", None) is not None:
        raise TargetError(
            f"the head of {type(target.model).__name__} has a bias, which drafts' runtimes do not apply: it is not "
            "supported"
        )
    for what, weight in (("embedding", embedding), ("head", head.weight)):
        if weight.dtype not in DENSE:
            raise TargetError(
                f"the {what} of {type(target.model).__name__} is still quantised ({weight.dtype}) as transformers loads it here, "
                "and training needs its numbers: give the unquantised model"
            )
    same = storage_of(head.weight) == storage_of(embedding)
    if same != tied:
        raise TargetError(
            f"config.json says tie_word_embeddings {tied}, but the loaded weights say {same}: correct the config"
        )
    tensors = {"embed_tokens.weight": embedding, "norm.weight": final_norm(target.decoder).weight}
    if not tied:
        tensors["lm_head.weight"] = head.weight
    return tensors
