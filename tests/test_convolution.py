"""The in-block convolution against its definition, element by element."""

import pytest
import torch
from reference import assert_near, naive_convolve

from draft.convolution import BlockConvolution


def lively(kernel_size: int, group: int) -> BlockConvolution:
    generator = torch.Generator().manual_seed(3)
    convolution = BlockConvolution(16, kernel_size, group)
    with torch.no_grad():
        for parameter in convolution.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return convolution


@pytest.mark.parametrize(("kernel_size", "group", "block"), [(1, 4, 5), (2, 4, 5), (3, 16, 5), (4, 1, 3), (4, 8, 1)])
@pytest.mark.parametrize("side", [0, 1])
def test_convolution_is_the_definition(kernel_size: int, group: int, block: int, side: int) -> None:
    convolution = lively(kernel_size, group)
    normed, states = torch.randn(2, 3, block, 16, generator=torch.Generator().manual_seed(1))
    found = convolution.convolve(states, convolution.deltas(normed)[side], side)
    weights = {f"c.{key}": value.double() for key, value in convolution.state_dict().items()}
    for index in range(3):
        expected = naive_convolve(states[index].double(), normed[index].double(), weights, "c", side, group)
        assert_near(found[index], expected)


def test_blocks_do_not_leak_into_each_other() -> None:
    convolution = lively(3, 4)
    states = torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(2))
    changed = states.clone()
    changed[0] += 1.0
    before, after = (convolution.convolve(x, convolution.deltas(x)[0], 0) for x in (states, changed))
    assert torch.equal(before[1:], after[1:])
    assert not torch.equal(before[0], after[0])
