"""Resuming: a run that was stopped, in any way and at any step, ends with the bits of the run that was not."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from train_fixtures import Heard, fingerprint, options, stable_lines, tensor_files, train_cache

from schemas.errors import DraftError, Interrupted
from schemas.say import Silent
from train.checkpoint import list_checkpoints
from train.run import train

ROOT = Path(__file__).resolve().parent.parent
VARIANTS: list[dict[str, dict[str, Any]]] = [
    {},
    {"draft": {"kind": "dflash"}, "loss": {"prefix": "variable"}, "optim": {"accumulate": 2}, "run": {"eval_every": 5}},
    {"optim": {"name": "muon", "weight_decay": 0.1}, "run": {"precision": "bfloat16"}, "data": {"window": 1}},
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return train_cache(tmp_path_factory.mktemp("resume") / "hs.zarr")


@pytest.fixture(scope="module")
def whole(cache: str, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One uninterrupted run of every variant."""
    runs = []
    for number, variant in enumerate(VARIANTS):
        runs.append(tmp_path_factory.mktemp("whole") / str(number))
        train(options(**variant), cache, str(runs[-1]), False, Silent())
    return runs


def copy_until(run: Path, to: Path, step: int) -> Path:
    """A run as a kill would have left it: checkpoints up to `step`, metrics up to wherever it had come."""
    shutil.copytree(run, to)
    shutil.rmtree(to / "draft")
    for later, path in list_checkpoints(to / "checkpoints").items():
        if later > step:
            shutil.rmtree(path)
    return to


@pytest.mark.parametrize("variant", range(len(VARIANTS)))
@pytest.mark.parametrize("step", [0, 3, 9, 14])
def test_a_killed_run_ends_as_the_whole_one(
    cache: str, whole: list[Path], tmp_path: Path, variant: int, step: int
) -> None:
    run = copy_until(whole[variant], tmp_path / "r", step)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 13, "epoch"')
    heard = Heard()
    train(options(**VARIANTS[variant]), cache, str(run), True, heard)
    assert tensor_files(run) == tensor_files(whole[variant])
    assert stable_lines(run) == stable_lines(whole[variant])
    assert any(f"at step {step} of 14" in note or (step == 0 and "beginning at step 0" in note) for note in heard.notes)


def test_a_named_checkpoint_is_gone_back_to_and_what_lay_after_it_is_written_again(
    cache: str, whole: list[Path], tmp_path: Path
) -> None:
    shutil.copytree(whole[0], tmp_path / "r")
    heard = Heard()
    train(options(), cache, str(tmp_path / "r"), "step-000006", heard)
    assert tensor_files(tmp_path / "r") == tensor_files(whole[0]) and stable_lines(tmp_path / "r") == stable_lines(
        whole[0]
    )
    assert sum("which lies after step 6" in note for note in heard.notes) == 3
    assert heard.steps == list(range(7, 15))


def test_sigterm_saves_and_says_how_to_go_on(cache: str, whole: list[Path], tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    at = {4: lambda: os.kill(os.getpid(), signal.SIGTERM)}
    with pytest.raises(
        Interrupted, match=r"step 4 of 14, all saved: go on with `dflash train .* --config .*/config.yaml --resume`"
    ) as caught:
        train(options(), cache, str(tmp_path / "r"), False, Heard(at))
    assert caught.value.exit_code == 143 and signal.getsignal(signal.SIGTERM) is before
    assert list(list_checkpoints(tmp_path / "r/checkpoints")) == [3, 4] and not (tmp_path / "r/draft").exists()
    train(options(), cache, str(tmp_path / "r"), True, Silent())
    shutil.rmtree(tmp_path / "r/checkpoints/step-000004")
    assert tensor_files(tmp_path / "r") == tensor_files(whole[0]) and stable_lines(tmp_path / "r") == stable_lines(
        whole[0]
    )


PROGRAM = """
import sys, time, torch
torch.set_num_threads(int(sys.argv[1]))
from train_fixtures import Heard, options
from train import run
step = run.run_step
def slow(*arguments):
    time.sleep(0.03)
    return step(*arguments)
run.run_step = slow
run.train(options(run={"checkpoint_every": 2}), sys.argv[2], sys.argv[3], sys.argv[4] == "resume", Heard())
"""


def test_kill_9_at_any_moment_loses_nothing(cache: str, tmp_path: Path) -> None:
    chosen = options(run={"checkpoint_every": 2})
    train(chosen, cache, str(tmp_path / "whole"), False, Silent())
    run, checkpoints = tmp_path / "r", tmp_path / "r/checkpoints"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    for begin, wanted in (("new", 2), ("resume", 8)):
        command = [sys.executable, "-c", PROGRAM, str(torch.get_num_threads()), cache, str(run), begin]
        process = subprocess.Popen(command, env=environment, cwd=tmp_path)
        while wanted not in list_checkpoints(checkpoints):
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.005)
        time.sleep(0.04)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    (checkpoints / ".tmp-step-000999").mkdir()
    train(chosen, cache, str(run), True, Silent())
    assert tensor_files(run) == tensor_files(tmp_path / "whole")
    assert stable_lines(run) == stable_lines(tmp_path / "whole")
    assert not (checkpoints / ".tmp-step-000999").exists()


def test_only_the_newest_checkpoints_are_kept(cache: str, tmp_path: Path) -> None:
    train(options(run={"keep": 2}), cache, str(tmp_path / "r"), False, Silent())
    assert list(list_checkpoints(tmp_path / "r/checkpoints")) == [12, 14]


