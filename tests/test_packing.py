"""Packed samples are strangers to each other: whatever one of them holds, the others' blocks see, predict and learn the same."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import MASK, lively_draft, random_head, random_samples, small_config
from torch import Tensor

from draft.blocks import (
    PackedSamples,
    anchors_of,
    block_inputs,
    block_labels,
    block_predecessors,
    block_valid,
    make_blocks,
)
from schemas.options import LossOptions
from train.objective import objective, total_loss

DRAFTS = {(kind, size): lively_draft(small_config(kind, block_size=size)) for kind in ("dflash", "dflash2") for size in (2, 5)}  # fmt: skip


def other_sample(samples: PackedSamples, changed: int, seed: int) -> PackedSamples:
    """The same pack with everything of one sample drawn anew: ids, states, and a mask that says the opposite."""
    start = sum(samples.lengths[:changed])
    rows = slice(start, start + samples.lengths[changed])
    draw = torch.Generator().manual_seed(seed)
    ids, mask, hidden = samples.input_ids_T.clone(), samples.loss_mask_T.clone(), samples.hidden_TLH.clone()
    ids[rows] = torch.randint(0, MASK, ids[rows].shape, generator=draw)
    mask[rows] = ~mask[rows]
    hidden[rows] = 5 * torch.randn(hidden[rows].shape, generator=draw)
    return replace(samples, input_ids_T=ids, loss_mask_T=mask, states=hidden)


def seen_and_predicted(
    draft_of: tuple[str, int], samples: PackedSamples, anchor_N: Tensor, keep_N: Tensor
) -> list[Tensor]:
    """What the draft is given, computes and must predict in some of the blocks."""
    draft = DRAFTS[draft_of]
    blocks = make_blocks(samples, anchor_N, draft_of[1])
    input_NB = block_inputs(samples, blocks, MASK)
    with torch.no_grad():
        hidden_NBH = draft(samples.hidden_TLH, samples.lengths, random_head().embed(input_NB), blocks)
    targets = (block_labels(samples, blocks), block_predecessors(samples, blocks), block_valid(samples, blocks))
    return [tensor[keep_N] for tensor in (input_NB, hidden_NBH, *targets)]


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(list(DRAFTS)),
    st.lists(st.integers(1, 9), min_size=2, max_size=4).map(tuple),
    st.integers(0, 999),
    st.data(),
)
def test_another_sample_changes_nothing(
    draft_of: tuple[str, int], lengths: tuple[int, ...], seed: int, data: st.DataObject
) -> None:
    samples = random_samples(lengths, seed=seed)
    changed = data.draw(st.integers(0, len(lengths) - 1))
    anchors = data.draw(st.sets(st.integers(0, sum(lengths) - 1), min_size=1))
    anchor_N = torch.tensor(sorted(anchors))
    keep_N = make_blocks(samples, anchor_N, draft_of[1]).sample_N != changed
    before = seen_and_predicted(draft_of, samples, anchor_N, keep_N)
    after = seen_and_predicted(draft_of, other_sample(samples, changed, seed + 1), anchor_N, keep_N)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(before, after, strict=True))


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_a_samples_loss_reaches_the_states_of_its_own_past_alone(kind: str) -> None:
    draft, lengths = DRAFTS[kind, 5], (7, 12, 9)
    samples = random_samples(lengths)
    hidden = samples.hidden_TLH.clone().requires_grad_()
    packed, own = replace(samples, states=hidden), (7, 19)
    anchor_N = anchors_of(samples, 5)
    anchor_N = anchor_N[(anchor_N >= own[0]) & (anchor_N < own[1])]
    sums = objective(draft, random_head(), packed, make_blocks(samples, anchor_N, 5), LossOptions(), MASK)
    total_loss(sums, sums, LossOptions()).backward()
    reached = hidden.grad.abs().sum((1, 2)).nonzero()[:, 0].tolist()
    assert reached == list(range(own[0], int(anchor_N[-1])))


def test_partial_blocks_at_a_samples_end_train_too() -> None:
    samples = random_samples((6, 8))
    samples = replace(samples, loss_mask_T=torch.tensor([0, 0, 0, 0, 1, 1] + [1] * 8).bool())
    anchors = anchors_of(samples, 5)
    assert anchors.tolist() == [4, *range(6, 13)]
    valid = block_valid(samples, make_blocks(samples, anchors, 5))
    assert valid.sum(1).tolist() == [1, 4, 4, 4, 4, 3, 2, 1]
    sums = objective(DRAFTS["dflash", 5], random_head(), samples, make_blocks(samples, anchors, 5), LossOptions(), MASK)
    assert int(sums["valid"]) == 23 and int(sums["blocks"]) == 8
