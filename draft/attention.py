"""What block attention is over: which packed rows are the context of which blocks. How it is computed is split.py's and flex.py's.

T packed tokens, N blocks, B block size, A query heads, K key-value heads, D head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from draft.blocks import Blocks

Pair = tuple[Tensor, Tensor]
# (query [N, B, A, D], own keys and values [N, B, K, D], context keys and values [T, K, D], all normed and rotated) -> [N, B, A * D].
Attend = Callable[[Tensor, Pair, Pair], Tensor]


@dataclass(frozen=True)
class Layout:
    """Which context rows each run of blocks sees; made once per forward and shared by the layers.

    Sample i has `blocks[i]` blocks and `tokens[i]` packed rows. `relative_N` is each block's anchor counted from its sample's first
    row; `whole` says that every block's context is all rows of its sample.
    """

    blocks: tuple[int, ...]
    tokens: tuple[int, ...]
    relative_N: Tensor
    block_size: int
    whole: bool = False

    @property
    def starts(self) -> list[int]:
        """Each sample's first packed row."""
        return [0, *accumulate(self.tokens)][:-1]


def layout_of(lengths: Sequence[int], blocks: Blocks) -> Layout:
    """The layout of packed samples: a block's context is every row of its sample strictly before its anchor."""
    starts = torch.tensor([0, *lengths[:-1]], device=blocks.anchor_N.device).cumsum(0)
    relative_N = blocks.anchor_N - starts[blocks.sample_N]
    counts = torch.bincount(blocks.sample_N, minlength=len(lengths)).tolist()
    return Layout(tuple(counts), tuple(lengths), relative_N, blocks.block_size)
