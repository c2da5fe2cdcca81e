"""Sweeps: the grid and its names, what is finished, what goes on, what fails; with real trainings once, else with stand-ins."""

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cache_fixtures import make_cache
from train_fixtures import Heard, options, stable_lines, tensor_files, train_cache

import pipeline.sweep
from cache.read import open_cache
from pipeline.cli import main
from pipeline.grid import grid, read_sweep
from pipeline.results import CACHE, keep_result
from pipeline.sweep import Task, devices_for, is_finished, sweep
from pipeline.sweep_table import sweep_table
from schemas.errors import OptionError, TrainFault
from schemas.options import TrainOptions
from schemas.say import Silent
from train.checkpoint import list_checkpoints
from train.run import train
from train.rundir import provenance_of, read_provenance

ROOT = Path(__file__).resolve().parent.parent


# The grid


def test_a_grid_is_every_combination_with_a_folder_each() -> None:
    points = grid(["draft.block_size=8,16", "draft.kind=dflash,dflash2"])
    assert [point.name for point in points] == [
        "block_size=8,kind=dflash",
        "block_size=8,kind=dflash2",
        "block_size=16,kind=dflash",
        "block_size=16,kind=dflash2",
    ]
    assert points[1].settings == ((["draft", "block_size"], 8), (["draft", "kind"], "dflash2"))


