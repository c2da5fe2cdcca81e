"""The split attention: what it computes, what a block can see, and that it never holds block-against-other-block scores."""

import pytest
import torch
from reference import MASK, assert_near, lively_draft, naive_forward, random_head, random_samples, small_config
from torch import Tensor
from torch.utils._pytree import tree_leaves

from draft import split
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


@pytest.mark.parametrize(
    ("window", "rows"), [(None, [(0, 2), (0, 8), (9, 9), (24, 30)]), (4, [(0, 2), (5, 8), (9, 9), (27, 30)])]
)
def test_a_chunk_reads_no_more_context_than_its_blocks_see(
    monkeypatch: pytest.MonkeyPatch, window: int | None, rows: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr(split, "CPU_VALUES", 1)
    layout = layout_of(LENGTHS, make_blocks(random_samples(LENGTHS), torch.tensor([2, 8, 9, 30]), 4))
    assert layout.blocks == (2, 1, 0, 1) and layout.relative_N.tolist() == [2, 8, 0, 6]
    chunks = list(split._chunks(layout, window, 1))
    assert [(chunk.rows.start, chunk.rows.stop) for chunk in chunks] == rows
    assert [(chunk.blocks.start, chunk.blocks.stop) for chunk in chunks] == [(n, n + 1) for n in range(4)]


def gradients(draft: Draft, states: Tensor) -> list[Tensor]:
    """Of all parameters that the states depend on."""
    of = [p for name, p in draft.named_parameters() if not name.startswith("candidate_selector")]
    return list(torch.autograd.grad((states * torch.linspace(-1, 1, states.numel()).view_as(states)).sum(), of))


def gradients_of(draft: Draft, samples: PackedSamples, anchors: Tensor) -> list[Tensor]:
    """The states, and gradients of all parameters that they depend on."""
    blocks = make_blocks(samples, anchors, draft.config.block_size)
    embeds = random_head().embed(block_inputs(samples, blocks, MASK))
    states = draft(samples.hidden_TLH, samples.lengths, embeds, blocks)
    return [states.detach(), *gradients(draft, states)]


@pytest.mark.parametrize("values", [300, split.CPU_VALUES])
@pytest.mark.parametrize("window", [None, 5])
def test_gradients_are_those_of_every_block_alone(
    monkeypatch: pytest.MonkeyPatch, window: int | None, values: int
) -> None:
    monkeypatch.setattr(split, "CPU_VALUES", values)
    draft, samples = lively_draft(small_config("dflash2", window)), random_samples(LENGTHS)
    blocks = make_blocks(samples, anchors_of(samples, 4), 4)
    embeds = random_head().embed(block_inputs(samples, blocks, MASK))
    found = gradients_of(draft, samples, blocks.anchor_N)[1:]
    expected = gradients(draft, naive_forward(draft, samples, embeds, blocks))
    assert all(each.abs().max() > 0 for each in expected)
    for one, other in zip(found, expected, strict=True):
        assert_near(one, other)


def test_in_bfloat16_gradients_of_shared_context_are_added_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred blocks see the same context, each in a chunk of its own: the error stays that of one block's products."""
    monkeypatch.setattr(split, "CPU_VALUES", 1)
    generator = torch.Generator().manual_seed(0)
    layout = layout_of((300,), make_blocks(random_samples((300,)), torch.arange(150, 250), 4))
    shapes = [(100, 4, 4, 8), *[(100, 4, 2, 8)] * 2, *[(300, 2, 8)] * 2]
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]

    def found() -> list[Tensor]:
        query, own_key, own_value, key, value = inputs
        output = split.split_attention(layout, None, 4)(query, (own_key, own_value), (key, value))
        return list(torch.autograd.grad(output.float().square().sum(), inputs))

    exact = found()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = found()
    assert all(each.dtype == torch.float32 for each in rounded)
    errors = [float((one - other).norm() / other.norm()) for one, other in zip(rounded, exact, strict=True)]
    assert max(errors) < 0.02 and max(errors[3:]) < 0.01


def test_the_backward_pass_keeps_nothing_of_the_size_of_blocks_times_context() -> None:
    """Values that it keeps, for a context twice as long with the same blocks: more by what the context alone needs."""
    draft = lively_draft(small_config("dflash2"))

    def kept(length: int) -> int:
        samples, seen = random_samples((length,)), dict[int, int]()

        def pack(tensor: Tensor) -> Tensor:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
            return tensor

        blocks = make_blocks(samples, torch.arange(length - 60, length - 4), 4)
        embeds = random_head().embed(block_inputs(samples, blocks, MASK))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            states = draft(samples.hidden_TLH, samples.lengths, embeds, blocks)
        assert states.requires_grad
        return sum(seen.values())

    scores = 56 * 4 * 4 * 300  # blocks x slots x heads x context, of one layer
    assert 0 < kept(600) - kept(300) < scores / 2


def test_the_work_of_a_pack_is_that_of_its_samples() -> None:
    """Values computed there and back for four times the samples: four times as many, not sixteen."""
    draft = lively_draft(small_config())

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        values = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            output = function(*args, **(kwargs or {}))
            self.values += sum(each.numel() for each in tree_leaves(output) if isinstance(each, Tensor))
            return output

    def values(count: int) -> int:
        samples = random_samples((10,) * count)
        with Count() as counted:
            gradients_of(draft, samples, anchors_of(samples, 4))
        return counted.values

    assert values(160) < 4.2 * values(40)


@pytest.mark.parametrize("causal", [False, True])
def test_causal_blocks_see_their_earlier_slots_alone(causal: bool) -> None:
    """Of one block, by the definition: query slot by query slot."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 4, 8, generator=generator)
    own = (torch.randn(1, 4, 2, 8, generator=generator), torch.randn(1, 4, 2, 8, generator=generator))
    context = (torch.randn(6, 2, 8, generator=generator), torch.randn(6, 2, 8, generator=generator))
    layout = layout_of((6,), make_blocks(random_samples((6,)), torch.tensor([3]), 4))
    found = split.split_attention(layout, None, 4, causal)(query, own, context).view(4, 4, 8)
    for slot in range(4):
        last = slot + 1 if causal else 4
        for head in range(4):
            keys = torch.cat([context[0][:3, head // 2], own[0][0, :last, head // 2]])
            values = torch.cat([context[1][:3, head // 2], own[1][0, :last, head // 2]])
            assert_near(found[slot, head], (keys @ query[0, slot, head] / 8**0.5).softmax(0) @ values)
