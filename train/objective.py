"""From packed samples and blocks to the sums of a micro-batch, and from sums to the loss of a step.

T packed tokens, L captured layers, H hidden, N blocks, B block size, R supervised slots.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cache.head import TargetHead
from draft.blocks import Blocks, PackedSamples, block_inputs, block_labels, block_predecessors, block_valid
from draft.model import Draft
from draft.sliced_head import slice_rows
from schemas.options import LossOptions
from train.loss import Measured, Slots, dflash2_loss, dflash_loss

Sums = dict[str, Tensor]
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
    rows: int | None = None,
) -> Sums:
    """Sums over a micro-batch's supervised slots, as scalar tensors; only the losses carry a gradient, for one backward pass.

    Keys: `base_loss`, `base_weight`, `valid` (slots), `correct`, `blocks` (with a valid slot), `accept_len` (their sum, each at
    least 1); with a selector also `selector_loss`, `selector_weight`, `recalled`, `base_correct`, `base_accept_len`, and then
    `correct` and `accept_len` are the selector's, given the true token before each slot. Unsupervised slots reach no head,
    neither count nor stop. `rows` bounds the slots whose logits are computed at once (None: as suits vocabulary and device).
    """
    hidden_NBH = states(draft, head, samples, blocks, mask_token_id)
    measured = measure(draft, head, samples, blocks, options, hidden_NBH, rows)
    return attach(measured, hidden_NBH, samples, blocks)


def states(draft: Draft, head: TargetHead, samples: PackedSamples, blocks: Blocks, mask_token_id: int) -> Tensor:
    """The draft's hidden states [N, B, H] after its final norm."""
    embeds_NBH = head.embed(block_inputs(samples, blocks, mask_token_id))
    hidden_NBH: Tensor = draft(samples.hidden_TLH, samples.lengths, embeds_NBH, blocks)
    return hidden_NBH


@torch.no_grad()
def measure(
    draft: Draft,
    head: TargetHead,
    samples: PackedSamples,
    blocks: Blocks,
    options: LossOptions,
    hidden_NBH: Tensor,
    rows: int | None = None,
) -> Measured:
    """The sums of `objective` with their gradients, from the draft's states: all that needs the head, done in one pass.

    What it holds afterwards is [R, H] a loss and the selector's gradients: the states' own graph is not needed for it, nor kept.
    """
    valid_NB = block_valid(samples, blocks)
    index_R = valid_NB.flatten().nonzero()[:, 0]

    def pick(tensor_NB: Tensor) -> Tensor:
        return tensor_NB.flatten(0, 1).index_select(0, index_R)

    slots = Slots(
        pick(hidden_NBH),
        pick(block_labels(samples, blocks)),
        pick(slot_weights(blocks, resolve_gamma(options, blocks.block_size))),
        pick(block_predecessors(samples, blocks)),
    )
    rows = rows or slice_rows(draft.config.vocab_size, hidden_NBH.device, head.lm_head_VH.dtype)
    # The head's own type is the type of its products, and the rest is float32 also where the draft's arithmetic is not.
    with torch.autocast(hidden_NBH.device.type, enabled=False):
        if draft.candidate_selector is None:
            measured = dflash_loss(slots, head, rows)
        else:
            measured = dflash2_loss(slots, head, rows, draft.candidate_selector)
    return replace(measured, sums={**measured.sums, **block_metrics(measured.hits, valid_NB, index_R)})


def attach(measured: Measured, hidden_NBH: Tensor, samples: PackedSamples, blocks: Blocks) -> Sums:
    """The measured sums as functions of the states they were measured at, and of the parameters behind them.

    `hidden_NBH` may have been computed again since, with a graph this time. The backward pass consumes what was measured: it runs
    once.
    """
    index_R = block_valid(samples, blocks).flatten().nonzero()[:, 0]
    hidden_RH = hidden_NBH.flatten(0, 1).index_select(0, index_R)
    names = tuple(measured.slot_gradients)
    parameters = list(dict.fromkeys(p for owned in measured.parameter_gradients.values() for p in owned))
    losses = _Linear.apply(measured, names, hidden_RH, *parameters)  # type: ignore[no-untyped-call]
    return {**measured.sums, **dict(zip(names, losses, strict=True))}


class _Linear(torch.autograd.Function):
    """Losses whose gradients are known already: the backward pass adds them up, each times what arrives for its loss."""

    @staticmethod
    def forward(
        ctx: Any, measured: Measured, names: tuple[str, ...], hidden_RH: Tensor, *parameters: nn.Parameter
    ) -> tuple[Tensor, ...]:
        ctx.measured, ctx.names, ctx.parameters, ctx.dtype = measured, names, parameters, hidden_RH.dtype
        return tuple(measured.sums[name].clone() for name in names)

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> tuple[Tensor | None, ...]:
        measured, ctx.measured = ctx.measured, None
        assert measured is not None, "the gradients of a measurement are used up by one backward pass"
        hidden_RH: Tensor | None = None
        gradients: dict[nn.Parameter, Tensor] = {}
        for name, factor in zip(ctx.names, arriving, strict=True):
            # In place: the codebooks of a large vocabulary are large, and so are the states of many slots.
            part_RH = measured.slot_gradients[name].mul_(factor)
            hidden_RH = part_RH if hidden_RH is None else hidden_RH.add_(part_RH)
            for parameter, gradient in measured.parameter_gradients.get(name, {}).items():
                assert parameter not in gradients, "a parameter behind two losses: add their gradients here"
                gradients[parameter] = gradient.mul_(factor).to(parameter.dtype)
        assert hidden_RH is not None
        return None, None, hidden_RH.to(ctx.dtype), *(gradients[parameter] for parameter in ctx.parameters)


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


def base_weight(samples: PackedSamples, blocks: Blocks, options: LossOptions) -> Tensor:
    """The sum `base_weight` of a micro-batch, which is the mask's alone: known before any forward."""
    weight_NB = slot_weights(blocks, resolve_gamma(options, blocks.block_size))
    # Picked, not multiplied by 0: the weight of a slot before a long prefix may be infinite.
    return weight_NB[block_valid(samples, blocks)].sum()
