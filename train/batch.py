"""A micro-batch as the step takes it: whole samples read from the cache and laid end to end, and the blocks drawn from them.

T packed tokens, L captured layers, H hidden, N blocks.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from cache.read import Cache
from draft.blocks import Blocks, PackedSamples, anchors_of, make_blocks
from schemas.options import DataOptions, LossOptions
from train.anchors import anchor_budget, draw_anchors, draw_prefixes
from train.stream import MicroBatch


@dataclass(frozen=True)
class Batch:
    """`without_anchor` of the samples have no anchor: they are read, counted, and train nothing."""

    micro: MicroBatch
    samples: PackedSamples
    blocks: Blocks
    without_anchor: int

    def to(self, device: torch.device) -> "Batch":
        """The same batch on a device."""
        return replace(self, samples=self.samples.to(device), blocks=self.blocks.to(device))

    def or_nothing(self, layers: int, hidden_size: int) -> "Batch":
        """This batch, or where it has no block one that weighs nothing: two tokens that are not supervised, and a block of them.

        With it a rank that has nothing to train on computes a gradient of zero for every parameter, at the same moments as the
        others compute theirs.
        """
        if len(self.blocks.anchor_N):
            return self
        ids_T, hidden_TLH = torch.zeros(2, dtype=torch.int64), torch.zeros(2, layers, hidden_size)
        samples = PackedSamples(ids_T, torch.zeros(2, dtype=torch.bool), hidden_TLH, (2,))
        return replace(
            self, samples=samples, blocks=make_blocks(samples, torch.ones(1, dtype=torch.int64), self.blocks.block_size)
        )


@dataclass(frozen=True)
class Draw:
    """How blocks are drawn from samples: at most `anchors` of each, `rate` per supervised token.

    `prefix_base` is None where each block shows its anchor alone.
    """

    block_size: int
    anchors: int
    seed: int
    prefix_base: float | None
    rate: float = 1.0

    @staticmethod
    def of(block_size: int, data: DataOptions, loss: LossOptions) -> "Draw":
        """As the resolved options say."""
        assert data.anchor_rate != "auto", "resolved when the cache is known"
        base = loss.prefix_base if loss.prefix == "variable" else None
        return Draw(block_size, data.anchors, data.seed, base, data.anchor_rate)


def read_batches(cache: Cache, draw: Draw, micros: Iterable[MicroBatch]) -> Iterator[Batch]:
    """Read micro-batches one after the other, on the CPU."""
    offsets, lengths = cache.index["offset"].to_numpy(), cache.index["length"].to_numpy()
    for micro in micros:
        samples = read_samples(cache, [(int(offsets[row]), int(lengths[row])) for row in micro.rows])
        blocks, without_anchor = draw_blocks(samples, micro, draw)
        yield Batch(micro, samples, blocks, without_anchor)


def read_samples(cache: Cache, spans: list[tuple[int, int]]) -> PackedSamples:
    """Whole samples, each an (offset, length) of the cache, laid end to end, with the layers the cache was opened for."""
    ids_T, mask_T, states = cache.samples(spans, cache.layers)
    return PackedSamples(ids_T, mask_T, states, tuple(length for _, length in spans))


def draw_blocks(samples: PackedSamples, micro: MicroBatch, draw: Draw) -> tuple[Blocks, int]:
    """The blocks that each sample trains on in the micro-batch's epoch, and how many samples have no anchor."""
    if not micro.rows:
        none_N = torch.empty(0, dtype=torch.int64)
        return Blocks(none_N, none_N, none_N, draw.block_size), 0
    all_anchors = anchors_of(samples, draw.block_size).numpy()
    bounds = np.cumsum([0, *samples.lengths])
    anchors: list[NDArray[np.int64]] = []
    prefixes: list[NDArray[np.int64]] = []
    without_anchor = 0
    turns = micro.turns or (0,) * len(micro.rows)
    for row, turn, start, end in zip(micro.rows, turns, bounds[:-1], bounds[1:], strict=True):
        own = all_anchors[np.searchsorted(all_anchors, start) : np.searchsorted(all_anchors, end)] - start
        budget = anchor_budget(int(samples.loss_mask_T[start:end].sum()), draw.rate, draw.anchors)
        drawn = draw_anchors(own, budget, draw.seed, micro.epoch, row, turn)
        without_anchor += len(own) == 0
        anchors.append(drawn + start)
        if draw.prefix_base is not None:
            key = (draw.seed, micro.epoch, row, turn)
            prefixes.append(draw_prefixes(len(drawn), draw.block_size, draw.prefix_base, *key))
    anchor_N = torch.from_numpy(np.concatenate(anchors))
    prefix_N = None if draw.prefix_base is None else torch.from_numpy(np.concatenate(prefixes))
    return make_blocks(samples, anchor_N, draw.block_size, prefix_N), without_anchor


def first_anchor(cache: Cache, block_size: int, rows: Iterable[int]) -> int | None:
    """The first of the samples (index rows) that has an anchor, or None. Reads tokens until there is one, no hidden states."""
    offsets, lengths = cache.index["offset"].to_numpy(), cache.index["length"].to_numpy()
    for row in rows:
        ids_T, mask_T = cache.tokens(int(offsets[row]), int(lengths[row]))
        if len(anchors_of(PackedSamples(ids_T, mask_T, torch.empty(len(ids_T), 0, 0), (len(ids_T),)), block_size)):
            return row
    return None
