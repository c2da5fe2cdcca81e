"""Packed samples and the blocks drawn from them: what a draft sees and what it must predict (docs/design.md, section 4).

T packed tokens, L captured layers, H hidden, N blocks, B block size.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from cache.codecs import PackedStates


@dataclass(frozen=True)
class PackedSamples:
    """Whole samples laid end to end: T = sum(lengths). `loss_mask_T` is bool, True where the target wrote the token itself.

    `states` are the hidden states [T, L, H], or still as a cache stores them.
    """

    input_ids_T: Tensor
    loss_mask_T: Tensor
    states: Tensor | PackedStates
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        total = sum(self.lengths)
        shapes = (self.input_ids_T.shape[0], self.loss_mask_T.shape[0], len(self.states))
        assert shapes == (total, total, total), f"{shapes} rows for samples of {total} tokens"
        assert self.loss_mask_T.dtype == torch.bool

    @cached_property
    def hidden_TLH(self) -> Tensor:  # noqa: N802
        """The hidden states [T, L, H], decoded where they are and once."""
        return self.states.decode() if isinstance(self.states, PackedStates) else self.states

    @cached_property
    def bounds(self) -> Tensor:
        """[T, 2] int64: the packed rows at which each token's sample begins and ends (exclusive)."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64, device=self.input_ids_T.device)
        ends = lengths.cumsum(0)
        return torch.stack([ends - lengths, ends], 1).repeat_interleave(lengths, 0)

    def to(self, device: torch.device | str) -> "PackedSamples":
        """The same samples on a device. States are decoded there, after the smaller transfer."""
        if torch.device(device) == self.input_ids_T.device:
            return self
        states = self.states.to(device)
        if isinstance(states, PackedStates):
            states = states.decode()
        return PackedSamples(self.input_ids_T.to(device), self.loss_mask_T.to(device), states, self.lengths)


@dataclass(frozen=True)
class Blocks:
    """N blocks, ordered by sample. `anchor_N` is a row on the packed axis, `prefix_N` how many real tokens the block shows."""

    anchor_N: Tensor
    sample_N: Tensor
    prefix_N: Tensor
    block_size: int

    def to(self, device: torch.device | str) -> "Blocks":
        """The same blocks on a device."""
        return Blocks(self.anchor_N.to(device), self.sample_N.to(device), self.prefix_N.to(device), self.block_size)


def make_blocks(samples: PackedSamples, anchor_N: Tensor, block_size: int, prefix_N: Tensor | None = None) -> Blocks:
    """The blocks of given anchors (ascending packed rows, so samples ascend too). Without `prefix_N` each shows its anchor alone."""
    ends = torch.tensor(samples.lengths, dtype=torch.int64, device=anchor_N.device).cumsum(0)
    sample_N = torch.searchsorted(ends, anchor_N, right=True)
    assert bool((sample_N[1:] >= sample_N[:-1]).all()), (
        "anchors ascend: the attention takes a sample's blocks as one run"
    )
    return Blocks(anchor_N, sample_N, torch.ones_like(anchor_N) if prefix_N is None else prefix_N, block_size)


def anchors_of(samples: PackedSamples, block_size: int) -> Tensor:
    """Every anchor, as ascending packed rows: supervised, with a supervised target in slots 1..B-1 of its own sample."""
    row_T = torch.arange(samples.input_ids_T.shape[0], device=samples.input_ids_T.device)
    valid_TB = _supervised_ahead(samples, row_T, block_size)
    return (samples.loss_mask_T & valid_TB[:, 1:].any(1)).nonzero()[:, 0]


def block_inputs(samples: PackedSamples, blocks: Blocks, mask_token_id: int) -> Tensor:
    """Token ids [N, B] that the draft is given: the first `prefix` real tokens of each block, then MASK."""
    rows_NB, inside_NB = _rows(samples, blocks.anchor_N, blocks.block_size)
    shown_NB = inside_NB & (_slots(blocks) < blocks.prefix_N[:, None])
    return torch.where(shown_NB, samples.input_ids_T[rows_NB], mask_token_id)


def block_positions(samples: PackedSamples, blocks: Blocks) -> Tensor:
    """Rotary positions [N, B], counted from each sample's first token: anchor, anchor + 1, ... also past the sample's end."""
    start_N = samples.bounds[blocks.anchor_N, 0]
    return (blocks.anchor_N - start_N)[:, None] + _slots(blocks)


def block_labels(samples: PackedSamples, blocks: Blocks) -> Tensor:
    """The token AT each slot's position, [N, B]: no shift. Meaningless where `block_valid` is False."""
    return samples.input_ids_T[_rows(samples, blocks.anchor_N, blocks.block_size)[0]]


def block_predecessors(samples: PackedSamples, blocks: Blocks) -> Tensor:
    """The true token before each slot, [N, B], supervised or not. Slot 0 repeats the anchor and is never a target."""
    labels_NB = block_labels(samples, blocks)
    return torch.cat([labels_NB[:, :1], labels_NB[:, :-1]], 1)


def block_valid(samples: PackedSamples, blocks: Blocks) -> Tensor:
    """Which slots are targets, bool [N, B]: inside the sample, supervised, and not shown to the draft."""
    valid_NB = _supervised_ahead(samples, blocks.anchor_N, blocks.block_size)
    return valid_NB & (_slots(blocks) >= blocks.prefix_N[:, None])


def _slots(blocks: Blocks) -> Tensor:
    return torch.arange(blocks.block_size, device=blocks.anchor_N.device)


def _rows(samples: PackedSamples, anchor_N: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Packed rows of the blocks' slots, and which of them lie in the anchor's sample (the others point at its last row)."""
    rows_NB = anchor_N[:, None] + torch.arange(block_size, device=anchor_N.device)
    end_N1 = samples.bounds[anchor_N, 1:]
    return torch.minimum(rows_NB, end_N1 - 1), rows_NB < end_N1


def _supervised_ahead(samples: PackedSamples, anchor_N: Tensor, block_size: int) -> Tensor:
    rows_NB, inside_NB = _rows(samples, anchor_N, block_size)
    return inside_NB & samples.loss_mask_T[rows_NB]
