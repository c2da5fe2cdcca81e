"""What the tests of several ranks share: the process that forks them, an uneven cache, a run by one rank to compare with."""

from pathlib import Path
from typing import Any

import pytest
from driver_fixtures import Driver
from train_fixtures import options, stable_lines

from train.checkpoint import list_checkpoints, load_checkpoint

ROOT = Path(__file__).resolve().parent.parent
KINDS = ["dflash", "dflash2"]
# Of the 12 training samples these have no anchor; two of them are a micro-batch alone.
BARREN = (2, 4, 5)


class RankDriver(Driver):
    """tests/ranks_driver.py at work."""

    def __init__(self) -> None:
        super().__init__("ranks_driver.py")

    def run(self, world: int, chosen: Any, cache: str, out: Path, **more: Any) -> tuple[list[int], list[str]]:
        task = {"world": world, "options": chosen.model_dump(mode="json"), "cache": cache, "out": str(out)}
        answer = self.ask(task | {"resume": False, "signals": [], "gradients": None} | more)
        return answer["codes"], answer["said"]


def chosen_for(kind: str, accumulate: int = 1, **run: Any) -> Any:
    more = {"steps": None, "epochs": 2, "log_every": 1, "checkpoint_every": 2, "eval_every": 3, "eval_share": 10}
    return options(
        draft={"kind": kind}, data={"batch_tokens": 24, "seed": 4}, optim={"accumulate": accumulate}, run=more | run
    )  # fmt: skip


def alike(one: Path, other: Path, rtol: float = 2e-4) -> None:
    """Two runs with the same lines and weights, to rounding."""
    for ours, theirs in zip(stable_lines(one), stable_lines(other), strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            assert value == pytest.approx(theirs[key], rel=rtol, abs=1e-6), (ours["step"], key)
    (_, ours), (_, theirs) = (list(list_checkpoints(run / "checkpoints").items())[-1] for run in (one, other))
    weights = load_checkpoint(theirs).model
    for name, weight in load_checkpoint(ours).model.items():
        # AdamW divides a gradient by its own size: where it is nearly 0, rounding may turn a step around.
        assert (weight - weights[name]).abs().mean() < 1e-5, name
