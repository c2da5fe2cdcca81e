"""The stream: every sample once per epoch, whatever the seed, the number of ranks and the place of resuming; and reading ahead."""

import itertools
import threading
import time
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.prefetch import Prefetch
from train.stream import (
    MicroBatch,
    Order,
    StreamState,
    micro_batches,
    order_of,
    sample_order,
    steps_left,
    steps_of,
    stream,
)


@st.composite
def orders(draw: st.DrawFn) -> Order:
    shards = draw(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=5), min_size=1, max_size=7))
    length = [tokens for shard in shards for tokens in shard]
    shard = [number for number, shard in enumerate(shards) for _ in shard]
    rows = np.array(sorted(draw(st.sets(st.integers(0, 200), min_size=len(length), max_size=len(length)))))
    return Order(
        rows,
        np.array(length),
        np.array(shard),
        draw(st.integers(-3, 2**70)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 90)),
    )


def epoch_of(order: Order, state: StreamState, rank: int, world: int) -> list[MicroBatch]:
    """One rank's items from a place to the end of its epoch."""
    items = []
    for item in stream(order, state, rank, world):
        items.append(item)
        if item.last:
            return items
    raise AssertionError("an endless stream has ended")


def dealt(order: Order, state: StreamState, world: int) -> list[tuple[int, ...]]:
    """What all ranks together run from a place to the end of the epoch, in the global order."""
    ranks = [epoch_of(order, state, rank, world) for rank in range(world)]
    assert len({len(items) for items in ranks}) == 1
    for items in zip(*ranks, strict=True):
        assert len({(item.epoch, item.resume, item.last) for item in items}) == 1
    return [item.rows for items in zip(*ranks, strict=True) for item in items if item.rows]


@given(orders(), st.integers(0, 5), st.integers(1, 5))
def test_each_sample_once_per_epoch_in_one_order_for_any_world(order: Order, epoch: int, world: int) -> None:
    batches = dealt(order, StreamState(epoch), world)
    assert Counter(row for batch in batches for row in batch) == Counter(order.row_S.tolist())
    assert batches == [item.rows for item in epoch_of(order, StreamState(epoch), 0, 1)]


@given(orders(), st.integers(0, 3), st.integers(1, 4), st.integers(1, 4), st.integers(0, 60))
def test_resuming_anywhere_with_any_world_runs_exactly_the_rest(
    order: Order, epoch: int, before: int, after: int, cut: int
) -> None:
    begun = epoch_of(order, StreamState(epoch), 0, before)
    state = begun[min(cut, len(begun) - 1)].resume
    if state.epoch > epoch:
        assert state == StreamState(epoch + 1, 0)
        return
    assert dealt(order, state, after) == dealt(order, StreamState(epoch), 1)[state.position :]


@given(orders(), st.integers(0, 3))
def test_micro_batches_are_filled_greedily_and_never_over_budget(order: Order, epoch: int) -> None:
    length = dict(zip(order.row_S.tolist(), order.length_S.tolist(), strict=True))
    tokens = [[length[row] for row in batch.tolist()] for batch in micro_batches(order, epoch)]
    for batch, following in itertools.zip_longest(tokens, tokens[1:]):
        assert len(batch) == 1 or sum(batch) <= order.batch_tokens
        assert following is None or sum(batch) + following[0] > order.batch_tokens


@given(orders(), st.integers(0, 3))
def test_samples_mix_only_within_a_window_of_shards(order: Order, epoch: int) -> None:
    shard_S = order.shard_S[sample_order(order, epoch)].tolist()
    first = {shard: shard_S.index(shard) for shard in shard_S}
    last = {shard: len(shard_S) - 1 - shard_S[::-1].index(shard) for shard in shard_S}
    for shard in first:
        # A window's samples are contiguous, so whatever lies between a shard's first and last sample is of its window.
        assert len(set(shard_S[first[shard] : last[shard] + 1])) <= order.window


