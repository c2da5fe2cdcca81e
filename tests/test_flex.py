"""Flex attention (torch's reference of it, on a CPU) against the split, forwards and backwards, and its mask against the definition."""

import warnings
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import assert_near, lively_draft, random_samples, small_config
from test_attention import LENGTHS, gradients_of
from torch import Tensor

from draft import flex
from draft.attention import Layout, layout_of
from draft.blocks import anchors_of, make_blocks
from draft.split import split_attention

pytestmark = pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile.*")


@pytest.fixture(autouse=True, scope="module")
def gradients_on_a_cpu() -> Iterator[None]:
    """Torch offers flex attention's gradients on GPUs alone, though its reference has them here as well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *_inputs: None)
        yield


def inputs(layout: Layout, width: int = 8) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    count, size, total = len(layout.relative_N), layout.block_size, sum(layout.tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_()

    return (
        draw(count, size, 4, width),
        (draw(count, size, 2, width), draw(count, size, 2, width)),
        (draw(total, 2, width), draw(total, 2, width)),
    )


@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=3),
    size=st.sampled_from([2, 4, 7, 16]),
    extra=st.none() | st.integers(0, 60),
    causal=st.booleans(),
    data=st.data(),
)
@settings(max_examples=10, deadline=None)
def test_flex_is_the_split(lengths: list[int], size: int, extra: int | None, causal: bool, data: st.DataObject) -> None:
    """Any samples, anchors, block size, window and causality; gradients of all inputs too."""
    samples = random_samples(tuple(lengths))
    anchors = data.draw(st.lists(st.integers(0, sum(lengths) - 1), min_size=1, max_size=12, unique=True))
    layout = layout_of(samples.lengths, make_blocks(samples, torch.tensor(sorted(anchors)), size))
    window = None if extra is None else size + extra
    query, own, context = inputs(layout)
    leaves = (query, *own, *context)
    found = flex.flex_attention_of(layout, window, causal)(query, own, context)
    expected = split_attention(layout, window, 4, causal)(query, own, context)
    assert_near(found.detach(), expected.detach(), 1e-5)
    direction = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    ours, theirs = (torch.autograd.grad(output, leaves, direction, allow_unused=True) for output in (found, expected))
    for one, two in zip(ours, theirs, strict=True):
        two = torch.zeros(()) if two is None else two
        assert one is not None and (one - two).abs().max() <= 1e-5 * max(1.0, two.abs().max().item())


@pytest.mark.parametrize("window", [None, 6])
def test_a_draft_gives_the_same_by_either_attention(window: int | None) -> None:
    draft, samples = lively_draft(small_config("dflash2", window)), random_samples(LENGTHS)
    expected = gradients_of(draft, samples, anchors_of(samples, 4))
    draft.attention = "flex"
    for one, two in zip(gradients_of(draft, samples, anchors_of(samples, 4)), expected, strict=True):
        assert_near(one, two, 2e-5)


@pytest.mark.parametrize("window", [None, 40])
def test_tiles_are_those_that_some_query_sees(window: int | None) -> None:
    """Tile by tile against the visible pairs; every query sees a key, also those that only fill a tile."""
    samples = random_samples((300, 5, 270))
    anchors = torch.tensor([0, 3, 129, *range(270, 300, 2), 302, 304, 310, 400, 450, 574])
    layout = layout_of(samples.lengths, make_blocks(samples, anchors, 16))
    bounds, keys = flex.query_bounds(layout, window, False), 640 + 384
    first, stop, own_first, own_stop = bounds.long()
    key = torch.arange(keys)
    visible = ((key >= first[:, None]) & (key < stop[:, None])) | (
        (key >= own_first[:, None]) & (key < own_stop[:, None])
    )
    assert visible.any(1).all()
    tiles = visible.view(3, 128, -1, 128)
    mask = flex.block_mask(bounds, keys)
    some, full = tiles.any(3).any(1), tiles.all(3).all(1)
    for count, columns, expected in (
        (mask.kv_num_blocks, mask.kv_indices, some & ~full),
        (mask.full_kv_num_blocks, mask.full_kv_indices, full),
    ):
        assert count is not None and columns is not None
        listed = [sorted(row[:n].tolist()) for row, n in zip(columns[0, 0], count[0, 0].tolist(), strict=True)]
        assert listed == [row.nonzero()[:, 0].tolist() for row in expected]
    assert some.sum() < some.numel(), "every tile is visible: the test shows nothing"
    assert window or full.any(), "no tile is visible as a whole: the test shows nothing"


def test_other_lengths_and_anchors_are_not_compiled_again() -> None:
    """What the compiler's front end sees of a batch, without its slow back end."""
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> torch.fx.GraphModule:
        compiled.append(1)
        return graph

    torch._dynamo.reset()
    kernel = torch.compile(flex.flex_attention, backend=backend, dynamic=True, fullgraph=True)
    for lengths, step in (((200, 90), 9), ((300, 10, 130), 7), ((1,), 1), ((400,), 31)):
        samples = random_samples(lengths)
        layout = layout_of(lengths, make_blocks(samples, torch.arange(0, sum(lengths), step), 16))
        query, own, context = inputs(layout)
        attend = flex.flex_attention_of(layout, None)
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = attend(query, own, context)
            patch.setattr(flex, "_kernel", lambda _device: kernel)
            assert_near(attend(query, own, context).detach(), expected.detach())
    assert sum(compiled) == 1
