"""Blocks against a naive walk over each sample, position by position."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draft.blocks import (
    PackedSamples,
    anchors_of,
    block_inputs,
    block_labels,
    block_positions,
    block_predecessors,
    block_valid,
    make_blocks,
)

MASK = 99


def packed(masks: list[list[bool]]) -> PackedSamples:
    lengths = tuple(len(mask) for mask in masks)
    total = sum(lengths)
    flat = torch.tensor([value for mask in masks for value in mask], dtype=torch.bool)
    return PackedSamples(torch.arange(total) % 90, flat, torch.zeros(total, 1, 1), lengths)


def naive_anchors(masks: list[list[bool]], block_size: int) -> list[int]:
    found, start = [], 0
    for mask in masks:
        for position, supervised in enumerate(mask):
            if supervised and any(mask[position + 1 : position + block_size]):
                found.append(start + position)
        start += len(mask)
    return found


MASKS = st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=4)


@settings(deadline=None, max_examples=150)
@given(masks=MASKS, block_size=st.integers(2, 6), data=st.data())
def test_blocks_are_the_definition(masks: list[list[bool]], block_size: int, data: Any) -> None:
    samples = packed(masks)
    anchors = anchors_of(samples, block_size)
    assert anchors.tolist() == naive_anchors(masks, block_size)
    prefixes = data.draw(st.lists(st.integers(1, block_size), min_size=len(anchors), max_size=len(anchors)))
    blocks = make_blocks(samples, anchors, block_size, torch.tensor(prefixes, dtype=torch.int64))
    inputs, labels = block_inputs(samples, blocks, MASK), block_labels(samples, blocks)
    valid, positions = block_valid(samples, blocks), block_positions(samples, blocks)
    predecessors = block_predecessors(samples, blocks)
    ids = samples.input_ids_T.tolist()
    starts = [sum(map(len, masks[:index])) for index in range(len(masks))]
    for n, (anchor, prefix) in enumerate(zip(anchors.tolist(), prefixes, strict=True)):
        sample = max(index for index, start in enumerate(starts) if start <= anchor)
        assert blocks.sample_N[n] == sample
        mask, local = masks[sample], anchor - starts[sample]
        for k in range(block_size):
            inside = local + k < len(mask)
            assert inputs[n, k] == (ids[anchor + k] if k < prefix and inside else MASK)
            assert positions[n, k] == local + k
            assert bool(valid[n, k]) == (k >= prefix and inside and mask[local + k])
            if valid[n, k]:
                assert labels[n, k] == ids[anchor + k]
                assert predecessors[n, k] == ids[anchor + k - 1]


def test_a_block_shows_its_anchor_alone_by_default() -> None:
    samples = packed([[False, True, True, True, True]])
    blocks = make_blocks(samples, torch.tensor([1]), 4)
    assert block_inputs(samples, blocks, MASK).tolist() == [[1, MASK, MASK, MASK]]
    assert block_labels(samples, blocks).tolist() == [[1, 2, 3, 4]]
    assert block_valid(samples, blocks).tolist() == [[False, True, True, True]]


def test_a_target_after_a_gap_still_counts_and_makes_an_anchor() -> None:
    samples = packed([[True, False, True, False, False, True]])
    assert anchors_of(samples, 3).tolist() == [0]
    assert anchors_of(samples, 4).tolist() == [0, 2]
    assert block_valid(samples, make_blocks(samples, torch.tensor([0]), 3)).tolist() == [[False, False, True]]


def test_no_samples_no_blocks() -> None:
    samples = packed([])
    assert make_blocks(samples, anchors_of(samples, 4), 4).anchor_N.shape == (0,)
