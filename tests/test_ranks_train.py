"""Several ranks train together: the gradients and the run of one rank that accumulates, whoever has data, is stopped or dies."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from ranks_fixtures import BARREN, KINDS, ROOT, RankDriver, alike, chosen_for
from safetensors.torch import load_file
from train_fixtures import stable_lines, tensor_files, train_cache

from cache.read import open_cache
from pipeline.train_command import go_on
from train.checkpoint import list_checkpoints, load_checkpoint
from train.gradients import buckets_of
from train.rundir import read_provenance
from train.stream import micro_batches, order_of


def test_the_data_of_these_tests_is_uneven(uneven_cache: str) -> None:
    order = order_of(open_cache(uneven_cache).index, 4, 8, 24)
    rounds = [micro_batches(order, epoch) for epoch in range(2)]
    assert all(len(each) % 4 and len(each) % 2 for each in rounds), (
        "the last round leaves some rank without a micro-batch"
    )
    assert any(set(micro.tolist()) <= set(BARREN) for each in rounds for micro in each), (
        "a micro-batch without an anchor"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradients_of_a_step_do_not_depend_on_who_computes_them(
    rank_driver: RankDriver, uneven_cache: str, tmp_path: Path, kind: str
) -> None:
    seen = []
    for world, accumulate in ((1, 4), (2, 2), (4, 1)):
        file = tmp_path / f"{world}.safetensors"
        codes, said = rank_driver.run(
            world, chosen_for(kind, accumulate), uneven_cache, tmp_path / str(world), gradients=str(file)
        )
        assert codes == [0] * world, said
        seen.append(load_file(file))
    for name, gradient in seen[0].items():
        assert gradient.abs().max() > 0
        for other in seen[1:]:
            torch.testing.assert_close(other[name], gradient, rtol=1e-4, atol=2e-6 * float(gradient.abs().max()))


@pytest.mark.parametrize(("kind", "world"), [(kind, world) for kind in KINDS for world in (2, 4)])
def test_a_run_does_not_depend_on_how_many_share_its_steps(
    rank_driver: RankDriver, uneven_cache: str, by_one_rank: dict[str, Path], tmp_path: Path, kind: str, world: int
) -> None:
    """Uneven epochs, ranks without a micro-batch, micro-batches without an anchor, evaluations, a partial last window."""
    codes, said = rank_driver.run(world, chosen_for(kind, 4 // world), uneven_cache, tmp_path / "r")
    assert codes == [0] * world, said
    alike(tmp_path / "r", by_one_rank[kind])
    counted = sum(line.get("train/without_anchor", 0) for line in stable_lines(tmp_path / "r"))
    assert counted == 2 * len(BARREN)
    evaluated = [
        [line for line in stable_lines(run) if "val/walk" in line] for run in (tmp_path / "r", by_one_rank[kind])
    ]
    assert len(evaluated[0]) == len(evaluated[1]) > 0


@pytest.fixture(scope="module")
def pair(rank_driver: RankDriver, uneven_cache: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run by two ranks that nothing disturbs."""
    run = tmp_path_factory.mktemp("pair") / "r"
    assert rank_driver.run(2, chosen_for("dflash2", 2, keep=20), uneven_cache, run)[0] == [0, 0]
    return run


def test_the_same_number_of_ranks_gives_the_same_bits(
    rank_driver: RankDriver, uneven_cache: str, tmp_path: Path, pair: Path
) -> None:
    assert rank_driver.run(2, chosen_for("dflash2", 2, keep=20), uneven_cache, tmp_path / "r")[0] == [0, 0]
    assert tensor_files(tmp_path / "r") == tensor_files(pair) and stable_lines(tmp_path / "r") == stable_lines(pair)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_other_and_resuming_ends_as_if_nothing_had_been(
    rank_driver: RankDriver, uneven_cache: str, tmp_path: Path, pair: Path, victim: int
) -> None:
    chosen, run = chosen_for("dflash2", 2, keep=20), tmp_path / "r"
    codes, said = rank_driver.run(2, chosen, uneven_cache, run, signals=[[victim, 4, signal.SIGKILL]])
    assert codes[victim] == -signal.SIGKILL and codes[1 - victim] == 1
    assert "Bystander: another process is gone" in said[1 - victim] and "--resume" in said[1 - victim]
    assert rank_driver.run(2, chosen, uneven_cache, run, resume=True)[0] == [0, 0]
    assert tensor_files(run) == tensor_files(pair) and stable_lines(run) == stable_lines(pair)


