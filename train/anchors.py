"""Which anchors a sample trains on in an epoch: a pure function of (seed, epoch, index row), the same in any batch on any rank.

`turn` counts how often the sample has run in the epoch before: a source whose samples run twice shows other anchors the second time.
"""

import math

import numpy as np
from numpy.typing import NDArray

from train.keyed import Purpose, keyed_bits, keyed_uniform


def anchor_budget(supervised: int, rate: float, limit: int) -> int:
    """How many blocks a sample with so many supervised tokens may train on: `rate` of them, rounded up, and at most `limit`.

    A long sample gets more than a short one in proportion, so neither is over-represented among the predicted tokens; and a
    micro-batch of T tokens holds at most rate * T blocks and one a sample, whatever its samples are.
    """
    return min(limit, math.ceil(rate * supervised))


def draw_anchors(
    anchors: NDArray[np.int64], limit: int, seed: int, epoch: int, row: int, turn: int = 0
) -> NDArray[np.int64]:
    """At most `limit` of a sample's `anchors`, without repetition, ascending; all of them where they are no more than that."""
    if len(anchors) <= limit:
        return np.sort(anchors)
    bits = keyed_bits(len(anchors), Purpose.ANCHORS, seed, epoch, row, turn)
    return np.sort(anchors[np.argsort(bits, kind="stable")[:limit]])


def draw_prefixes(
    count: int, block_size: int, base: float, seed: int, epoch: int, row: int, turn: int = 0
) -> NDArray[np.int64]:
    """Visible tokens of each of a sample's `count` blocks (D2SD's variable prefix; docs/design.md, section 4).

    Length l, anchor included, has a probability in proportion to base^l, for l from min(2, B - 1) to B - 1.
    """
    lengths = np.arange(min(2, block_size - 1), block_size)
    shares = np.cumsum(base**lengths / np.sum(base**lengths))
    uniform = keyed_uniform(count, Purpose.PREFIXES, seed, epoch, row, turn)
    # The last share may round below 1: a number above it still means the longest prefix.
    return lengths[np.minimum(np.searchsorted(shares, uniform, side="right"), len(lengths) - 1)]
