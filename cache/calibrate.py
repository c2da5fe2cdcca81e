"""Which channels of each layer int8 and int4 keep apart: the widest ones over the first samples of the plan.

T rows of tokens, H hidden. Width is the mean magnitude. The largest magnitude would spend the few channels on what single tokens do
(the first of a text reaches thousands in two or three of them), the mean square nearly so; measured on two targets the mean
leaves the least error at the median token.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from schemas.arrays import OUTLIER_CHANNELS

CALIBRATION_TOKENS = 8192


def calibration_samples(lengths: Sequence[int]) -> int:
    """How many of the first samples of a plan calibration takes: as many as have CALIBRATION_TOKENS, or all."""
    enough = (number for number, tokens in enumerate(accumulate(lengths), 1) if tokens >= CALIBRATION_TOKENS)
    return next(enough, len(lengths))


def widest_channels(rows: Iterable[Tensor]) -> tuple[int, ...]:
    """The OUTLIER_CHANNELS widest channels, ascending, of all rows [T, H] of a layer; of equally wide ones the first."""
    sums = [hidden_TH.double().abs().sum(0).cpu() for hidden_TH in rows]
    order_H = torch.stack(sums).sum(0).sort(descending=True, stable=True).indices
    return tuple(sorted(order_H[:OUTLIER_CHANNELS].tolist()))