@pytest.mark.parametrize("told", [0, 1])
def test_sigterm_to_any_rank_stops_all_at_the_same_step_with_one_checkpoint(
    rank_driver: RankDriver, uneven_cache: str, tmp_path: Path, pair: Path, told: int
) -> None:
    chosen, run = chosen_for("dflash2", 2, keep=20), tmp_path / "r"
    codes, said = rank_driver.run(2, chosen, uneven_cache, run, signals=[[told, 3, signal.SIGTERM]])
    assert codes == [143, 143]
    assert all("stopped by SIGTERM at step 3 of 6, all saved: go on with `dflash train" in text for text in said)
    assert list(list_checkpoints(run / "checkpoints")) == [2, 3]
    assert rank_driver.run(2, chosen, uneven_cache, run, resume=True)[0] == [0, 0]
    shutil.rmtree(run / "checkpoints/step-000003", ignore_errors=True)
    kept = {name: digest for name, digest in tensor_files(pair).items() if "step-000003" not in name}
    assert tensor_files(run) == kept and stable_lines(run) == stable_lines(pair)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_goes_on_with_the_same_run(
    rank_driver: RankDriver, uneven_cache: str, tmp_path: Path, by_one_rank: dict[str, Path], before: int, after: int
) -> None:
    """Four micro-batches a step before and after, dealt otherwise: `optim.accumulate` may follow the number of ranks."""
    run = tmp_path / "r"
    stop = [[0, 3, signal.SIGTERM]]
    assert (
        rank_driver.run(before, chosen_for("dflash2", 4 // before), uneven_cache, run, signals=stop)[0]
        == [143] * before
    )
    codes, said = rank_driver.run(after, chosen_for("dflash2", 4 // after), uneven_cache, run, resume=True)
    assert codes == [0] * after, said
    alike(run, by_one_rank["dflash2"])
    assert read_provenance(run).ranks == after


def test_a_place_between_the_rounds_of_more_ranks_is_gone_on_from(
    rank_driver: RankDriver, uneven_cache: str, tmp_path: Path
) -> None:
    """Three of nine micro-batches by one rank, then two at a time: 3 + 3 steps, and 5 of the next epoch. Every sample runs once."""
    run, chosen = tmp_path / "r", chosen_for("dflash")
    assert rank_driver.run(1, chosen, uneven_cache, run, signals=[[0, 3, signal.SIGTERM]])[0] == [143]
    codes, said = rank_driver.run(2, chosen, uneven_cache, run, resume=True)
    assert codes == [0, 0], said
    lines = [line for line in stable_lines(run) if "train/lr" in line]
    assert [line["epoch"] for line in lines] == [0] * 6 + [1] * 5
    assert [sum(line["train/without_anchor"] for line in lines if line["epoch"] == epoch) for epoch in (0, 1)] == [3, 3]
    state = load_checkpoint(list_checkpoints(run / "checkpoints")[11]).state
    assert (state.epoch, state.position) == (2, 0)


def test_what_is_wrong_is_said_by_one_rank_alone(
    rank_driver: RankDriver, uneven_cache: str, tmp_path: Path, pair: Path
) -> None:
    codes, said = rank_driver.run(3, chosen_for("dflash2", 2), uneven_cache, pair)
    assert sorted(codes) == [1, 1, 2]
    assert sorted(text.split(":")[0] for text in said) == ["Bystander", "Bystander", "DraftError"]
    assert all("holds a run already" in text for text in said)
    accumulate = chosen_for("dflash2", 1)
    codes, said = rank_driver.run(2, accumulate, uneven_cache, pair, resume=True)
    assert sorted(codes) == [1, 2] and all("optim.accumulate 2, this command asks for 1" in text for text in said)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_fault_of_one_rank_ends_the_other(
    rank_driver: RankDriver, uneven_cache: str, tmp_path: Path, culprit: int
) -> None:
    codes, said = rank_driver.run(2, chosen_for("dflash"), uneven_cache, tmp_path / "r", signals=[[culprit, 2, 0]])
    assert codes == [1, 1]
    assert said[culprit] == "TrainFault: the disk is on fire\n"
    why = f"Bystander: process {culprit} stopped: the disk is on fire"
    assert said[1 - culprit].splitlines()[-1].startswith(why)


@pytest.mark.parametrize("world", [2, 3])
def test_a_loss_that_is_not_finite_is_told_by_the_first_rank_whoever_met_it(
    rank_driver: RankDriver, tmp_path: Path, world: int
) -> None:
    cache = train_cache(tmp_path / "c", poison=5)
    codes, said = rank_driver.run(world, chosen_for("dflash2"), cache, tmp_path / "r")
    assert codes == [1] * world and said[0].startswith("TrainFault: step ") and "the base_loss is nan" in said[0]
    assert all("\nBystander: " in f"\n{text}" for text in said[1:])
    (batch,) = json.loads((tmp_path / "r/not-finite.json").read_text())["batches"]
    assert 5 in batch["rows"]
    order = order_of(open_cache(cache).index, 4, 8, 24)
    assert micro_batches(order, batch["epoch"])[batch["position"]].tolist() == batch["rows"]


def test_the_command_launches_its_ranks_and_says_how_to_go_on(uneven_cache: str, tmp_path: Path) -> None:
    run = tmp_path / "r"
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump(chosen_for("dflash", epochs=None, steps=20_000).model_dump(mode="json"))
    )
    words = [
        "train",
        "--cache",
        uneven_cache,
        "--config",
        str(tmp_path / "config.yaml"),
        "--out",
        str(run),
        "--nproc",
        "2",
    ]
    command = [sys.executable, "-m", "pipeline", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=tmp_path)
    while not list_checkpoints(run / "checkpoints"):
        assert process.poll() is None, process.stderr
        time.sleep(0.05)
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    step = max(list_checkpoints(run / "checkpoints"))
    lines = err.strip().splitlines()
    assert lines[-1] == f"error: stopped by SIGTERM: go on with `dflash {shlex.join(words)} --resume`"
    assert [line for line in lines if line.startswith("stopped by")] == [
        f"stopped by SIGTERM at step {step} of 20000, all saved"
    ]
    assert sum("over 2 ranks" in line for line in lines) == 1, "one process speaks"


@pytest.mark.parametrize("resume", [[], ["--resume"], ["--resume", "step-000004"], ["--resume=step-000004"]])
def test_the_command_to_go_on_with_is_the_one_that_was_typed(tmp_path: Path, resume: list[str]) -> None:
    words = ["train", "--cache", "a b", *resume, "--nproc", "2"]
    assert go_on(words, str(tmp_path)) == "nothing was written, the same command begins again"
    (tmp_path / "config.yaml").touch()
    assert go_on(words, str(tmp_path)) == "go on with `dflash train --cache 'a b' --nproc 2 --resume`"


def test_buckets_are_runs_of_parameters_and_a_large_one_is_alone() -> None:
    sizes = [3, 3, 3, 20, 1, 1]
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    buckets = [[parameter.numel() for parameter in bucket] for bucket in buckets_of(parameters, 7 * 4)]
    assert buckets == [[3, 3], [3], [20], [1, 1]]
