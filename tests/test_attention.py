"""The split attention: what it computes, what a block can see, and that it never holds block-against-other-block scores."""

import pytest
import torch
from reference import MASK, assert_near, lively_draft, naive_forward, random_head, random_samples, small_config
from torch import Tensor

from draft.attention import layout_of
from draft.blocks import PackedSamples, anchors_of, block_inputs, make_blocks
from draft.model import Draft

LENGTHS = (9, 14, 1, 17)


def states_of(draft: Draft, samples: PackedSamples, anchors: Tensor, edit: tuple[int, Tensor] | None = None) -> Tensor:
    """States of the blocks; `edit` replaces the input embeddings of one block."""
    blocks = make_blocks(samples, anchors, draft.config.block_size)
    embeds = random_head().embed(block_inputs(samples, blocks, MASK))
    if edit is not None:
        embeds[edit[0]] = edit[1]
    with torch.no_grad():
        return draft(samples.hidden_TLH, samples.lengths, embeds, blocks)


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
@pytest.mark.parametrize("window", [None, 4, 6])
def test_forward_is_every_block_alone(kind: str, window: int | None) -> None:
    draft, samples = lively_draft(small_config(kind, window)), random_samples(LENGTHS)
    anchors = torch.tensor([0, 2, 8, 9, 12, 22, 24, 30, 31, 39])
    blocks = make_blocks(samples, anchors, 4)
    embeds = random_head().embed(block_inputs(samples, blocks, MASK))
    assert_near(
        draft(samples.hidden_TLH, samples.lengths, embeds, blocks).detach(),
        naive_forward(draft, samples, embeds, blocks),
    )


def test_layers_may_differ_in_their_window() -> None:
    config = small_config("dflash", 5, layer_types=["sliding_attention", "full_attention"])
    draft, samples = lively_draft(config), random_samples((20,))
    blocks = make_blocks(samples, torch.tensor([3, 15]), 4)
    embeds = random_head().embed(block_inputs(samples, blocks, MASK))
    assert_near(
        draft(samples.hidden_TLH, samples.lengths, embeds, blocks).detach(),
        naive_forward(draft, samples, embeds, blocks),
    )


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
@pytest.mark.parametrize("window", [None, 6])
def test_a_block_sees_its_own_past_alone(kind: str, window: int | None) -> None:
    """Each hidden row is changed in turn: exactly the blocks of its sample whose anchor lies after it, within reach, change."""
    draft, samples = lively_draft(small_config(kind, window)), random_samples(LENGTHS)
    anchors = torch.tensor([1, 5, 8, 10, 16, 22, 24, 29, 40])
    sample_of = make_blocks(samples, anchors, 4).sample_N.tolist()
    before = states_of(draft, samples, anchors)
    row_sample = [index for index, length in enumerate(LENGTHS) for _ in range(length)]
    for row in range(sum(LENGTHS)):
        hidden = samples.hidden_TLH.clone()
        hidden[row] = hidden[row] * -3.0 + 1.0
        after = states_of(draft, PackedSamples(samples.input_ids_T, samples.loss_mask_T, hidden, LENGTHS), anchors)
        for n, anchor in enumerate(anchors.tolist()):
            sees = row_sample[row] == sample_of[n] and row < anchor and (window is None or anchor - row < window)
            if sees:
                assert not torch.equal(before[n], after[n]), f"row {row} should reach the block at {anchor}"
            else:
                assert torch.equal(before[n], after[n]), f"row {row} must not reach the block at {anchor}"


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_a_block_does_not_see_other_blocks(kind: str) -> None:
    draft, samples = lively_draft(small_config(kind)), random_samples(LENGTHS)
    anchors = torch.tensor([2, 3, 4, 12, 13, 30])
    before = states_of(draft, samples, anchors)
    for changed in range(len(anchors)):
        after = states_of(draft, samples, anchors, (changed, torch.full((4, 32), 0.7)))
        for n in range(len(anchors)):
            assert torch.equal(before[n], after[n]) == (n != changed)


def test_a_block_sees_all_of_itself_and_its_later_slots_too() -> None:
    draft, samples = lively_draft(small_config()), random_samples((12,))
    anchors = torch.tensor([6])
    embeds = random_head().embed(block_inputs(samples, make_blocks(samples, anchors, 4), MASK))[0]
    before = states_of(draft, samples, anchors, (0, embeds))
    for slot in range(4):
        changed = embeds.clone()
        changed[slot] += 0.5
        after = states_of(draft, samples, anchors, (0, changed))
        assert all(not torch.equal(before[0, other], after[0, other]) for other in range(4))


def test_scores_are_linear_in_blocks_times_context() -> None:
    """No tensor of the forward is larger than the blocks' slots times heads times their own sample's context."""
    draft, samples = lively_draft(small_config()), random_samples((60, 50))
    anchors = anchors_of(samples, 4)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            output = function(*args, **(kwargs or {}))
            if isinstance(output, Tensor):
                largest = max(largest, output.numel())
            return output

    with Watch():
        states_of(draft, samples, anchors)
    slots = len(anchors) * 4
    assert largest <= slots * 4 * (60 + 4), "scores of blocks against other blocks, or against other samples' context"
    assert slots * 4 * slots > 2 * slots * 4 * (60 + 4), (
        "the bound would also hold with those scores: the test shows nothing"
    )


def test_layout_cuts_the_context_at_the_last_anchor() -> None:
    samples = random_samples(LENGTHS)
    layout = layout_of(LENGTHS, make_blocks(samples, torch.tensor([2, 8, 9, 30]), 4))
    assert layout.blocks == (2, 1, 0, 1)
    assert layout.context == (8, 0, 0, 6)
    assert layout.relative_N.tolist() == [2, 8, 0, 6]