def test_values_are_yaml_and_names_are_folders() -> None:
    assert read_sweep("optim.lr=1e-3,2.5e-4") == (["optim", "lr"], [0.001, 0.00025])
    assert read_sweep("run.layers=[1, 2],null") == (["run", "layers"], [[1, 2], None])
    names = [point.name for point in grid(["run.layers=[0, 2],null", "data.sources={a/b.jsonl: 2}"])]
    assert names == ["layers=0_2,sources=a_b.jsonl_2", "layers=null,sources=a_b.jsonl_2"]
    assert [p.name for p in grid(["draft.x=1", "loss.x=2"])] == ["draft.x=1,loss.x=2"], "one name for two options"


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["draft.kind"], "write section.key=value,value"),
        (["draft.kind="], "write section.key=value,value"),
        (["draft.kind=a,a"], "'a' is given twice"),
        (["draft.kind=[a"], "no list of YAML values"),
        (["draft.kind=a", "draft.kind=b"], "draft.kind is given twice"),
        (["data.x={a: 1},[a, 1]"], "share the folder"),
    ],
)
def test_a_sweep_that_is_no_grid_is_refused(texts: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        grid(texts)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sweep", "draft.kind=dflash,eagle"], "draft.kind"),
        (["--sweep", "draft.kind=dflash", "--resume"], "leave out --resume"),
        (["--sweep", "draft.kind=dflash", "--draft", "dflash2"], "draft.kind is swept and also set to 'dflash2'"),
        (["--sweep", "optim.lr=1e-3", "--set", "optim.lr=2e-3"], "optim.lr is swept and also set to 0.002"),
        (["--sweep", "optim.speed=3"], "optim.speed: unknown key"),
        (["--sweep", "draft.kind=dflash", "--jobs", "0"], "--jobs 0"),
        (["--sweep", "draft.kind=dflash", "--out", "s3://b/runs"], "--out s3://b/runs: only a cache"),
        (["--jobs", "2"], "--jobs 2 is how many runs of a --sweep"),
    ],
)
def test_mistakes_are_met_before_anything_runs(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", "--cache", "x.zarr", "--out", str(tmp_path / "s"), *words])
    err = capsys.readouterr().err.strip().splitlines()
    assert caught.value.code == 2 and err[-1].startswith("error: ") and message in err[-1]
    assert not (tmp_path / "s").exists()


# With stand-ins for the trainings


@pytest.fixture
def cache(tmp_path: Path) -> str:
    make_cache(tmp_path / "hs.zarr")
    return str(tmp_path / "hs.zarr")


def tasks(folder: Path, *names: str) -> list[Task]:
    return [Task(name, folder / name, TrainOptions()) for name in names]


def stand_in(monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    program = (
        f"import os, sys, time\nfrom pathlib import Path\nout = Path(sys.argv[sys.argv.index('--out') + 1])\n{body}"
    )
    monkeypatch.setattr(pipeline.sweep, "PROGRAM", program)
    monkeypatch.setattr(pipeline.sweep, "sweep_table", lambda runs: "table of " + " ".join(name for name, _ in runs))


def test_a_failed_run_is_told_of_and_the_others_go_on(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, "print('error: the disk is full'); sys.exit(2 if out.name == 'b' else 0)")
    heard = Heard()
    with pytest.raises(
        TrainFault, match=r"1 of 3 runs failed: b \(exit code 2\).*the same command tries them again"
    ) as caught:
        sweep(tasks(tmp_path / "s", "a", "b", "c"), cache, 1, heard)
    assert caught.value.exit_code == 1 and "table of a c" in heard.notes
    assert heard.warnings == ["b failed, exit code 2: error: the disk is full"] and heard.steps == [1, 2, 3]


def test_as_many_at_a_time_as_there_are_jobs(cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive = f"alive = Path({str(tmp_path)!r})"
    stand_in(
        monkeypatch,
        f"{alive}\nmark = alive / (out.name + '.alive'); mark.touch(); time.sleep(0.3)\n"
        "seen = len(list(alive.glob('*.alive'))); mark.unlink(); (alive / (out.name + '.seen')).write_text(str(seen))",
    )
    assert sweep(tasks(tmp_path / "s", *"abcde"), cache, 2, Silent()) == "table of a b c d e"
    seen = [int(path.read_text()) for path in tmp_path.glob("*.seen")]
    assert len(seen) == 5 and max(seen) == 2


def test_a_sweep_that_is_stopped_stops_its_runs_and_waits(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(
        monkeypatch,
        "import signal\ndef save(*_):\n    time.sleep(0.2); (out.parent / 'saved').touch(); sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, save); out.parent.mkdir(exist_ok=True); (out.parent / 'ready').touch(); time.sleep(60)",
    )

    def interrupt(seconds: float) -> None:
        if (tmp_path / "s/ready").exists():
            raise KeyboardInterrupt
        real(seconds)

    real = time.sleep
    monkeypatch.setattr(pipeline.sweep.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        sweep(tasks(tmp_path / "s", "a", "b"), cache, 1, Silent())
    assert (tmp_path / "s/saved").exists() and not (tmp_path / "s/b.log").exists()


def test_devices_are_taken_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices_for(3, {"cpu"}) == [None] * 3
    monkeypatch.setattr(pipeline.sweep.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(pipeline.sweep.torch.cuda, "device_count", lambda: 2)
    assert devices_for(2, {"auto"}) == ["cuda:0", "cuda:1"] and devices_for(2, {"cuda:0"}) == [None, None]
    with pytest.raises(OptionError, match="--jobs 3, but there are 2 CUDA devices"):
        devices_for(3, {"auto"})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a cache and a finished run `a` on it."""
    folder = tmp_path_factory.mktemp("trained")
    asked = options(run={"steps": 2}, optim={"lr": None})
    train(asked, train_cache(folder / "hs.zarr"), str(folder / "a"), False, Silent())
    return folder


@pytest.mark.parametrize(
    ("groups", "finished"),
    [
        ({}, True),
        ({"run": {"log_every": 1, "keep": 3}}, True),
        ({"optim": {"lr": 6e-4}}, True),
        ({"optim": {"lr": 2e-2}}, False),
        ({"run": {"steps": 6}}, False),
        ({"run": {"export": "last"}}, False),
        ({"loss": {"gamma": None}}, False),
        ({"draft": {"num_layers": 2}}, False),
    ],
)
def test_finished_is_what_was_asked_for_just_so(
    trained: Path, tmp_path: Path, groups: dict[str, Any], finished: bool
) -> None:
    cache = str(trained / "hs.zarr")
    asked = options(**{"optim": {"lr": None}, **groups, "run": {"steps": 2, **groups.get("run", {})}})
    now = provenance_of(open_cache(cache), cache)
    assert is_finished(Task("a", trained / "a", asked), now) == finished
    assert not is_finished(Task("b", tmp_path / "b", asked), now), "nothing is there"
    other = now.model_copy(update={"index_sha256": "0" * 64})
    assert not is_finished(Task("a", trained / "a", asked), other), "another cache"


def test_the_table_is_of_the_drafts_own_checkpoint_and_shows_evaluations_where_all_have_one(
    trained: Path, tmp_path: Path
) -> None:
    cache = str(trained / "hs.zarr")
    runs = []
    for name, keys in (("a", {"eval_every": 2, "eval_share": 50.0}), ("b", {})):
        train(options(run={"steps": 8, **keys}), cache, str(tmp_path / name), False, Silent())
        runs.append((name, tmp_path / name))
    lines = [line.split("   ") for line in sweep_table(runs).splitlines()]
    assert [cell.strip() for cell in lines[0] if cell.strip()][:4] == ["run", "params", "draft of", "walk"] and len(
        lines
    ) == 3
    exported = read_provenance(tmp_path / "a").draft
    assert exported is not None
    first, second = (" ".join(line).split() for line in lines[1:])
    assert first[2:4] == [exported.checkpoint, f"{exported.walk:.3f}"] and second[2:5] == ["step-000008", "-", "-"]
    figure = {"accepted": 1, "blocks": 2, "acceptance": 1.5}
    for _, folder in runs:
        keep_result(str(folder), CACHE, {"uniform": figure, "walk": figure})
    assert "acceptance, from the cache" in sweep_table(runs)


# With real trainings


@pytest.mark.slow
def test_a_grid_from_one_cache_then_only_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = train_cache(tmp_path / "hs.zarr")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
    words = ["train", "--cache", cache, "--out", str(tmp_path / "s"), "--sweep", "draft.kind=dflash,dflash2", "--jobs", "2", "--steps", "4",
             "--device", "cpu", "--set", "run.checkpoint_every=2", "--set", "run.eval_every=2", "--set", "run.eval_share=9",
             "--set", "draft.num_layers=1", "--set", "draft.block_size=4", "--set", "draft.selector_top_k=4", "--set", "draft.conv_group_size=4",
             "--set", "data.batch_tokens=60"]  # fmt: skip

    def run() -> tuple[str, str]:
        with pytest.raises(SystemExit) as caught:
            main(words)
        out, err = capsys.readouterr()
        assert caught.value.code == 0, err + "".join(path.read_text() for path in (tmp_path / "s").glob("*.log"))
        return out, err

    table, _ = run()
    assert [line.split()[0] for line in table.splitlines()] == ["run", "kind=dflash", "kind=dflash2"]
    first, second = tmp_path / "s/kind=dflash", tmp_path / "s/kind=dflash2"
    before = tensor_files(second), stable_lines(second)
    untouched = (first / "provenance.json").stat().st_mtime_ns
    # As a kill after the second step would have left it.
    shutil.rmtree(second / "draft")
    shutil.rmtree(list_checkpoints(second / "checkpoints")[4])
    text = (second / "provenance.json").read_text()
    (second / "provenance.json").write_text(text[: text.rindex(',\n "draft"')] + "}")
    again, said = run()
    assert "1 of 2 runs are finished already: skipped" in said and "kind=dflash2: going on" in said
    assert (tensor_files(second), stable_lines(second)) == before
    assert again.split()[-8:-1] == table.split()[-8:-1] and (first / "provenance.json").stat().st_mtime_ns == untouched
