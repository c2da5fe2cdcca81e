"""The order of training: one global sequence of micro-batches, a pure function of (seed, epoch) and the index of the cache.

S samples of the train split. Ranks are dealt micro-batches in turn, so the sequence is the same for any number of them, and a
place in it (epoch, micro-batches behind) means the same to all.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from train.keyed import Purpose, keyed_order


@dataclass(frozen=True)
class StreamState:
    """A place between two micro-batches: the epoch, and how many of its micro-batches lie behind, over all ranks."""

    epoch: int = 0
    position: int = 0


@dataclass(frozen=True)
class MicroBatch:
    """One rank's share of a round: `rows` of the index, in order. Empty where an epoch's last round has none left for the rank.

    `resume` is the place after the round, `last` whether the round ends its epoch.
    """

    epoch: int
    rows: tuple[int, ...]
    resume: StreamState
    last: bool


@dataclass(frozen=True, eq=False)
class Order:
    """What decides the sequence: the train split's samples (index row, tokens, shard), and how they are shuffled and packed.

    `window` is the number of shards within which samples are shuffled, `batch_tokens` the most tokens of a micro-batch.
    """

    row_S: NDArray[np.int64]
    length_S: NDArray[np.int64]
    shard_S: NDArray[np.int64]
    seed: int
    window: int
    batch_tokens: int


def order_of(index: pa.Table, seed: int, window: int, batch_tokens: int) -> Order:
    """The train split of an index, to be run in that order."""
    row_S = np.flatnonzero(index["split"].to_numpy(zero_copy_only=False) == "train").astype(np.int64)
    length_S, shard_S = (index[name].to_numpy().astype(np.int64)[row_S] for name in ("length", "shard"))
    return Order(row_S, length_S, shard_S, seed, window, batch_tokens)


def sample_order(order: Order, epoch: int) -> NDArray[np.int64]:
    """Positions [S] into the order's columns, as the epoch runs them: shards shuffled, samples within a window of shards."""
    shards = np.unique(order.shard_S)
    shuffled = shards[keyed_order(len(shards), Purpose.SHARDS, order.seed, epoch)]
    window_of = np.empty(len(shards), np.int64)
    window_of[np.searchsorted(shards, shuffled)] = np.arange(len(shards)) // order.window
    window_S = window_of[np.searchsorted(shards, order.shard_S)]
    mixed_S = keyed_order(len(order.row_S), Purpose.SAMPLES, order.seed, epoch)
    return mixed_S[np.argsort(window_S[mixed_S], kind="stable")]


def micro_batches(order: Order, epoch: int) -> list[NDArray[np.int64]]:
    """The epoch's sequence of micro-batches, each the index rows of whole samples.

    Filled greedily up to `batch_tokens`; a single longer sample is a micro-batch of its own.
    """
    order_S = sample_order(order, epoch)
    row_S, ends_S = order.row_S[order_S], np.cumsum(order.length_S[order_S])
    batches, start, behind = [], 0, 0
    while start < len(row_S):
        stop = max(start + 1, int(np.searchsorted(ends_S, behind + order.batch_tokens, side="right")))
        batches.append(row_S[start:stop])
        start, behind = stop, int(ends_S[stop - 1])
    return batches


def stream(order: Order, state: StreamState = StreamState(), rank: int = 0, world: int = 1) -> Iterator[MicroBatch]:
    """Endless micro-batches of one rank from a place on: of each round of `world`, the one numbered `rank`.

    Every rank gets as many items, with the same `resume` and `last`, so that no rank waits for one that has ended its epoch.
    """
    epoch, position = state.epoch, state.position
    while True:
        batches = micro_batches(order, epoch)
        while position < len(batches):
            mine = batches[position + rank].tolist() if position + rank < len(batches) else []
            position = min(position + world, len(batches))
            last = position == len(batches)
            resume = StreamState(epoch + 1, 0) if last else StreamState(epoch, position)
            yield MicroBatch(epoch, tuple(mine), resume, last)
        epoch, position = epoch + 1, 0


def steps_of_epoch(order: Order, epoch: int, accumulate: int = 1, world: int = 1) -> int:
    """Optimizer steps of an epoch: a step takes `accumulate` rounds of `world` micro-batches, the last step what is left."""
    return -(-len(micro_batches(order, epoch)) // (accumulate * world))


def steps_of(order: Order, epochs: int, accumulate: int = 1, world: int = 1) -> int:
    """Optimizer steps of the first `epochs` epochs. They differ by a few: another order packs otherwise."""
    return sum(steps_of_epoch(order, epoch, accumulate, world) for epoch in range(epochs))
