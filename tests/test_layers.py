"""Default layers, checks, and the tap on the chosen decoder layers."""

import pytest
import torch
from torch import nn

from schemas.errors import OptionError, TargetError
from target.layers import check_layers, default_layers, find_layers, tap_layers


@pytest.mark.parametrize(
    ("layers", "draft", "expected"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (28, 5, (1, 7, 13, 19, 25)),
        (6, 5, (1, 2, 3)),  # 1, 1.5, 2, 2.5, 3: halves go to the even number
        (30, 5, (1, 8, 14, 20, 27)),  # 7.5 to 8, 20.5 to 20
        (4, 5, (1,)),
        (2, 5, (0,)),
        (1, 5, (0,)),
        (36, 1, (18,)),
        (36, 2, (1, 33)),
    ],
)
def test_default_layers(layers, draft, expected):
    assert default_layers(layers, draft) == expected


def test_check_layers_sorts():
    assert check_layers([5, 0, 2], 6) == (0, 2, 5)


@pytest.mark.parametrize(
    ("layers", "rule"),
    [
        ([6], "layer 6 is out of range.*0 to 5"),
        ([-1], "layer -1 is out of range"),
        ([1, 2, 1], "layer 1 is given twice"),
        ([], "no layer"),
    ],
)
def test_check_layers_refuses(layers, rule):
    with pytest.raises(OptionError, match=rule):
        check_layers(layers, 6)


class Decoder(nn.Module):
    """Layers that return tuples, beside a decoy list of another length and a deeper one of the same length."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(2, 2) for _ in range(5)])
        self.side = nn.ModuleDict({"blocks": nn.ModuleList([nn.Identity() for _ in range(3)])})
        self.layers = nn.ModuleList([Doubling() for _ in range(3)])

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)[0]
        return hidden


class Doubling(nn.Module):
    def forward(self, hidden):
        return hidden * 2, "attention weights"


def test_find_and_tap():
    decoder = Decoder()
    layers = find_layers(decoder, 3)
    assert layers is decoder.layers
    with tap_layers(layers, (0, 2)) as taken:
        decoder(torch.ones(1, 4, 2))
        assert sorted(taken) == [0, 2]
        assert torch.equal(taken[0], torch.full((1, 4, 2), 2.0))
        assert torch.equal(taken[2], torch.full((1, 4, 2), 8.0))
        taken.clear()
    decoder(torch.ones(1, 4, 2))
    assert not taken, "the tap is gone after the block"
    with pytest.raises(TargetError, match="no list of 7 decoder layers"):
        find_layers(decoder, 7)
