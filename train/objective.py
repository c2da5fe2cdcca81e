"""From packed samples and blocks to the sums of a micro-batch, and from sums to the loss of a step.

T packed tokens, L captured layers, H hidden, N blocks, B block size, R supervised slots.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from cache.head import TargetHead
from draft.blocks import Blocks, PackedSamples, block_inputs, block_labels, block_predecessors, block_valid
from draft.model import Draft
from schemas.options import LossOptions
from train.loss import SliceLoss, dflash2_loss, dflash_loss

Sums = dict[str, Tensor]
# Logits of a slice, as float32 values: few enough to stay in a processor's cache between their passes.
SLICE_VALUES, SLICE_ROWS = 1 << 20, 256
GAMMAS = {16: 7.0, 10: 5.0, 8: 4.0}


def resolve_gamma(options: LossOptions, block_size: int) -> float | None:
    """The decay length of the slot weights: the published 7, 5, 4 for blocks of 16, 10, 8, else half the block; None is flat."""
    return GAMMAS.get(block_size, block_size / 2) if options.gamma == "auto" else options.gamma


def slot_weights(blocks: Blocks, gamma: float | None) -> Tensor:
    """exp(-(k - l) / gamma) for slot k of a block that shows l tokens, float32 [N, B]: the first target of a block weighs 1.

    DFlash (arXiv 2602.06036, equation 4) has l = 1; with a variable prefix the decay restarts at l.
    """
    slot_NB = torch.arange(blocks.block_size, device=blocks.prefix_N.device) - blocks.prefix_N[:, None]
    return torch.ones_like(slot_NB, dtype=torch.float32) if gamma is None else torch.exp(-slot_NB / gamma)


def objective(
    draft: Draft,
    head: TargetHead,
    samples: PackedSamples,
    blocks: Blocks,
    options: LossOptions,
    mask_token_id: int,
    slice_rows: int | None = None,
) -> Sums:
    """Sums over a micro-batch's supervised slots, as scalar tensors; only the losses carry a gradient.

    Keys: `base_loss`, `base_weight`, `valid` (slots), `correct`, `blocks` (with a valid slot), `accept_len` (their sum, each at
    least 1); with a selector also `selector_loss`, `selector_weight`, `recalled`, `base_correct`, `base_accept_len`, and then
    `correct` and `accept_len` are the selector's, given the true token before each slot. Unsupervised slots reach no head,
    neither count nor stop. `slice_rows` bounds the slots whose logits are computed at once (None: as suits the vocabulary).
    """
    embeds_NBH = head.embed(block_inputs(samples, blocks, mask_token_id))
    hidden_NBH = draft(samples.hidden_TLH, samples.lengths, embeds_NBH, blocks)
    valid_NB = block_valid(samples, blocks)
    index_R = valid_NB.flatten().nonzero()[:, 0]

    def pick(tensor: Tensor) -> Tensor:
        return tensor.flatten(0, 1).index_select(0, index_R)

    hidden_RH, label_R = pick(hidden_NBH), pick(block_labels(samples, blocks))
    weight_R = pick(slot_weights(blocks, resolve_gamma(options, blocks.block_size)))
    predecessor_R = pick(block_predecessors(samples, blocks))
    parts: list[SliceLoss] = []
    step = slice_rows or max(SLICE_ROWS, SLICE_VALUES // draft.config.vocab_size)
    for start in range(0, max(1, len(index_R)), step):
        rows = slice(start, start + step)
        if draft.candidate_selector is None:
            parts.append(dflash_loss(hidden_RH[rows], label_R[rows], weight_R[rows], head))
        else:
            slots = (hidden_RH[rows], label_R[rows], weight_R[rows], predecessor_R[rows])
            parts.append(dflash2_loss(*slots, head, draft.candidate_selector))
    sums = {key: torch.stack([part.sums[key] for part in parts]).sum() for key in parts[0].sums}
    hits = {key: torch.cat([part.hits[key] for part in parts]) for key in parts[0].hits}
    return sums | block_metrics(hits, valid_NB, index_R)


def block_metrics(hits: Mapping[str, Tensor], valid_NB: Tensor, index_R: Tensor) -> Sums:
    """Counts of hits, valid slots and blocks, and the sum of acceptance lengths for each kind of correct."""
    sums = {key: hit_R.sum() for key, hit_R in hits.items()}
    sums["valid"], sums["blocks"] = valid_NB.sum(), valid_NB.any(1).sum()
    for key in hits:
        if key.endswith("correct"):
            hit_NB = torch.zeros_like(valid_NB).flatten().index_copy(0, index_R, hits[key]).view_as(valid_NB)
            accepted_N = ((hit_NB | ~valid_NB).int().cumprod(1) * valid_NB).sum(1)
            sums[key.replace("correct", "accept_len")] = accepted_N.sum() + sums["blocks"]
    return sums


def total_loss(sums: Mapping[str, Tensor], totals: Mapping[str, Tensor | float], options: LossOptions) -> Tensor:
    """The micro-batch's share of the step's loss: base + selector_weight * selector, each over the step's denominator.

    `totals` holds `base_weight` and, with a selector, `selector_weight`, summed over the step's micro-batches and ranks. A
    denominator of zero has no slots above it, so its term is zero.
    """
    loss = _mean(sums["base_loss"], totals["base_weight"])
    if "selector_loss" in sums:
        loss = loss + options.selector_weight * _mean(sums["selector_loss"], totals["selector_weight"])
    return loss


def _mean(total: Tensor, weight: Tensor | float) -> Tensor:
    weight = torch.as_tensor(weight, dtype=total.dtype, device=total.device)
    return total / torch.where(weight > 0, weight, 1.0)


@torch.no_grad()
def denominators(
    draft: Draft,
    head: TargetHead,
    samples: PackedSamples,
    blocks: Blocks,
    options: LossOptions,
    mask_token_id: int,
    slice_rows: int | None = None,
) -> Sums:
    """`base_weight` and, with a selector, `selector_weight` of a micro-batch, before any backward pass.

    The selector's depends on the weights of the moment (which slots have their token among the candidates), so it takes a
    forward; the base's is the mask's alone.
    """
    if draft.candidate_selector is None:
        weight_NB = slot_weights(blocks, resolve_gamma(options, blocks.block_size))
        # Picked, not multiplied by 0: the weight of a slot before a long prefix may be infinite.
        return {"base_weight": weight_NB[block_valid(samples, blocks)].sum()}
    sums = objective(draft, head, samples, blocks, options, mask_token_id, slice_rows)
    return {key: sums[key] for key in ("base_weight", "selector_weight")}
