"""Several processes capture together: any number, any kills and restarts, the same bytes."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from capture_fixtures import ROOT, contents, random_target, shipped_rows, write_jsonl
from crew_fixtures import ROWS, options_for

from cache.read import open_cache
from cache.store import LocalStore
from capture import crew as crew_module
from capture.crew import gather
from schemas.errors import Bystander, Interrupted, OptionError
from schemas.ranks import ALONE, Ranks, ranks_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("crew")


@pytest.fixture(scope="module")
def target(folder) -> str:
    return random_target(folder / "tiny", num_key_value_heads=2)


@pytest.fixture(scope="module")
def data(folder) -> str:
    return write_jsonl(folder / "rows.jsonl", shipped_rows(ROWS))


@pytest.fixture(scope="module")
def alone(crew_driver, folder, target, data) -> tuple[dict[str, bytes], float]:
    """The cache of one process, uninterrupted, and the seconds it took."""
    codes, seconds = crew_driver.run(1, options_for(target, data, folder / "alone"))
    assert codes == [0]
    return contents(folder / "alone"), seconds


@pytest.mark.parametrize("world", [2, 3])
def test_any_number_of_processes_gives_the_same_bytes(crew_driver, folder, target, data, alone, world):
    out = folder / f"world-{world}"
    assert crew_driver.run(world, options_for(target, data, out))[0] == [0] * world
    assert contents(out) == alone[0]
    assert not list(out.glob(".tmp-*")), "no workspace is left"
    assert crew_driver.run(world, options_for(target, data, out))[0] == [0] * world, "again is no work"
    assert contents(out) == alone[0]


def kill_and_go_on(crew_driver, out, target, data, alone, kills: int, seed: int) -> int:
    """Kill at random moments until `kills` have hit; every cache that gets finished is the uninterrupted one. Returns the hits."""
    draw, hits, number = random.Random(seed), 0, 0
    while hits < kills:
        world = draw.choice([1, 2])
        options = options_for(target, data, out / str(number))
        victims = tuple(draw.sample(range(world), draw.randint(1, world)))
        codes, _ = crew_driver.run(world, options, victims, draw.uniform(0, 1.5 * alone[1]))
        if any(code < 0 for code in codes):
            hits += 1
            assert -9 in codes
        else:
            assert codes == [0] * world
        if (options_out := Path(options.out)).exists() and not (options_out / "plan.parquet").exists():
            codes, _ = crew_driver.run(1, options)
            assert codes == [0]
            assert contents(options_out) == alone[0], seed
            number += 1
    assert crew_driver.run(1, options)[0] == [0]
    assert contents(Path(options.out)) == alone[0]
    return hits


def test_killed_at_a_few_random_moments(crew_driver, folder, target, data, alone):
    assert kill_and_go_on(crew_driver, folder / "few", target, data, alone, kills=6, seed=1) == 6


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_killed_at_many_random_moments(crew_driver, folder, target, data, alone, seed):
    assert kill_and_go_on(crew_driver, folder / f"many-{seed}", target, data, alone, kills=30, seed=100 + seed) == 30


def test_any_number_of_processes_appends_the_same_bytes(crew_driver, folder, target, data):
    more = write_jsonl(folder / "more.jsonl", shipped_rows(2 * ROWS)[ROWS - 1 :])
    for world in (1, 2):
        out = folder / f"grown-by-{world}"
        assert crew_driver.run(world, options_for(target, data, out))[0] == [0] * world
        assert crew_driver.run(world, options_for(target, more, out, append=True))[0] == [0] * world
    assert contents(folder / "grown-by-1") == contents(folder / "grown-by-2")
    totals = open_cache(str(folder / "grown-by-2")).manifest.totals
    assert totals.samples == 2 * ROWS, "the row that both files hold is there once"


MEET = {"MASTER_ADDR": "a", "MASTER_PORT": "29500"}


def test_ranks_come_from_the_environment():
    assert ranks_of({}) is None and ranks_of({"SLURM_STEP_NUM_TASKS": "1"}) is None
    assert ranks_of({"RANK": "0", "WORLD_SIZE": "1"}) == ALONE
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", **MEET}
    assert ranks_of(torchrun) == Ranks(5, 8, 1, 4)
    srun = {"RANK": "5", "WORLD_SIZE": "8", "SLURM_LOCALID": "1", **MEET}
    assert ranks_of(srun) == Ranks(5, 8, 1, 8)
    for wrong, rule in (
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}, "srun started 4 processes and told none of them its rank"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x'"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "not below"),
        ({"RANK": "1"}, "RANK is set but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set but RANK is not"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "MASTER_PORT is not"),
        ({"RANK": "0", "WORLD_SIZE": "2", **MEET, "MASTER_PORT": "http"}, "MASTER_PORT='http'"),
    ):
        with pytest.raises(OptionError, match=rule):
            ranks_of(wrong)


def test_whoever_fails_is_heard_of_by_the_others():
    with pytest.raises(OptionError, match="--tp 2 does not divide the 1 processes"), gather(ALONE, 2):
        pass
    with pytest.raises(ValueError, match="odd"), gather(ALONE, 1) as crew:
        raise ValueError("odd")
    with pytest.raises(Bystander, match="process 0 stopped: ValueError"):
        crew.hear("never told")
    assert [*crew.claim([7, 8])] == [7, 8], "work that was claimed before goes on to its end"


def dflash(*words: str, **options: object) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pipeline", *words]
    return subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options
    )


LONGER = {"batch_tokens": 64, "shard_tokens": 1024}


@pytest.fixture(scope="module")
def longer(crew_driver, folder, target) -> tuple[str, dict[str, bytes]]:
    """Data that takes some seconds in small batches, and its cache by one process."""
    data = write_jsonl(folder / "longer.jsonl", shipped_rows(200))
    assert crew_driver.run(1, options_for(target, data, folder / "longer", **LONGER))[0] == [0]
    return data, contents(folder / "longer")


def command_for(target: str, data: str, out: Path) -> list[str]:
    words = f"capture --target {target} --data {data} --out {out} --layers 0,2 --codec f32 --dtype float32 --top-k 8 --max-length 256"
    return [
        *words.split(),
        *["--shard-tokens", "1024", "--batch-tokens", "64", "--val-fraction", "0.2", "--nproc", "2"],
    ]


def stop_in_the_middle(process: subprocess.Popen, number: int, of_a_worker: bool) -> tuple[int, str]:
    """Signal the launcher, or one of its processes, when the first shard is in; returns exit code and what was said."""
    said = ""
    for line in process.stderr:
        said += line
        if line.startswith("shard "):
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(children[-1]) if of_a_worker else process.pid, number)
            break
    said += process.communicate(timeout=60)[1]
    return process.returncode, said


def test_nproc_ends_politely_and_goes_on(folder, longer, target, tmp_path, monkeypatch):
    data, uninterrupted = longer
    out = folder / "command"
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    code, said = stop_in_the_middle(dflash(*command_for(target, data, out)), signal.SIGTERM, False)
    assert code == 143, said
    assert said.count("error:") == 1 and "the same command goes on" in said
    process = dflash(*command_for(target, data, out))
    printed, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert printed.count("complete") == 1, "the first process alone speaks"
    assert "going on" in said
    assert contents(out) == uninterrupted
    assert not list(tmp_path.glob("torchelastic*"))


@pytest.mark.slow
def test_nproc_survives_its_processes(folder, longer, target):
    data, uninterrupted = longer
    out = folder / "killed-command"
    code, said = stop_in_the_middle(dflash(*command_for(target, data, out)), signal.SIGKILL, True)
    assert (code, "was ended by SIGKILL: the same command goes on" in said) == (1, True), said
    code, _ = stop_in_the_middle(dflash(*command_for(target, data, out)), signal.SIGKILL, False)
    assert code == -signal.SIGKILL
    process = dflash(*command_for(target, data, out))
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert contents(out) == uninterrupted


def test_a_mistake_is_said_once(folder, data, target):
    process = dflash(*command_for(target, data, folder / "mistake"), "--tp", "2", "--layers", "9")
    _, said = process.communicate(timeout=120)
    assert process.returncode == 2
    assert said.count("error:") == 1 and "layer 9 is out of range" in said


def test_workspaces_of_the_living_and_of_other_hosts_stay(tmp_path):
    own, other, dead = (
        tmp_path / f".tmp-{name}"
        for name in (f"{os.uname().nodename}-1", "elsewhere-999999", f"{os.uname().nodename}-999999")
    )
    for place in (own, other, dead):
        place.mkdir()
    LocalStore(tmp_path).clean_workspaces()
    assert own.exists() and other.exists() and not dead.exists()


@pytest.mark.parametrize("stop", [Interrupted("stopped by SIGTERM"), KeyboardInterrupt()])
def test_who_is_stopped_along_with_another_ends_at_once(monkeypatch, stop):
    monkeypatch.setattr(crew_module, "stand_by", lambda: pytest.fail("the launcher waits for this process"))

    def stopped() -> None:
        with gather(ALONE, 1) as crew:
            crew.tell(crew_module.FAILED, "process 1 stopped: KeyboardInterrupt")
            raise stop

    with pytest.raises(Bystander, match="process 1 stopped"):
        stopped()
