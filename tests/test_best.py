"""Held-out evaluation while training: a fixed set within its share, the best checkpoint, what draft/ holds, and stopping early."""

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_fixtures import Heard, options, stable_lines, tensor_files, train_cache

from cache.read import open_cache
from draft.accept import evaluate_cache
from draft.files import load_draft
from schemas.errors import OptionError
from schemas.say import Silent
from train.batch import read_batches
from train.checkpoint import Best, TrainState, list_checkpoints, load_checkpoint
from train.evaluate import val_line
from train.run import judged, train
from train.rundir import read_options, read_provenance
from train.setup import prepare
from train.step import run_step
from train.stream import MicroBatch, StreamState, micro_batches, stream

EVALUATED = {"steps": 14, "eval_every": 2, "eval_share": 50.0, "keep": 2}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return train_cache(tmp_path_factory.mktemp("best") / "hs.zarr")


@pytest.fixture(scope="module")
def whole(cache: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "whole"
    train(options(run=EVALUATED), cache, str(run), False, Silent())
    return run


def walks(run: Path) -> dict[int, float]:
    return {int(line["step"]): line["val/walk"] for line in stable_lines(run) if "val/walk" in line}


def first_best(run: Path) -> int:
    by_step = walks(run)
    return min(step for step, walk in by_step.items() if walk == max(by_step.values()))


def test_best_and_newest_checkpoints_are_kept_and_the_best_is_the_draft(cache: str, whole: Path) -> None:
    best = first_best(whole)
    assert len(set(walks(whole).values())) > 1 and best < 12, "a run whose last is its best would prove nothing"
    assert list(list_checkpoints(whole / "checkpoints")) == [best, 12, 14]
    exported = read_provenance(whole).draft
    assert exported is not None
    assert (exported.checkpoint, exported.chosen) == (f"step-{best:06d}", "best")
    assert exported.walk == walks(whole)[best]
    master = load_file(whole / f"checkpoints/step-{best:06d}/model.safetensors")
    draft = load_draft(whole / "draft", dtype="float32").state_dict()
    assert all(torch.equal(draft[name], tensor.bfloat16().float()) for name, tensor in master.items())


def test_a_checkpoint_holds_its_losses(whole: Path) -> None:
    by_step = {
        line["step"]: line
        for line in map(json.loads, (whole / "metrics.jsonl").read_text().splitlines())
        if "train/loss" in line
    }
    metrics = load_checkpoint(whole / "checkpoints/step-000014").state.metrics
    assert metrics["train/loss"] == by_step[14]["train/loss"] and metrics["val/walk"] == walks(whole)[14]


@pytest.mark.parametrize("export", ["best", "last"])
def test_what_draft_holds_can_be_changed_afterwards(cache: str, whole: Path, tmp_path: Path, export: str) -> None:
    shutil.copytree(whole, tmp_path / "r")
    summary = train(options(run={**EVALUATED, "export": export}), cache, str(tmp_path / "r"), True, Silent())
    step = 14 if export == "last" else first_best(whole)
    assert summary.checkpoint == f"step-{step:06d}"
    master = load_file(tmp_path / f"r/checkpoints/{summary.checkpoint}/model.safetensors")
    draft = load_draft(tmp_path / "r/draft", dtype="float32").state_dict()
    assert all(torch.equal(draft[name], tensor.bfloat16().float()) for name, tensor in master.items())


def test_without_an_evaluation_the_draft_is_the_last(cache: str, tmp_path: Path) -> None:
    train(options(run={"steps": 3}), cache, str(tmp_path / "r"), False, Silent())
    exported = read_provenance(tmp_path / "r").draft
    assert exported is not None and (exported.checkpoint, exported.chosen, exported.walk) == (
        "step-000003",
        "last",
        None,
    )


@pytest.mark.parametrize("step", [6, 12])
def test_a_resumed_run_knows_its_best(cache: str, whole: Path, tmp_path: Path, step: int) -> None:
    straight = tmp_path / "straight"
    train(options(run={**EVALUATED, "keep": 20}), cache, str(straight), False, Silent())
    run = tmp_path / "r"
    shutil.copytree(straight, run)
    shutil.rmtree(run / "draft")
    for later, path in list_checkpoints(run / "checkpoints").items():
        if later > step:
            shutil.rmtree(path)
    train(options(run=EVALUATED), cache, str(run), True, Silent())
    assert stable_lines(run) == stable_lines(whole)
    ours, theirs = tensor_files(run), tensor_files(whole)
    assert {name: ours[name] for name in theirs if name in ours} == {
        name: theirs[name] for name in theirs if name in ours
    }
    assert ours["draft/model.safetensors"] == theirs["draft/model.safetensors"]
    assert load_checkpoint(run / "checkpoints/step-000014").state.best == Best(
        step=first_best(whole), walk=walks(whole)[first_best(whole)]
    )


def test_a_best_that_is_gone_or_of_other_samples_is_sought_anew(cache: str, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "r")
    shutil.rmtree(tmp_path / f"r/checkpoints/step-{first_best(whole):06d}")
    heard = Heard()
    train(options(run=EVALUATED), cache, str(tmp_path / "r"), True, heard)
    assert any("no longer there: the best is sought anew" in note for note in heard.notes)
    assert read_provenance(tmp_path / "r").draft.chosen == "last"  # type: ignore[union-attr]
    shutil.copytree(whole, tmp_path / "s")
    heard = Heard()
    train(options(run={**EVALUATED, "steps": 15, "eval_share": 1e-6}), cache, str(tmp_path / "s"), True, heard)
    assert any("other held-out samples" in note for note in heard.notes)
    assert any("evaluating 1 of 4 held-out samples every 2 steps" in warning for warning in heard.warnings)


def test_a_better_walk_is_the_best_and_an_equal_one_is_not() -> None:
    state = TrainState()
    for step, walk, best, stale in [(2, 1.5, 2, 0), (4, 1.5, 2, 1), (6, 1.4, 2, 2), (8, 1.6, 8, 0), (10, None, 8, 1)]:
        state = judged(state.model_copy(update={"step": step}), walk)
        assert state.best is not None and (state.best.step, state.stale) == (best, stale)
    assert judged(TrainState(step=1), None).best is None


def test_patience_ends_a_run_and_more_of_it_goes_on_as_if_it_had_not(cache: str, whole: Path, tmp_path: Path) -> None:
    by_step = list(walks(whole).items())
    stop = next(step for (_, before), (step, walk) in pairwise(by_step) if walk <= before)
    heard = Heard()
    chosen = {**EVALUATED, "patience": 1, "keep": 20}
    summary = train(options(run=chosen), cache, str(tmp_path / "r"), False, heard)
    assert summary.steps == stop < 14 and max(walks(tmp_path / "r")) == stop
    assert any(
        f"stopped at step {summary.steps} of 14: 1 evaluations without a better one" in note for note in heard.notes
    )
    again = Heard()
    assert (
        train(options(run=chosen), cache, str(tmp_path / "r"), True, again).steps == summary.steps and again.steps == []
    )
    train(options(run=EVALUATED), cache, str(tmp_path / "r"), True, Silent())
    assert stable_lines(tmp_path / "r") == stable_lines(whole)


# The set and its share


def test_the_set_is_whole_samples_in_the_order_of_their_ids_within_the_share(cache: str, tmp_path: Path) -> None:
    def chosen(share: float) -> Any:
        return prepare(
            options(run={"eval_every": 2, "eval_share": share}), cache, str(tmp_path / str(share)), False, Heard()
        )

    index = open_cache(cache).index
    ids, supervised = index["sample_id"].to_pylist(), index["supervised"].to_pylist()
    rows = sorted(
        (row for row, split in enumerate(index["split"].to_pylist()) if split == "val"), key=lambda row: ids[row]
    )
    small, all_of_them = chosen(0.2), chosen(50)
    assert all_of_them.held_out.rows == tuple(rows) and small.held_out.rows == tuple(rows[: len(small.held_out.rows)])
    assert 1 <= len(small.held_out.rows) < len(rows)
    # What counts as trained is what the steps of an epoch train: an evaluated block costs a third of a trained one.
    job = chosen(3.0)
    micros = [MicroBatch(0, tuple(rows.tolist()), StreamState(), False) for rows in micro_batches(job.order, 0)]
    sizes = [len(batch.blocks.anchor_N) for batch in read_batches(job.cache, job.draw, micros)]
    most = 0.2 * 3 * 2 * sum(sizes) / len(sizes)
    taken = sum(supervised[row] for row in small.held_out.rows)
    assert taken <= most * 1.1 or len(small.held_out.rows) == 1
    assert taken + supervised[rows[len(small.held_out.rows)]] > most * 0.9


def test_auto_evaluates_with_the_checkpoints_where_samples_are_held_out(cache: str, tmp_path: Path) -> None:
    train(options(run={"steps": 6, "eval_every": "auto"}), cache, str(tmp_path / "r"), False, Silent())
    assert list(walks(tmp_path / "r")) == [3, 6] and read_options(tmp_path / "r").run.eval_every == 3
    none = train_cache(tmp_path / "c", shards=1, split="train")
    heard = Heard()
    train(options(run={"steps": 2, "eval_every": "auto"}), none, str(tmp_path / "s"), False, heard)
    assert read_options(tmp_path / "s").run.eval_every == 0 and any(
        "no held-out samples" in note for note in heard.notes
    )
    with pytest.raises(OptionError, match=r"run.patience=2.*no held-out samples"):
        train(options(run={"eval_every": "auto", "patience": 2}), none, str(tmp_path / "t"), False, Silent())


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_a_line_holds_walk_uniform_slots_selector_and_recall(cache: str, tmp_path: Path, kind: str) -> None:
    chosen = options(draft={"kind": kind}, run={**EVALUATED, "steps": 2, "draft_dtype": "float32"})
    train(chosen, cache, str(tmp_path / "r"), False, Silent())
    line = stable_lines(tmp_path / "r")[-1]
    report = evaluate_cache(load_draft(tmp_path / "r/draft"), open_cache(cache, [0, 2, 3]), "val")
    assert line["val/accuracy_per_slot"] == report["accuracy_per_slot"]
    assert (line["val/walk"], line["val/uniform"]) == tuple(report[way]["acceptance"] for way in ("walk", "uniform"))
    selector = {name for name in line if name.startswith("val/base_") or name == "val/candidate_recall"}
    if kind == "dflash":
        assert not selector
        return
    assert line["val/candidate_recall"] == report["candidate_recall"]
    for way in ("walk", "uniform"):
        assert line[f"val/base_{way}"] == report["backbone"][way]["acceptance"]
    assert line["val/base_accuracy_per_slot"] == report["backbone"]["accuracy_per_slot"]


def test_evaluating_in_bfloat16_is_near_float32_and_changes_no_step(cache: str, tmp_path: Path) -> None:

    lines, weights = [], []
    for precision in ("float32", "bfloat16"):
        job = prepare(
            options(run={**EVALUATED, "precision": precision}), cache, str(tmp_path / precision), False, Silent()
        )
        lines.append(val_line(job.learner, job.cache, job.held_out.rows))
    assert (
        lines[1]["val/loss"] == pytest.approx(lines[0]["val/loss"], rel=0.05)
        and lines[1]["val/loss"] != lines[0]["val/loss"]
    )
    for evaluate in (False, True):
        job = prepare(
            options(run={**EVALUATED, "precision": "bfloat16"}), cache, str(tmp_path / f"{evaluate}"), False, Silent()
        )

        batches = read_batches(job.cache, job.draw, stream(job.order))
        run_step(job.learner, [next(batches)], 0.01)
        if evaluate:
            val_line(job.learner, job.cache, job.held_out.rows)
        run_step(job.learner, [next(batches)], 0.01)
        weights.append({name: tensor.clone() for name, tensor in job.learner.draft.state_dict().items()})
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
