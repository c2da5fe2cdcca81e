"""Randomness as a pure function of its key: the same bits for the same (purpose, seed, numbers), whatever was drawn before.

Only Philox's raw bits and SeedSequence are used, whose output numpy keeps stable over releases; `Generator`'s methods are not.
"""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Purpose(IntEnum):
    """What the bits are for: two purposes never share bits."""

    SHARDS = 1
    SAMPLES = 2
    ANCHORS = 3
    PREFIXES = 4
    REPEATS = 5


def keyed_bits(count: int, purpose: Purpose, seed: int, *numbers: int) -> NDArray[np.uint64]:
    """`count` random 64-bit words for the key. Every number takes two 32-bit words of it, so no two keys run into each other."""
    words = [word for number in (purpose, seed, *numbers) for word in (number & 0xFFFFFFFF, number >> 32 & 0xFFFFFFFF)]
    return np.asarray(np.random.Philox(np.random.SeedSequence(words)).random_raw(count), dtype=np.uint64)


def keyed_order(count: int, purpose: Purpose, seed: int, *numbers: int) -> NDArray[np.int64]:
    """A random permutation of 0 .. count - 1 for the key."""
    return np.argsort(keyed_bits(count, purpose, seed, *numbers), kind="stable")


def keyed_uniform(count: int, purpose: Purpose, seed: int, *numbers: int) -> NDArray[np.float64]:
    """`count` numbers in [0, 1) for the key, of 53 random bits each."""
    return (keyed_bits(count, purpose, seed, *numbers) >> np.uint64(11)).astype(np.float64) * 2.0**-53
