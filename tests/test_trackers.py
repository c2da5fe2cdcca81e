"""TensorBoard and Weights & Biases: each line reaches them, with stand-ins for the packages; a missing one is said before training."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
from train_fixtures import options, train_cache

from schemas.errors import OptionError
from schemas.say import Silent
from train.run import train
from train.trackers import scalars


class FakeWriter:
    """As much of SummaryWriter as is used."""

    made: ClassVar[list["FakeWriter"]] = []

    def __init__(self, log_dir: str, purge_step: int) -> None:
        self.log_dir, self.purge_step, self.closed = log_dir, purge_step, False
        self.points: dict[tuple[str, int], float] = {}
        self.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.points[name, step] = value

    def close(self) -> None:
        self.closed = True


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return train_cache(tmp_path_factory.mktemp("trackers") / "hs.zarr")


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Both packages, faked. `runs` are what wandb.init made."""
    runs: list[SimpleNamespace] = []

    def init(**given: Any) -> SimpleNamespace:
        run = SimpleNamespace(given=given, logged={}, finished=False)
        run.log = lambda figures, step: run.logged.__setitem__(step, run.logged.get(step, {}) | figures)
        run.finish = lambda: setattr(run, "finished", True)
        runs.append(run)
        return run

    FakeWriter.made = []
    tensorboard, wandb = ModuleType("torch.utils.tensorboard"), ModuleType("wandb")
    tensorboard.SummaryWriter, wandb.init = FakeWriter, init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return SimpleNamespace(writers=FakeWriter.made, runs=runs)


def test_every_figure_of_every_line_reaches_both(cache: str, tmp_path: Path, packages: SimpleNamespace) -> None:
    log = {"to": ("tensorboard", "wandb"), "project": "drafts"}
    train(options(run={"steps": 6, "eval_every": 3}, log=log), cache, str(tmp_path / "r"), False, Silent())
    lines = [json.loads(line) for line in (tmp_path / "r/metrics.jsonl").read_text().splitlines()]
    assert any("val/accuracy_per_slot" in line for line in lines)
    (writer,), (run,) = packages.writers, packages.runs
    expected = {(name, line["step"]): value for line in lines for name, value in scalars(line).items()}
    assert writer.points == expected and writer.closed and writer.purge_step == 1
    assert {(name, step): value for step, figures in run.logged.items() for name, value in figures.items()} == expected
    assert run.finished and run.given["project"] == "drafts" and run.given["name"] == "r"
    assert run.given["config"]["draft"]["block_size"] == 4
    assert writer.log_dir == str(tmp_path / "r/tensorboard")


def test_a_run_that_goes_on_is_the_same_run_there(cache: str, tmp_path: Path, packages: SimpleNamespace) -> None:
    for steps in (3, 6):
        chosen = options(run={"steps": steps}, log={"to": ("tensorboard", "wandb"), "name": "mine"})
        train(chosen, cache, str(tmp_path / "r"), steps == 6, Silent())
    assert packages.runs[0].given["id"] == packages.runs[1].given["id"] and packages.runs[1].given["resume"] == "allow"
    assert [writer.purge_step for writer in packages.writers] == [1, 4] and packages.runs[0].given["name"] == "mine"


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_missing_package_is_said_before_anything_is_written(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(OptionError, match=rf"log.to={name}.*pip install 'dflash-pipeline\[{name}\]'"):
        train(options(log={"to": (name,)}), cache, str(tmp_path / "r"), False, Silent())
    assert list(tmp_path.iterdir()) == []


def test_figures_are_single_numbers() -> None:
    line = {"step": 7, "epoch": 1, "val/walk": None, "val/accuracy_per_slot": [0.5, None, 0.25]}
    assert scalars(line) == {"epoch": 1.0, "val/accuracy_per_slot/1": 0.5, "val/accuracy_per_slot/3": 0.25}


def test_tensorboards_own_reader_finds_the_figures(cache: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(options(run={"steps": 4}, log={"to": ("tensorboard",)}), cache, str(tmp_path / "r"), False, Silent())
    (line,) = [json.loads(text) for text in (tmp_path / "r/metrics.jsonl").read_text().splitlines()]
    found = EventAccumulator(str(tmp_path / "r/tensorboard")).Reload()
    (event,) = found.Scalars("train/loss")
    assert event.step == 4 and event.value == pytest.approx(line["train/loss"], rel=1e-6)
