"""Several ranks train together: the gradients and the run of one rank that accumulates, whoever has data, is stopped or dies."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_fixtures import options, stable_lines, train_cache

from cache.read import open_cache
from schemas.say import Silent
from train.checkpoint import list_checkpoints, load_checkpoint
from train.run import train
from train.stream import micro_batches, order_of

ROOT = Path(__file__).resolve().parent.parent
KINDS = ["dflash", "dflash2"]
# Of the 12 training samples these have no anchor; two of them are a micro-batch alone.
BARREN = (2, 4, 5)


class Driver:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "ranks_driver.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def run(self, world: int, chosen: Any, cache: str, out: Path, **more: Any) -> tuple[list[int], list[str]]:
        task = {"world": world, "options": chosen.model_dump(mode="json"), "cache": cache, "out": str(out)}
        task |= {"resume": False, "signals": [], "gradients": None} | more
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        return answer["codes"], answer["said"]


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    assert driver.process.stdin is not None
    driver.process.stdin.close()
    driver.process.wait()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return train_cache(tmp_path_factory.mktemp("ranks") / "hs.zarr", masks={row: [0, 1] for row in BARREN})


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


def test_the_data_of_these_tests_is_uneven(cache: str) -> None:
    order = order_of(open_cache(cache).index, 4, 8, 24)
    rounds = [micro_batches(order, epoch) for epoch in range(2)]
    assert all(len(each) % 4 and len(each) % 2 for each in rounds), (
        "the last round leaves some rank without a micro-batch"
    )
    assert any(set(micro.tolist()) <= set(BARREN) for each in rounds for micro in each), (
        "a micro-batch without an anchor"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradients_of_a_step_do_not_depend_on_who_computes_them(
    driver: Driver, cache: str, tmp_path: Path, kind: str
) -> None:
    seen = []
    for world, accumulate in ((1, 4), (2, 2), (4, 1)):
        file = tmp_path / f"{world}.safetensors"
        codes, said = driver.run(world, chosen_for(kind, accumulate), cache, tmp_path / str(world), gradients=str(file))
        assert codes == [0] * world, said
        seen.append(load_file(file))
    for name, gradient in seen[0].items():
        assert gradient.abs().max() > 0
        for other in seen[1:]:
            torch.testing.assert_close(other[name], gradient, rtol=1e-4, atol=2e-6 * float(gradient.abs().max()))


@pytest.fixture(scope="module")
def alone(cache: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of each kind a run by one rank, four micro-batches a step."""
    folder = tmp_path_factory.mktemp("alone")
    for kind in KINDS:
        train(chosen_for(kind, 4), cache, str(folder / kind), False, Silent())
    return {kind: folder / kind for kind in KINDS}


@pytest.mark.parametrize(("kind", "world"), [(kind, world) for kind in KINDS for world in (2, 4)])
def test_a_run_does_not_depend_on_how_many_share_its_steps(
    driver: Driver, cache: str, alone: dict[str, Path], tmp_path: Path, kind: str, world: int
) -> None:
    """Uneven epochs, ranks without a micro-batch, micro-batches without an anchor, evaluations, a partial last window."""
    codes, said = driver.run(world, chosen_for(kind, 4 // world), cache, tmp_path / "r")
    assert codes == [0] * world, said
    alike(tmp_path / "r", alone[kind])
    counted = sum(line.get("train/without_anchor", 0) for line in stable_lines(tmp_path / "r"))
    assert counted == 2 * len(BARREN)
    evaluated = [[line for line in stable_lines(run) if "val/walk" in line] for run in (tmp_path / "r", alone[kind])]
    assert len(evaluated[0]) == len(evaluated[1]) > 0
