"""The ideas of benchmarks/codec_ideas.py and lossless_ideas.py, on random rows: sizes, errors within a step, nothing lost where none may be."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import lively_draft, random_head, random_samples, small_config

from benchmarks import codec_ideas, lossless_ideas
from benchmarks.codec_ideas import SEARCHED, hadamard, pack_threes, rotated, scaled, unpack_threes
from cache.head import TargetHead
from cache.quantise import dequantise, quantise
from draft.accept import evaluate_samples
from draft.blocks import PackedSamples

WIDE = (1, 2, 3, 5, 8, 9, 11, 190)


def rows(count=40, width=192):
    """Normal rows of very different sizes, some channels hundreds of times wider, one row of zeros."""
    draw = torch.Generator().manual_seed(0)
    rows_TH = torch.randn(count, width, generator=draw) * 10.0 ** torch.randint(-3, 4, (count, 1), generator=draw)
    rows_TH[:, list(WIDE)] *= 300
    rows_TH[0] = 0
    return rows_TH


@given(st.lists(st.integers(-4, 3), min_size=16, max_size=16))
@settings(max_examples=30, deadline=None)
def test_threes_come_back_and_lie_as_written(values):
    packed = pack_threes(torch.tensor(values, dtype=torch.int8).reshape(1, 16))
    bits = "".join(format(value & 7, "03b") for value in reversed(values))
    assert int.from_bytes(bytes(packed[0].tolist()), "little") == int(bits, 2)
    assert unpack_threes(packed).tolist() == [values]


@pytest.mark.parametrize("size", [1, 2, 64])
def test_hadamard_is_its_own_inverse_and_spreads_one_channel_evenly(size):
    turn = hadamard(size)
    torch.testing.assert_close(turn @ turn, torch.eye(size))
    torch.testing.assert_close(turn.abs(), torch.full((size, size), size**-0.5))


@pytest.mark.parametrize(("bits", "largest"), [(4, 7), (3, 3)])
@pytest.mark.parametrize("group", [None, 128, 64, 32])
def test_a_value_is_off_by_half_a_step_of_its_own_group_at_most(bits, largest, group):
    rows_TH = rows()
    back_TH = scaled(rows_TH, bits, group).back_TH
    for row, back in zip(rows_TH.numpy(), back_TH.numpy(), strict=True):
        for first in range(0, len(row), group or len(row)):
            own, found = row[first : first + (group or len(row))], back[first : first + (group or len(row))]
            peak = np.abs(own).max()
            # bfloat16 rounds a group's scale by up to 1/256, and with it every multiple of it.
            assert np.abs(own - found).max() <= peak / largest / 2 + (0 if group is None else peak / 256) + 1e-6 * peak


def test_four_bits_with_a_scale_a_row_are_the_cache_s_int4():
    rows_TH = rows()
    own = codec_ideas.wide_apart(rows_TH, WIDE, lambda rest_TH: scaled(rest_TH, 4))
    kept = quantise(rows_TH, "int4", WIDE)
    assert torch.equal(own.parts["hidden"], kept["hidden"])
    back_TH = dequantise(kept["hidden"], kept["hidden_scale"], kept["hidden_outliers"], "int4", WIDE)
    assert torch.equal(own.back_TH, back_TH)


@pytest.mark.parametrize("bits", [3, 4])
def test_a_searched_scale_is_never_worse_and_mostly_better(bits):
    rows_TH = torch.randn(40, 192, generator=torch.Generator().manual_seed(1))
    plain, searched = scaled(rows_TH, bits), scaled(rows_TH, bits, shares=SEARCHED)
    worse = (searched.back_TH - rows_TH).norm(dim=1) - (plain.back_TH - rows_TH).norm(dim=1)
    assert worse.max() <= 1e-6 and (worse < -1e-3).float().mean() > 0.5
    assert searched.row_bytes == plain.row_bytes


def test_a_rotation_loses_nothing_itself_and_shares_out_a_wide_channel():
    rows_TH = torch.randn(40, 192, generator=torch.Generator().manual_seed(2))
    exact = rotated(rows_TH, lambda turned_TH: codec_ideas.Stored({"hidden": turned_TH}, turned_TH))
    torch.testing.assert_close(exact.back_TH, rows_TH)
    rows_TH[:, 7] = 100
    seen = rotated(rows_TH, lambda turned_TH: codec_ideas.Stored({"hidden": turned_TH}, turned_TH)).parts["hidden"]
    assert (
        seen.abs().amax(1) < 100 / 8 + 6
    ).all()  # 100 over the 64 channels that turn together, and what lies under it


@pytest.mark.parametrize("name", list(codec_ideas.ideas()))
def test_every_idea_keeps_the_shape_zeros_and_most_of_the_states(name):
    rows_TH = rows()
    stored = codec_ideas.ideas()[name](rows_TH, WIDE)
    assert stored.back_TH.shape == rows_TH.shape and stored.back_TH.dtype == torch.bfloat16
    assert not stored.back_TH[0].any()
    assert codec_ideas.error(stored.back_TH[1:].float(), rows_TH[1:]) < 0.4


def test_sizes_count_scales_and_wide_channels():
    sizes = {name: idea(rows(), WIDE).row_bytes for name, idea in codec_ideas.ideas().items()}
    assert sizes["int4"] == 192 / 2 + 4 + 16
    assert sizes["int3"] == 192 * 3 / 8 + 4 + 16
    assert sizes["int4, scales of 128"] == 192 / 2 + 2 * 2 + 16  # 128 channels and the 64 that are left
    assert sizes["int3, rotated, scales of 64, none apart"] == 192 * 3 / 8 + 2 * 3


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_the_walk_drafted_where_it_comes_by_is_that_of_evaluation(kind):
    drawn = random_samples((30, 17, 1, 24))
    samples = PackedSamples(drawn.input_ids_T % 3, drawn.loss_mask_T, drawn.hidden_TLH, drawn.lengths)
    embed_VH = random_head().embed_VH
    head = TargetHead(
        embed_VH, torch.cat([embed_VH[:3], 0 * embed_VH[3:]])
    )  # so that a third of the drafted tokens is right
    made = lively_draft(small_config(kind))
    with torch.inference_mode():
        found = codec_ideas.walked(made, head, samples, samples.hidden_TLH)
    wanted = evaluate_samples(made, head, [(list("abcd"), samples)], lengths=True)["accepted_per_block"]
    assert found.tolist() == [[sum(taken), len(taken)] for taken in wanted.values()]
    assert max(max(taken, default=0) for taken in wanted.values()) > 1


def test_the_difference_of_equal_walks_is_nothing_and_of_better_ones_more():
    walks = np.array([[3, 4], [0, 5], [9, 2]])
    assert codec_ideas.difference(walks, walks) == (0.0, 0.0)
    gained, spread = codec_ideas.difference(walks + np.array([1, 0]), walks)
    assert gained == pytest.approx(3 / 11) and spread > 0


def test_entropy_is_what_is_known_of_simple_values():
    assert lossless_ideas.entropy(np.array([0, 1] * 8, np.int8)) == 1
    assert lossless_ideas.entropy(np.array([0, 0, 0, 0, 1, 1, 2, 3], np.int8)) == 1.75
    assert lossless_ideas.entropy_by_channel(np.array([[5, 0], [5, 1]], np.int8)) == 0.5


def test_rows_seen_before_are_found_and_chunks_hold_every_byte():
    rows_TW = np.array([[1, 2], [3, 4], [1, 2], [5, 6], [3, 4]], np.uint8)
    assert lossless_ideas.repeated(rows_TW).tolist() == [False, False, True, False, True]
    assert np.concatenate(list(lossless_ideas.chunks_of(rows_TW))).tolist() == rows_TW.reshape(-1).tolist()
    assert next(lossless_ideas.chunks_of(rows_TW, turned=True)).tolist() == [1, 3, 1, 5, 3, 2, 4, 2, 6, 4]


@given(st.lists(st.lists(st.integers(0, 65_535), min_size=6, max_size=6, unique=True), min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_deltas_of_ids_lose_nothing(ids):
    ids_TK = np.array(ids)
    assert lossless_ideas.undeltas(lossless_ideas.deltas(ids_TK)).tolist() == ids
    gaps_TK, rank_TK = lossless_ideas.sorted_deltas(ids_TK)
    assert lossless_ideas.undeltas(gaps_TK).tolist() == [sorted(row) for row in ids]
    assert lossless_ideas.unsorted(gaps_TK, rank_TK).tolist() == ids


def test_an_id_of_more_than_two_bytes_is_refused():
    with pytest.raises(AssertionError, match="65536"):
        lossless_ideas.narrow(np.array([[65_536]]))
