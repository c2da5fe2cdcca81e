"""Packed micro-batches against the cache's own rows, and drawn blocks against a plain loop over each sample alone."""

import math

import numpy as np
import pytest
import torch
from train_fixtures import train_cache

from cache.read import Cache, open_cache
from draft.blocks import block_valid
from schemas.options import DataOptions, LossOptions
from train.anchors import draw_anchors, draw_prefixes
from train.batch import Draw, first_anchor, read_batches
from train.stream import MicroBatch, StreamState, order_of, stream

GAP = [0, 1, 0, 0, 0, 0, 1, 0]  # two supervised tokens, five apart: an anchor for blocks of 6 and more


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    path = train_cache(
        tmp_path_factory.mktemp("batch") / "c", shards=2, masks={1: GAP, 4: [1, 1, 1, 0, 1]}, codec="bf16"
    )
    return open_cache(path, [2, 0])


def micro(*rows: int, epoch: int = 0) -> MicroBatch:
    return MicroBatch(epoch, rows, StreamState(epoch, 1), False)


def naive_anchors(mask: list[bool], block: int) -> list[int]:
    return [a for a, own in enumerate(mask) if own and any(mask[a + 1 : a + block])]


def test_samples_are_the_caches_rows_end_to_end(cache: Cache) -> None:
    (batch,) = read_batches(cache, Draw(4, 3, 0, None), [micro(4, 0, 2)])
    start = 0
    for row, length in zip((4, 0, 2), batch.samples.lengths, strict=True):
        offset = cache.index["offset"][row].as_py()
        assert length == cache.index["length"][row].as_py()
        ids, mask = cache.tokens(offset, length)
        rows = slice(start, start + length)
        assert torch.equal(batch.samples.input_ids_T[rows], ids) and torch.equal(batch.samples.loss_mask_T[rows], mask)
        assert torch.equal(batch.samples.hidden_TLH[rows], cache.hidden(offset, length, (0, 2)))
        start += length
    assert batch.samples.hidden_TLH.shape == (start, 2, 16) and batch.samples.hidden_TLH.dtype == torch.bfloat16


@pytest.mark.parametrize("block", [2, 4, 6])
@pytest.mark.parametrize(("base", "rate"), [(None, 1.0), (0.7, 0.3)])
def test_blocks_are_each_samples_own_whatever_it_is_packed_with(
    cache: Cache, block: int, base: float | None, rate: float
) -> None:
    draw = Draw(block, 5, 11, base, rate)
    order = order_of(cache.index, 0, 1, 45)
    for batch, _ in zip(read_batches(cache, draw, stream(order, StreamState(3))), range(6), strict=False):
        anchors, prefixes, without, start = [], [], 0, 0
        for row, length in zip(batch.micro.rows, batch.samples.lengths, strict=True):
            mask = batch.samples.loss_mask_T[start : start + length].tolist()
            every = naive_anchors(mask, block)
            limit = min(5, math.ceil(rate * sum(mask)))
            drawn = draw_anchors(np.array(every, dtype=np.int64), limit, 11, batch.micro.epoch, row)
            anchors += (drawn + start).tolist()
            prefixes += (
                [1] * len(drawn)
                if base is None
                else draw_prefixes(len(drawn), block, base, 11, batch.micro.epoch, row).tolist()
            )
            without += not every
            start += length
        assert batch.blocks.anchor_N.tolist() == anchors and batch.blocks.prefix_N.tolist() == prefixes
        assert batch.without_anchor == without
        if base is None:
            assert block_valid(batch.samples, batch.blocks).any(1).all()


def test_a_sample_without_an_anchor_is_counted_and_kept(cache: Cache) -> None:
    short, long = (next(iter(read_batches(cache, Draw(block, 9, 0, None), [micro(1, 2)]))) for block in (5, 6))
    assert (short.without_anchor, long.without_anchor) == (1, 0)
    assert len(short.samples.lengths) == 2 and short.blocks.sample_N.unique().tolist() == [1]
    assert long.blocks.anchor_N[0] == 1
    (alone,) = read_batches(cache, Draw(5, 9, 0, None), [micro(1)])
    assert len(alone.blocks.anchor_N) == 0 and alone.without_anchor == 1


def test_an_empty_share_of_a_round_is_an_empty_batch(cache: Cache) -> None:
    (batch,) = read_batches(cache, Draw(4, 3, 0, 0.9), [micro()])
    assert batch.samples.lengths == () and batch.samples.hidden_TLH.shape == (0, 2, 16)
    assert len(batch.blocks.anchor_N) == 0 and batch.without_anchor == 0


def test_the_first_anchor_is_found_by_tokens_alone(cache: Cache) -> None:
    assert first_anchor(cache, 5, [1]) is None
    assert first_anchor(cache, 5, [1, 4, 0]) == 4
    assert first_anchor(cache, 6, [1, 4]) == 1


def test_prefixes_are_drawn_only_where_they_vary() -> None:
    data = DataOptions(anchors=3, seed=5, anchor_rate=0.5)
    assert Draw.of(8, data, LossOptions()) == Draw(8, 3, 5, None, 0.5)
    assert Draw.of(8, data, LossOptions(prefix="variable", prefix_base=0.8)).prefix_base == 0.8
