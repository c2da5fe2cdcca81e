"""A finished run made longer: what the learning rate does, what stays to the bit, what is refused."""

import shutil
from pathlib import Path

import pytest
from train_fixtures import Heard, fingerprint, options, stable_lines, tensor_files, train_cache

from schemas.errors import DraftError
from schemas.options import OptimOptions
from schemas.say import Silent
from train.checkpoint import list_checkpoints
from train.optim import learning_rate
from train.run import train


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return train_cache(tmp_path_factory.mktemp("extend") / "hs.zarr")


def rates(run: Path) -> dict[int, float]:
    return {int(line["step"]): line["train/lr"] for line in stable_lines(run) if "train/lr" in line}


def test_an_ended_cosine_goes_on_along_the_curve_of_the_new_length(cache: str, tmp_path: Path) -> None:
    each = {"log_every": 1}
    train(options(run={"steps": 10, **each}), cache, str(tmp_path / "r"), False, Silent())
    heard = Heard()
    train(options(run={"steps": 20, **each}), cache, str(tmp_path / "r"), True, heard)
    optim = OptimOptions(lr=1e-2)
    expected = [learning_rate(step, 10, optim) for step in range(10)]
    expected += [learning_rate(step, 20, optim) for step in range(10, 20)]
    assert list(rates(tmp_path / "r").values()) == expected and expected[10] > expected[9]
    said = f"10 steps become 20: the learning rate goes on at {expected[10]:.3g} after {expected[9]:.3g}"
    assert any(said in note and "cosine" in note for note in heard.notes)


@pytest.mark.parametrize("schedule", ["wsd", "constant"])
def test_a_longer_run_from_before_the_decay_has_the_bits_of_one_that_long(
    cache: str, tmp_path: Path, schedule: str
) -> None:
    """With a warm-up of a number of steps: until the decay no step depends on how many follow."""
    optim = {"schedule": schedule, "warmup": 2.0, "decay": 0.25}
    # Lines at the end of a run cut the sums of the line after them, so that logging comes out even.
    run = {"log_every": 3}
    train(options(optim=optim, run={"steps": 24, **run}), cache, str(tmp_path / "whole"), False, Silent())
    train(options(optim=optim, run={"steps": 12, **run}), cache, str(tmp_path / "r"), False, Silent())
    train(options(optim=optim, run={"steps": 24, **run}), cache, str(tmp_path / "r"), "step-000009", Silent())
    assert tensor_files(tmp_path / "r") == tensor_files(tmp_path / "whole")
    assert stable_lines(tmp_path / "r") == stable_lines(tmp_path / "whole")


def test_an_extended_run_that_is_killed_resumes_bit_for_bit(cache: str, tmp_path: Path) -> None:
    train(options(run={"steps": 6}), cache, str(tmp_path / "r"), False, Silent())
    shutil.copytree(tmp_path / "r", tmp_path / "s")
    train(options(run={"steps": 14}), cache, str(tmp_path / "r"), True, Silent())
    heard = Heard({11: lambda: (_ for _ in ()).throw(KeyboardInterrupt)})
    with pytest.raises(KeyboardInterrupt):
        train(options(run={"steps": 14}), cache, str(tmp_path / "s"), True, heard)
    train(options(run={"steps": 14}), cache, str(tmp_path / "s"), True, Silent())
    assert tensor_files(tmp_path / "s") == tensor_files(tmp_path / "r")
    assert stable_lines(tmp_path / "s") == stable_lines(tmp_path / "r")


def test_a_length_in_epochs_is_extended_too(cache: str, tmp_path: Path) -> None:
    train(options(run={"steps": None, "epochs": 1}), cache, str(tmp_path / "r"), False, Silent())
    (last,) = list(list_checkpoints(tmp_path / "r/checkpoints"))[-1:]
    heard = Heard()
    train(options(run={"steps": None, "epochs": 3}), cache, str(tmp_path / "r"), True, heard)
    assert max(list_checkpoints(tmp_path / "r/checkpoints")) > 2 * last
    assert any(f"{last} steps become" in note for note in heard.notes)


@pytest.mark.parametrize(
    ("optim", "data", "message"),
    [
        ({"schedule": "wsd"}, {}, "optim.schedule 'cosine', this command asks for 'wsd'"),
        ({}, {"anchor_rate": 0.1}, r"data.anchor_rate 0\.\d+, this command asks for 0.1"),
        ({}, {"sources": {"0": 2.0}}, r"data.sources None, this command asks for \{'0': 2.0\}"),
    ],
)
def test_what_would_be_another_run_is_refused(
    cache: str, tmp_path: Path, optim: dict, data: dict, message: str
) -> None:
    train(options(run={"steps": 3}), cache, str(tmp_path / "r"), False, Silent())
    before = fingerprint(tmp_path / "r")
    small = {"batch_tokens": 60, "anchors": 6}
    with pytest.raises(DraftError, match=message):
        train(options(optim={"lr": 1e-2, **optim}, data={**small, **data}, run={"steps": 6}), cache, str(tmp_path / "r"), True, Silent())  # fmt: skip
    assert fingerprint(tmp_path / "r") == before
