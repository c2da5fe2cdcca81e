"""Which held-out samples a run evaluates, the same each time, and how often: as many as a bounded share of the time allows."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cache.read import Cache
from schemas.errors import OptionError
from schemas.options import DataOptions, TrainOptions
from schemas.say import Say
from train.anchors import anchor_budget
from train.batch import first_anchor
from train.stream import Order, repeats, rows_of, steps_of_epoch

# A step computes a block forward and twice as much backward; an evaluation only forward.
STEP_OF_FORWARD = 3
FEW = 16


@dataclass(frozen=True)
class HeldOut:
    """Every so many steps (0: never), these rows of the index. `digest` tells one set from another."""

    every: int
    rows: tuple[int, ...]

    @property
    def digest(self) -> str:
        """The first 16 hex digits of the sha256 over the rows."""
        return hashlib.sha256(repr(self.rows).encode()).hexdigest()[:16]


def choose_held_out(
    options: TrainOptions, cache: Cache, order: Order, weights: Mapping[int, float] | None, say: Say, world: int = 1
) -> HeldOut:
    """The held-out samples of the sources trained on, as many as `run.eval_share` allows, in the order of their ids.

    Ids begin with a hash, so their order is none of the data's. The bound counts blocks: those evaluated, at a third of a trained
    block's cost, may be `eval_share` of those trained between two evaluations. It is a number of the options and the index,
    not of a clock, so that a resumed run evaluates the same. Raises OptionError where evaluations are asked for and there is nothing
    to evaluate.
    """
    run, rows = options.run, rows_of(cache.index, "val", weights).tolist()
    if run.eval_every == 0:
        return HeldOut(0, ())
    first = first_anchor(cache, options.draft.block_size, rows)
    if first is None:
        if run.eval_every == "auto" and run.patience is None:
            say.note(
                "no held-out samples with an anchor: nothing is evaluated while training, and draft/ will be the last"
            )
            return HeldOut(0, ())
        asked = f"run.eval_every={run.eval_every}" if run.patience is None else f"run.patience={run.patience}"
        raise OptionError(
            f"{asked}, but {cache.path} holds no held-out samples with an anchor: set run.eval_every=0 and run.patience=null, or capture "
            "with a larger --val-fraction"
        )
    every = run.checkpoint_every if run.eval_every == "auto" else run.eval_every
    most = run.eval_share * STEP_OF_FORWARD * every * blocks_per_step(options, cache, order, world)
    chosen = _within(cache, rows, most)
    if first_anchor(cache, options.draft.block_size, chosen) is None:
        chosen.append(first)
    if len(chosen) < len(rows):
        text = f"evaluating {len(chosen)} of {len(rows)} held-out samples every {every} steps (run.eval_share={run.eval_share:g})"
        say.warn(f"{text}: too few to tell drafts apart") if len(chosen) < FEW else say.note(text)
    return HeldOut(every, tuple(chosen))


def blocks_per_step(options: TrainOptions, cache: Cache, order: Order, world: int = 1) -> float:
    """Blocks of an average step of the first epoch, over all ranks, which share the evaluation too."""
    per_epoch = float((planned_blocks(options.data, cache, order) * repeats(order, 0)).sum())
    return per_epoch / max(1, steps_of_epoch(order, 0, options.optim.accumulate, world))


def planned_blocks(data: DataOptions, cache: Cache, order: Order) -> NDArray[np.int64]:
    """The most blocks of each training sample in an epoch, from the index alone."""
    assert data.anchor_rate != "auto", "resolved before"
    supervised = cache.index["supervised"].to_numpy()[order.row_S].tolist()
    return np.array([anchor_budget(count, data.anchor_rate, data.anchors) for count in supervised], np.int64)


def _within(cache: Cache, rows: Sequence[int], most: float) -> list[int]:
    ids, supervised = cache.index["sample_id"].to_pylist(), cache.index["supervised"].to_numpy()
    chosen: list[int] = []
    blocks = 0
    for row in sorted(rows, key=lambda row: str(ids[row])):
        # An evaluation takes every anchor: about one for each supervised token.
        blocks += int(supervised[row])
        if blocks > most and chosen:
            break
        chosen.append(row)
    return chosen
