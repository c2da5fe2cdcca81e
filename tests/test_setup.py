"""What is settled before the first step: the defaults that are said, what is refused, and that a refusal writes nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from train_fixtures import Heard, fingerprint, options, train_cache

from schemas.errors import CacheError, DflashError, DraftError, OptionError
from schemas.say import Silent
from train.run import train
from train.setup import prepare


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return train_cache(tmp_path_factory.mktemp("setup") / "hs.zarr")


def test_defaults_that_were_taken_are_said(cache: str, tmp_path: Path) -> None:
    heard = Heard()
    job = prepare(
        options(run={"device": "auto", "steps": None}, loss={"lambda_decay": 0.25}, optim={"lr": 1e-3}),
        cache,
        str(tmp_path / "r"),
        False,
        heard,
    )
    assert job.options.run.epochs == 6 and any("6 epochs" in note for note in heard.notes)
    assert torch.cuda.is_available() or any("training on the CPU" in note for note in heard.notes)
    assert heard.warnings == ["loss.lambda_decay=0.25 has no effect on kind dflash2"]


@pytest.mark.parametrize(
    ("name", "lr", "warned"),
    [("adamw", 1e-2, "optim.lr=0.01 is muon's rate, not adamw's"), ("muon", 6e-4, "adamw's rate"), ("adamw", None, "")],
)
def test_a_rate_that_came_with_another_optimizer_is_warned_of(
    cache: str, tmp_path: Path, name: str, lr: float | None, warned: str
) -> None:
    heard = Heard()
    job = prepare(options(optim={"name": name, "lr": lr}), cache, str(tmp_path / "r"), False, heard)
    assert job.options.optim.lr == (lr or 6e-4)
    assert len(heard.warnings) == bool(warned) and all(warned in warning for warning in heard.warnings)


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        (
            {"draft": {"kind": "domino"}},
            OptionError,
            "'domino' is not available in this version yet: choose dflash or dflash2",
        ),
        ({"draft": {"kind": "jetspec"}}, OptionError, "'jetspec' is not available"),
        ({"run": {"layers": (0, 5)}}, OptionError, "layer 5 is the target's last.*choose among 0, 2, 3"),
        ({"run": {"layers": (2, 2)}}, OptionError, "layer 2 is given twice"),
        ({"run": {"layers": (1,)}}, CacheError, "layer 1 is not in the cache: choose among 0, 2, 3"),
        ({"run": {"layers": ()}}, OptionError, "no layers given"),
        ({"run": {"attention": "flex"}}, OptionError, "run.attention=flex needs a CUDA device, and the run is on cpu"),
        ({"run": {"float8": True}}, OptionError, "run.float8=true needs a CUDA device .*, and the run is on cpu"),
        ({"run": {"device": "cuda:99"}}, OptionError, "cuda:99"),
        ({"run": {"device": "gpu"}}, OptionError, "'gpu' is not available"),
        ({"loss": {"distill": True}}, OptionError, "loss.distill"),
        ({"loss": {"prefix": "variable"}}, OptionError, "for kind dflash, not dflash2"),
        ({"draft": {"sliding_window": 3}}, DflashError, "sliding_window 3"),
    ],
)
def test_what_cannot_be_done_is_refused_and_writes_nothing(
    cache: str, tmp_path: Path, groups: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        train(options(**groups), cache, str(tmp_path / "r"), False, Silent())
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []


def test_a_path_that_is_no_cache_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="no hidden-state cache"):
        train(options(), str(tmp_path / "nothing"), str(tmp_path / "r"), False, Silent())


def test_evaluation_without_held_out_samples_is_refused(tmp_path: Path) -> None:
    cache = train_cache(tmp_path / "c", shards=1, split="train")
    with pytest.raises(OptionError, match=r"run.eval_every=2.*no held-out samples"):
        train(options(run={"eval_every": 2}), cache, str(tmp_path / "r"), False, Silent())


def test_evaluation_of_held_out_samples_without_any_anchor_is_refused(tmp_path: Path) -> None:
    cache = train_cache(tmp_path / "c", shards=1, masks={3: [0, 1, 0, 0, 0, 1]})
    with pytest.raises(OptionError, match=r"run.eval_every=2.*no held-out samples with an anchor"):
        train(options(run={"eval_every": 2}), cache, str(tmp_path / "r"), False, Silent())


def test_a_cache_without_training_samples_is_refused(tmp_path: Path) -> None:
    cache = train_cache(tmp_path / "c", shards=1, split="val")
    with pytest.raises(
        CacheError, match="holds no training samples, all are held out: capture with a smaller --val-fraction"
    ):
        train(options(run={"steps": None, "epochs": 1}), cache, str(tmp_path / "r"), False, Silent())


def test_a_train_split_without_any_anchor_is_refused(tmp_path: Path) -> None:
    cache = train_cache(tmp_path / "c", shards=1, masks={row: [0, 1, 0, 0, 0, 1] for row in range(4)})
    with pytest.raises(CacheError, match=r"none of the 3 training samples.*block of 4"):
        train(options(), cache, str(tmp_path / "r"), False, Silent())
    assert not (tmp_path / "r").exists()
    train(options(draft={"block_size": 5}, run={"steps": 1}), cache, str(tmp_path / "r"), False, Silent())


def test_a_folder_with_something_else_stays_as_it_is(cache: str, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for resume in (False, True):
        with pytest.raises(DraftError, match=r"holds something else \('thesis.tex'\)"):
            train(options(), cache, str(tmp_path), resume, Silent())
    with pytest.raises(DraftError, match="is a file"):
        train(options(), cache, str(tmp_path / "thesis.tex"), False, Silent())
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_run_is_not_begun_again_by_mistake(cache: str, tmp_path: Path) -> None:
    train(options(run={"steps": 1}), cache, str(tmp_path / "r"), False, Silent())
    before = fingerprint(tmp_path / "r")
    with pytest.raises(DraftError, match="holds a run already, at step 1: go on with --resume"):
        train(options(), cache, str(tmp_path / "r"), False, Silent())
    assert fingerprint(tmp_path / "r") == before
