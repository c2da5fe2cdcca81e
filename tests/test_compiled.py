"""`run.compile`: the numbers, names and files of a run that is not compiled, and no end of compiling is no option."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_fixtures import RankDriver, alike, chosen_for
from safetensors.torch import load_file
from test_resume import copy_until
from torch import Tensor
from torch._dynamo.utils import counters
from train_fixtures import Heard, fingerprint, options, stable_lines, tensor_files, train_cache

from schemas.errors import DflashError, Interrupted, OptionError
from schemas.say import Silent
from train import setup
from train.batch import Batch, read_batches
from train.checkpoint import list_checkpoints
from train.compiling import compile_layers
from train.run import train
from train.setup import Job, prepare
from train.step import accumulate
from train.stream import MicroBatch, StreamState

# Index rows of the micro-batches of a step; the last has no anchor.
STEPS: list[list[tuple[int, ...]]] = [[(0, 1), (2,)], [(4, 5, 6), (8, 9)], [(10,), (12, 13, 14)], [(1, 2), (6,)]]
MASKS = {6: [0, 1]}

compiler = pytest.mark.skipif(
    not (os.environ.get("CXX") or shutil.which("g++")), reason="there is no C++ compiler here"
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return train_cache(tmp_path_factory.mktemp("compiled") / "hs.zarr", masks=MASKS)


def job_of(cache: str, out: Path, kind: str, layers: int) -> Job:
    """A draft all of whose weights matter."""
    job = prepare(options(draft={"kind": kind, "num_layers": layers}), cache, str(out), False, Silent())
    with torch.no_grad():
        for number, parameter in enumerate(job.learner.draft.parameters()):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    return job


def batches_of(job: Job, rows: list[tuple[int, ...]]) -> list[Batch]:
    micros = [MicroBatch(0, each, StreamState(), False) for each in rows]
    config = job.learner.draft.config
    batches = read_batches(job.cache, job.draw, micros)
    return [batch.or_nothing(len(config.dflash_config.target_layer_ids), config.hidden_size) for batch in batches]


def one_step(job: Job, batches: list[Batch]) -> tuple[dict[str, float], dict[str, Tensor]]:
    sums = accumulate(job.learner, batches).sums
    gradients = {name: p.grad for name, p in job.learner.draft.named_parameters() if p.grad is not None}
    job.learner.draft.zero_grad()
    return sums, gradients


def same(one: tuple[dict[str, float], dict[str, Tensor]], other: tuple[dict[str, float], dict[str, Tensor]]) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-5)
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        torch.testing.assert_close(gradient, other[1][name], rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))


def check_steps(cache: str, out: Path, kind: str, layers: int, backend: str) -> int:
    """Compare steps of different sizes, compiled and not; returns how many graphs they took."""
    job = job_of(cache, out, kind, layers)
    steps = [batches_of(job, rows) for rows in STEPS]
    sizes = [(len(batch.blocks.anchor_N), sum(batch.samples.lengths)) for step in steps for batch in step]
    assert len(set(sizes)) == len(sizes) and (1, 2) in sizes, "batches of one size show nothing"
    expected = [one_step(job, step) for step in steps]
    before = counters["stats"]["unique_graphs"]
    compile_layers(job.learner, 2, backend)
    assert all(parameter.grad is None for parameter in job.learner.draft.parameters())
    made = counters["stats"]["unique_graphs"] - before
    for step, other in zip(steps, expected, strict=True):
        same(one_step(job, step), other)
    assert counters["stats"]["unique_graphs"] - before == made > 0, "compiled again in a step"
    return made


def test_batches_of_any_size_take_the_graphs_made_before_the_first_step(cache: str, tmp_path: Path) -> None:
    """What the compiler's front end sees, without its slow back end: two halves, of each one graph for the layers, one for the
    first of them and one without gradients."""
    assert check_steps(cache, tmp_path / "r", "dflash2", 3, "eager") == 6


def test_another_draft_in_the_process_does_not_use_up_the_graphs_of_this_one(cache: str, tmp_path: Path) -> None:
    """The compiler gives up on a function that it has compiled too often, and remembers which sizes it has seen to vary."""
    made = []
    with torch._dynamo.config.patch(recompile_limit=1):
        for size in (4, 5):
            before = counters["stats"]["unique_graphs"]
            chosen = options(draft={"kind": "dflash", "block_size": size})
            job = prepare(chosen, cache, str(tmp_path / str(size)), False, Silent())
            compile_layers(job.learner, 2, "eager")
            one_step(job, batches_of(job, STEPS[0]))
            made.append(counters["stats"]["unique_graphs"] - before)
    assert made[0] == made[1] > 0


@pytest.mark.slow
@compiler
@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_a_compiled_step_is_the_step_for_every_kind(cache: str, tmp_path: Path, kind: str) -> None:
    assert check_steps(cache, tmp_path / "r", kind, 2, "inductor") > 0


def compiled_run(cache: str, out: Path, resume: bool = False, **groups: Any) -> None:
    chosen = options(draft={"kind": "dflash"}, run={"compile": True, "eval_every": 5}, **groups)
    train(chosen, cache, str(out), resume, Silent())


@compiler
def test_a_compiled_run_has_the_files_of_the_other_and_resumes_to_the_same_bits(cache: str, tmp_path: Path) -> None:
    compiled_run(cache, tmp_path / "whole")
    train(options(draft={"kind": "dflash"}, run={"eval_every": 5}), cache, str(tmp_path / "eager"), False, Silent())
    alike(tmp_path / "whole", tmp_path / "eager")
    assert fingerprint(tmp_path / "whole").keys() == fingerprint(tmp_path / "eager").keys()
    for file in tensor_files(tmp_path / "whole"):
        assert load_file(tmp_path / "whole" / file).keys() == load_file(tmp_path / "eager" / file).keys()
    torch.compiler.reset()
    resumed = copy_until(tmp_path / "whole", tmp_path / "resumed", 6)
    compiled_run(cache, resumed, resume=True)
    assert tensor_files(resumed) == tensor_files(tmp_path / "whole")
    assert stable_lines(resumed) == stable_lines(tmp_path / "whole")


def test_a_run_may_go_on_without_being_compiled(cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        setup, "compile_layers", lambda learner, accumulate: compile_layers(learner, accumulate, "eager")
    )
    heard = Heard()
    train(options(run={"compile": True, "steps": 3}), cache, str(tmp_path / "r"), False, heard)
    assert any("compiling" in note for note in heard.notes)
    train(options(run={"steps": 6}), cache, str(tmp_path / "r"), True, Silent())
    assert list(list_checkpoints(tmp_path / "r" / "checkpoints")) == [3, 6]


def test_a_machine_without_a_compiler_is_told_so_before_anything_is_written(cache: str, tmp_path: Path) -> None:
    import torch._inductor.config as config

    rule = r"run.compile=true: .*/nowhere/g\+\+.*install a C\+\+ compiler.*or leave"
    # Not by monkeypatch, which would leave neither behind for the next test.
    with (
        config.patch({"cpp.cxx": ("/nowhere/g++",)}),
        torch.compiler.config.patch(force_disable_caches=True),
        pytest.raises(OptionError, match=rule) as caught,
    ):
        compiled_run(cache, tmp_path / "r")
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []


def test_a_full_disk_is_not_taken_for_a_machine_without_a_compiler(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._inductor.codecache as codecache

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(codecache, "write_atomic", full)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kernels"))
    rule = r"No space left on device\): free some space in .*/kernels, or let"
    with torch.compiler.config.patch(force_disable_caches=True), pytest.raises(DflashError, match=rule) as caught:
        compiled_run(cache, tmp_path / "r")
    assert not isinstance(caught.value, OptionError) and "g++" not in str(caught.value)
    assert not (tmp_path / "r").exists()


def test_a_signal_that_comes_while_it_compiles_is_not_blamed_on_the_compiler(cache: str, tmp_path: Path) -> None:
    def interrupted(*_: Any) -> None:
        raise Interrupted("stopped by SIGTERM")

    job = job_of(cache, tmp_path / "r", "dflash", 1)
    torch.compiler.reset()
    with pytest.raises(Interrupted):
        compile_layers(job.learner, 2, interrupted)


@pytest.mark.slow
@compiler
@pytest.mark.parametrize("shard", [False, True])
def test_ranks_train_a_compiled_draft_as_one_does(
    rank_driver: RankDriver, uneven_cache: str, by_one_rank: dict[str, Path], tmp_path: Path, shard: bool
) -> None:
    chosen = chosen_for("dflash2", 2, shard=shard, compile=True)
    codes, said = rank_driver.run(2, chosen, uneven_cache, tmp_path / "r")
    assert codes == [0, 0], said
    alike(tmp_path / "r", by_one_rank["dflash2"])