def test_a_finished_run_can_be_made_longer_but_not_shorter(cache: str, whole: list[Path], tmp_path: Path) -> None:
    shutil.copytree(whole[0], tmp_path / "r")
    with pytest.raises(DraftError, match="step-000014 is at step 14, beyond the 10 asked for"):
        train(options(run={"steps": 10}), cache, str(tmp_path / "r"), True, Silent())
    train(options(run={"steps": 20, "log_every": 2}), cache, str(tmp_path / "r"), True, Silent())
    lines = stable_lines(tmp_path / "r")
    assert lines[:4] == stable_lines(whole[0]) and [line["step"] for line in lines[4:]] == [16, 18, 20]
    assert tensor_files(tmp_path / "r")["draft/model.safetensors"] != tensor_files(whole[0])["draft/model.safetensors"]
    assert "steps: 20" in (tmp_path / "r/config.yaml").read_text()


def test_resuming_a_finished_run_changes_nothing(cache: str, whole: list[Path], tmp_path: Path) -> None:
    shutil.copytree(whole[0], tmp_path / "r")
    summary = train(options(), cache, str(tmp_path / "r"), True, Silent())
    assert tensor_files(tmp_path / "r") == tensor_files(whole[0]) and stable_lines(tmp_path / "r") == stable_lines(
        whole[0]
    )
    assert summary.metrics == json.loads((whole[0] / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"draft": {"block_size": 6}}, "draft.block_size 4, this command asks for 6"),
        ({"draft": {"kind": "dflash"}}, "draft.kind 'dflash2', this command asks for 'dflash'"),
        ({"draft": {"num_layers": 2}}, "draft.num_layers 1, this command asks for 2"),
        ({"run": {"layers": (0, 2)}}, r"run.layers \(0, 2, 3\), this command asks for \(0, 2\)"),
        ({"optim": {"lr": 0.5}}, "optim.lr 0.01, this command asks for 0.5"),
        ({"data": {"seed": 1}}, "data.seed 0, this command asks for 1"),
    ],
)
def test_other_options_are_refused(cache: str, whole: list[Path], groups: dict[str, Any], message: str) -> None:
    with pytest.raises(DraftError, match=message):
        train(options(**groups), cache, str(whole[0]), True, Silent())


def test_another_cache_is_refused(cache: str, whole: list[Path], tmp_path: Path) -> None:
    mask = train_cache(tmp_path / "mask", mask_token_id=38)
    with pytest.raises(DraftError, match=r"identity.mask_token_id 39, .* has 38"):
        train(options(), mask, str(whole[0]), True, Silent())
    data = train_cache(tmp_path / "data", seed=1)
    with pytest.raises(DraftError, match=r"16 samples with index_sha256 [0-9a-f]{16}, .* has 16 with [0-9a-f]{16}"):
        train(options(), data, str(whole[0]), True, Silent())
    shutil.copytree(cache, tmp_path / "moved")
    train(options(), str(tmp_path / "moved"), str(whole[0]), True, Silent())


def test_other_versions_are_warned_of(cache: str, whole: list[Path], tmp_path: Path) -> None:
    shutil.copytree(whole[0], tmp_path / "r")
    provenance = json.loads((tmp_path / "r/provenance.json").read_text())
    provenance["versions"]["torch"] = "2.0.0"
    (tmp_path / "r/provenance.json").write_text(json.dumps(provenance))
    heard = Heard()
    train(options(), cache, str(tmp_path / "r"), True, heard)
    warned = [warning for warning in heard.warnings if "versions" in warning]
    assert len(warned) == 1 and f"torch 2.0.0 -> {torch.__version__}" in warned[0]


def test_nothing_to_resume_is_said(cache: str, whole: list[Path], tmp_path: Path) -> None:
    with pytest.raises(DraftError, match="holds no run to resume"):
        train(options(), cache, str(tmp_path / "none"), True, Silent())
    assert not (tmp_path / "none").exists()
    with pytest.raises(DraftError, match=r"no checkpoint 'step-000005' in .*: choose among step-000003, step-000006"):
        train(options(), cache, str(whole[0]), "step-000005", Silent())


def test_a_draft_that_could_not_be_replaced_is_met_before_the_first_step(
    cache: str, whole: list[Path], tmp_path: Path
) -> None:
    shutil.copytree(whole[0], tmp_path / "r")
    (tmp_path / "r/draft/README.md").write_text("about this draft")
    before = fingerprint(tmp_path / "r")
    with pytest.raises(DraftError, match=r"holds README.md, .*not a draft alone"):
        train(options(run={"steps": 20}), cache, str(tmp_path / "r"), True, Silent())
    assert fingerprint(tmp_path / "r") == before


def test_a_path_names_a_checkpoint_of_this_run_alone(cache: str, whole: list[Path], tmp_path: Path) -> None:
    run = copy_until(whole[0], tmp_path / "r", 14)
    with pytest.raises(DraftError, match=r"no checkpoint .*step-000006' in .*r/checkpoints"):
        train(options(), cache, str(run), str(whole[0] / "checkpoints/step-000006"), Silent())
    assert list(list_checkpoints(run / "checkpoints")) == [3, 6, 9, 12, 14]
    heard = Heard()
    train(options(), cache, str(run), str(run / "checkpoints/../checkpoints/step-000012"), heard)
    assert any("step-000012 at step 12 of 14" in note for note in heard.notes)


def test_a_checkpoint_of_another_shape_is_refused(cache: str, whole: list[Path], tmp_path: Path) -> None:
    shutil.copytree(whole[0], tmp_path / "r")
    other = whole[1] / "checkpoints/step-000014/model.safetensors"
    shutil.copy(other, tmp_path / "r/checkpoints/step-000014/model.safetensors")
    with pytest.raises(DraftError, match=r"step-000014: candidate_selector.* has shape None"):
        train(options(), cache, str(tmp_path / "r"), True, Silent())