@given(orders(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_steps_are_what_a_walk_counts(order: Order, epochs: int, accumulate: int, world: int) -> None:
    counted, rounds = 0, 0
    for item in stream(order, StreamState(), 0, world):
        rounds += 1
        if rounds == accumulate or item.last:
            counted, rounds = counted + 1, 0
        if item.resume == StreamState(epochs, 0):
            break
    assert steps_of(order, epochs, accumulate, world) == counted


def test_seed_and_epoch_change_the_order() -> None:
    def order(seed: int) -> Order:
        return Order(np.arange(64), np.ones(64, np.int64), np.arange(64) // 8, seed, 2, 1)

    runs = [tuple(sample_order(order(seed), epoch).tolist()) for seed in (0, 1, 2**32) for epoch in (0, 1)]
    assert len(set(runs)) == len(runs)
    shards = [np.array(run)[::8] // 8 for run in runs]
    assert len({tuple(first.tolist()) for first in shards}) > 1


def test_only_the_train_split_runs() -> None:
    index = pa.table(
        {
            "split": ["train", "val", "train"],
            "length": pa.array([3, 4, 5], pa.int32()),
            "shard": pa.array([0, 0, 1], pa.int32()),
        }
    )
    order = order_of(index, 0, 8, 100)
    assert order.row_S.tolist() == [0, 2] and order.length_S.tolist() == [3, 5] and order.shard_S.tolist() == [0, 1]


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(), max_size=30), st.integers(1, 4))
def test_reading_ahead_keeps_the_order(items: list[int], ahead: int) -> None:
    with Prefetch(iter(items), ahead) as ready:
        assert list(ready) == items


def test_reading_ahead_is_bounded_and_waiting_is_measured() -> None:
    read = []

    def source() -> itertools.count:
        for number in itertools.count():
            read.append(number)
            yield number

    with Prefetch(source(), ahead=2) as ready:
        next(ready)
        time.sleep(0.2)
        assert len(read) <= 4  # one taken, two ready, one in hand
    slow = (time.sleep(0.05) or number for number in range(2))
    with Prefetch(slow) as ready:
        list(ready)
    assert ready.waited >= 0.08


def test_a_fault_of_the_source_reaches_the_consumer_after_the_items_before_it() -> None:
    def source() -> "itertools.chain[int]":
        yield 1
        raise ValueError("shard 3 is corrupt")

    with Prefetch(source()) as ready:
        assert next(ready) == 1
        for _ in range(2):
            with pytest.raises(ValueError, match="shard 3 is corrupt"):
                next(ready)


def test_leaving_ends_the_thread_of_an_endless_source() -> None:
    before = threading.active_count()
    with Prefetch(itertools.count()) as ready:
        next(ready)
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


@given(orders(), st.integers(1, 3), st.integers(1, 3), st.integers(0, 30))
@settings(max_examples=30, deadline=None)
def test_steps_left_are_those_that_the_stream_takes(order: Order, accumulate: int, world: int, behind: int) -> None:
    """Counted by walking to the end of the third epoch, from a place that one rank alone had come to."""
    place = next(itertools.islice(stream(order), behind, None)).resume
    steps, inside = 0, 0
    for item in stream(order, place, 0, world):
        if place.epoch >= 3:
            break
        inside += 1
        if inside == accumulate or item.last:
            steps, inside = steps + 1, 0
        if item.resume == StreamState(3, 0):
            break
    if place.epoch < 3 or place == StreamState(3, 0):
        assert steps_left(order, place, 3, accumulate, world) == steps
    else:
        assert steps_left(order, place, 3, accumulate, world) < 0
    assert steps_left(order, StreamState(), 2, accumulate, world) == steps_of(order, 2, accumulate, world)
    assert steps_left(order, StreamState(2, 0), 1, accumulate, world) == steps_of(
        order, 1, accumulate, world
    ) - steps_of(order, 2, accumulate, world)
