"""The order of training: one global sequence of micro-batches, a pure function of (seed, epoch) and the index of the cache.

S samples of the train split, R runs of them in an epoch (S, unless sources are weighted). Ranks are dealt micro-batches in turn,
so the sequence is the same for any number of them, and a place in it (epoch, micro-batches behind) means the same to all.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from train.keyed import Purpose, keyed_order, keyed_uniform


@dataclass(frozen=True)
class StreamState:
    """A place between two micro-batches: the epoch, and how many of its micro-batches lie behind, over all ranks."""

    epoch: int = 0
    position: int = 0


@dataclass(frozen=True)
class MicroBatch:
    """One rank's share of a round: `rows` of the index, in order. Empty where an epoch's last round has none left for the rank.

    `resume` is the place after the round, `last` whether the round ends its epoch, `position` the number of the micro-batch in its
    epoch. `turns` says of each row how often it has run in the epoch before (empty: none has), where sources are weighted.
    """

    epoch: int
    rows: tuple[int, ...]
    resume: StreamState
    last: bool
    turns: tuple[int, ...] = ()
    position: int = 0


@dataclass(frozen=True, eq=False)
class Order:
    """What decides the sequence: the train split's samples (index row, tokens, shard), and how they are shuffled and packed.

    `window` is the number of shards within which samples are shuffled, `batch_tokens` the most tokens of a micro-batch, `weight_S`
    how often each sample runs in an epoch, on average (None: once).
    """

    row_S: NDArray[np.int64]
    length_S: NDArray[np.int64]
    shard_S: NDArray[np.int64]
    seed: int
    window: int
    batch_tokens: int
    weight_S: NDArray[np.float64] | None = None


def order_of(
    index: pa.Table, seed: int, window: int, batch_tokens: int, weights: Mapping[int, float] | None = None
) -> Order:
    """The train split of an index, to be run in that order; of the sources in `weights` alone, where it is given."""
    row_S = rows_of(index, "train", weights)
    length_S, shard_S = (index[name].to_numpy().astype(np.int64)[row_S] for name in ("length", "shard"))
    weight_S = None
    if weights is not None:
        weight_S = np.array([weights[source] for source in index["source"].to_numpy()[row_S].tolist()])
    return Order(row_S, length_S, shard_S, seed, window, batch_tokens, weight_S)


def rows_of(index: pa.Table, split: str, weights: Mapping[int, float] | None = None) -> NDArray[np.int64]:
    """The rows of an index that are of a split, and of the sources in `weights` where it is given."""
    wanted = index["split"].to_numpy(zero_copy_only=False) == split
    if weights is not None:
        wanted &= np.isin(index["source"].to_numpy(), list(weights))
    return np.flatnonzero(wanted).astype(np.int64)


def repeats(order: Order, epoch: int) -> NDArray[np.int64]:
    """How often each sample runs in an epoch: its weight's whole part, and once more with its fraction as the probability.

    Each is a function of (seed, epoch, index row) alone.
    """
    if order.weight_S is None:
        return np.ones(len(order.row_S), np.int64)
    uniform = keyed_uniform(int(order.row_S.max(initial=-1)) + 1, Purpose.REPEATS, order.seed, epoch)
    whole_S = np.floor(order.weight_S)
    return whole_S.astype(np.int64) + (uniform[order.row_S] < order.weight_S - whole_S)


def sample_order(order: Order, epoch: int) -> NDArray[np.int64]:
    """Positions into the order's columns, as the epoch runs them: shards shuffled, samples within a window of shards.

    [S], each once, where sources are not weighted.
    """
    shards = np.unique(order.shard_S)
    shuffled = shards[keyed_order(len(shards), Purpose.SHARDS, order.seed, epoch)]
    window_of = np.empty(len(shards), np.int64)
    window_of[np.searchsorted(shards, shuffled)] = np.arange(len(shards)) // order.window
    window_S = window_of[np.searchsorted(shards, order.shard_S)]
    drawn_R = np.repeat(np.arange(len(order.row_S)), repeats(order, epoch))
    mixed_R = drawn_R[keyed_order(len(drawn_R), Purpose.SAMPLES, order.seed, epoch)]
    return mixed_R[np.argsort(window_S[mixed_R], kind="stable")]


def turns_of(row_R: NDArray[np.int64]) -> NDArray[np.int64]:
    """How often each entry has come before: [7, 3, 7, 7] gives [0, 0, 1, 2]."""
    by_row = np.argsort(row_R, kind="stable")
    _, first, counts = np.unique(row_R[by_row], return_index=True, return_counts=True)
    turn_R = np.empty(len(row_R), np.int64)
    turn_R[by_row] = np.arange(len(row_R)) - np.repeat(first, counts)
    return turn_R


def micro_batches(order: Order, epoch: int) -> list[NDArray[np.int64]]:
    """The epoch's sequence of micro-batches, each the index rows of whole samples.

    Filled greedily up to `batch_tokens`; a single longer sample is a micro-batch of its own.
    """
    order_R = sample_order(order, epoch)
    row_R, ends_R = order.row_S[order_R], np.cumsum(order.length_S[order_R])
    batches, start, behind = [], 0, 0
    while start < len(row_R):
        stop = max(start + 1, int(np.searchsorted(ends_R, behind + order.batch_tokens, side="right")))
        batches.append(row_R[start:stop])
        start, behind = stop, int(ends_R[stop - 1])
    return batches


def stream(order: Order, state: StreamState = StreamState(), rank: int = 0, world: int = 1) -> Iterator[MicroBatch]:
    """Endless micro-batches of one rank from a place on: of each round of `world`, the one numbered `rank`.

    Every rank gets as many items, with the same `resume` and `last`, so that no rank waits for one that has ended its epoch.
    """
    epoch, position = state.epoch, state.position
    while True:
        batches = micro_batches(order, epoch)
        turns = _turns(order, batches)
        while position < len(batches):
            number = position + rank
            mine = batches[number].tolist() if number < len(batches) else []
            again = turns[number].tolist() if number < len(turns) else []
            position = min(position + world, len(batches))
            last = position == len(batches)
            resume = StreamState(epoch + 1, 0) if last else StreamState(epoch, position)
            yield MicroBatch(epoch, tuple(mine), resume, last, tuple(again), number)
        epoch, position = epoch + 1, 0


def _turns(order: Order, batches: list[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
    if order.weight_S is None or not batches:
        return []
    return np.split(turns_of(np.concatenate(batches)), np.cumsum([len(batch) for batch in batches])[:-1])


def steps_of_epoch(order: Order, epoch: int, accumulate: int = 1, world: int = 1) -> int:
    """Optimizer steps of an epoch: a step takes `accumulate` rounds of `world` micro-batches, the last step what is left."""
    return -(-len(micro_batches(order, epoch)) // (accumulate * world))


def steps_of(order: Order, epochs: int, accumulate: int = 1, world: int = 1) -> int:
    """Optimizer steps of the first `epochs` epochs. They differ by a few: another order packs otherwise."""
    return sum(steps_of_epoch(order, epoch, accumulate, world) for epoch in range(epochs))


def steps_left(order: Order, state: StreamState, epochs: int, accumulate: int = 1, world: int = 1) -> int:
    """Optimizer steps from a place to the end of `epochs` epochs; from a place beyond it, those since then, negative.

    Another number of ranks may have left off within a step of these: the rest of the epoch is cut into steps from there on.
    """
    if state.epoch >= epochs:
        since = sum(steps_of_epoch(order, epoch, accumulate, world) for epoch in range(epochs, state.epoch))
        return -since - -(-state.position // (accumulate * world))
    rest = len(micro_batches(order, state.epoch)) - state.position
    later = sum(steps_of_epoch(order, epoch, accumulate, world) for epoch in range(state.epoch + 1, epochs))
    return -(-rest // (accumulate * world)) + later
