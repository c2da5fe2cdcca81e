"""Anchors and prefixes: distinct, bounded, a pure function of their key, and distributed as they should be."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from train.anchors import anchor_budget, draw_anchors, draw_prefixes
from train.keyed import Purpose, keyed_bits, keyed_uniform


@given(
    st.sets(st.integers(0, 5000), max_size=60),
    st.integers(1, 70),
    st.integers(-5, 2**66),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_anchors_are_distinct_sorted_and_bounded(held: set[int], limit: int, seed: int, epoch: int, row: int) -> None:
    anchors = np.array(sorted(held), dtype=np.int64)
    drawn = draw_anchors(anchors, limit, seed, epoch, row).tolist()
    assert drawn == sorted(set(drawn)) and set(drawn) <= held and len(drawn) == min(limit, len(held))
    assert drawn == draw_anchors(anchors, limit, seed, epoch, row).tolist()


def test_every_anchor_is_as_likely() -> None:
    anchors, limit, draws = np.arange(20) * 3, 5, 4000
    counts = np.zeros(60)
    for row in range(draws):
        counts[draw_anchors(anchors, limit, 0, 0, row)] += 1
    expected = draws * limit / len(anchors)
    assert np.abs(counts[::3] - expected).max() < 5 * np.sqrt(expected)


def test_seed_epoch_and_row_each_change_the_draw() -> None:
    anchors = np.arange(1000)
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**32, 0, 0), (0, 2**32, 0)]
    assert len({tuple(draw_anchors(anchors, 20, *key).tolist()) for key in keys}) == len(keys)


def test_bits_are_numpys_own_and_purposes_share_none() -> None:
    sequence = np.random.SeedSequence([3, 0, 7, 0, 1, 0, 5, 0])
    expected = np.random.Philox(sequence).random_raw(4)
    assert keyed_bits(4, Purpose.ANCHORS, 7, 1, 5).tolist() == expected.tolist()
    assert not set(keyed_bits(50, Purpose.ANCHORS, 7, 1, 5).tolist()) & set(
        keyed_bits(50, Purpose.PREFIXES, 7, 1, 5).tolist()
    )
    uniform = keyed_uniform(20000, Purpose.PREFIXES, 0)
    assert uniform.min() >= 0 and uniform.max() < 1 and abs(uniform.mean() - 0.5) < 0.01


def test_prefixes_follow_powers_of_the_base() -> None:
    block, base, draws = 8, 0.7, 40000
    drawn = draw_prefixes(draws, block, base, 0, 0, 0)
    powers = np.array([base**length for length in range(2, block)])
    expected = draws * powers / powers.sum()
    counts = np.bincount(drawn, minlength=block)
    assert counts[:2].sum() == 0 and len(counts) == block
    assert np.abs(counts[2:] - expected).max() < 5 * np.sqrt(expected.max())


@given(st.integers(2, 16), st.floats(0.05, 1.0), st.integers(0, 40))
def test_prefixes_stay_in_range(block: int, base: float, count: int) -> None:
    drawn = draw_prefixes(count, block, base, 1, 2, 3)
    assert len(drawn) == count and all(min(2, block - 1) <= length <= block - 1 for length in drawn)
    assert drawn.tolist() == draw_prefixes(count, block, base, 1, 2, 3).tolist()


@given(st.integers(0, 5000), st.integers(0, 5000), st.floats(0.001, 1.0), st.integers(1, 600))
def test_anchors_are_in_proportion_to_supervised_tokens_up_to_the_limit(
    one: int, other: int, rate: float, limit: int
) -> None:
    budgets = [anchor_budget(count, rate, limit) for count in (one, other)]
    for count, budget in zip((one, other), budgets, strict=True):
        assert budget <= limit and (budget == limit or 0 <= budget - rate * count < 1)
        assert (budget == 0) == (count == 0)
    assert (one <= other) <= (budgets[0] <= budgets[1])


def test_a_second_turn_in_an_epoch_draws_other_anchors() -> None:
    anchors = np.arange(1000)
    turns = [tuple(draw_anchors(anchors, 20, 0, 3, 7, turn).tolist()) for turn in range(4)]
    assert len(set(turns)) == 4
    assert draw_prefixes(40, 16, 0.9, 0, 3, 7).tolist() != draw_prefixes(40, 16, 0.9, 0, 3, 7, 1).tolist()
