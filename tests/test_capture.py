"""`capture` from options to a finished cache: what it holds, going on after a kill, and mending."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr
from capture_fixtures import (
    ROOT,
    Recorder,
    capture_options,
    contents,
    copy_tokenizer,
    random_target,
    shipped_rows,
    talk,
    write_jsonl,
)

from cache.read import open_cache
from cache.verify import forget, verify
from cache.write import CacheWriter
from capture import planning as planning_module
from capture import run as run_module
from capture.run import capture, dry_run
from schemas.arrays import bytes_per_token
from schemas.errors import CacheDamaged, CacheError
from schemas.options import CaptureOptions

ROWS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("capture")


@pytest.fixture(scope="module")
def target(folder):
    return random_target(folder / "tiny")


@pytest.fixture(scope="module")
def data(folder):
    return write_jsonl(folder / "rows.jsonl", shipped_rows(ROWS))


@pytest.fixture(scope="module")
def finished(folder, target, data):
    """An uninterrupted capture of several shards."""
    capture(capture_options(target, data, folder / "whole", layers=(0, 2)), Recorder())
    return folder / "whole"


def test_a_finished_cache(finished, data, target):
    cache = open_cache(str(finished))
    manifest = cache.manifest
    assert manifest.complete
    assert manifest.totals.shards >= 3
    assert manifest.identity.layers == (0, 2)
    assert (manifest.identity.target.name, manifest.identity.dtype) == ("tiny", "float32")
    assert (manifest.identity.mask_token_id, manifest.mask_token_source) == (3, "tokenizer")
    (source,) = manifest.sources
    assert (source.path, source.rows, source.kept) == (data, ROWS, ROWS)
    assert source.sha256 == hashlib.sha256(Path(data).read_bytes()).hexdigest()
    assert (
        manifest.identity.tokenizer_sha256 == hashlib.sha256((Path(target) / "tokenizer.json").read_bytes()).hexdigest()
    )
    for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (finished / "target" / name).read_bytes() == (Path(target) / name).read_bytes()
    group = zarr.open_group(str(finished), mode="r")
    assert group["hidden/2"].shape == (manifest.totals.shards * 1024, 32)
    index = cache.index.to_pylist()
    assert len(index) == ROWS
    assert not (finished / "plan.parquet").exists()
    for row in index:
        rows = slice(row["offset"], row["offset"] + row["length"])
        ids, mask = group["tokens/input_ids"][rows], group["tokens/loss_mask"][rows]
        assert row["tokens_sha256"] == hashlib.sha256(ids.astype("<i4").tobytes() + mask.tobytes()).hexdigest()
        assert row["supervised"] == mask.sum()


def test_again_is_no_work(finished, folder, target, data, monkeypatch):
    monkeypatch.setattr(run_module, "load_target", lambda *_: pytest.fail("the weights are not needed"))
    monkeypatch.setattr(planning_module, "collect", lambda *_: pytest.fail("the data needs no tokenising"))
    before = contents(finished)
    say = Recorder()
    moved = shutil.copy(data, folder / "moved.jsonl")
    manifest = capture(capture_options(target, str(moved), finished, layers=(2, 0)), say)
    assert manifest.complete
    assert "nothing to do" in say.notes[-1]
    assert contents(finished) == before


class StoppedError(Exception):
    pass


def stop_at_once(*_):
    raise StoppedError


@pytest.mark.parametrize("stop_after", [0, 1, 2])
def test_going_on_gives_the_same_bytes(finished, folder, target, data, monkeypatch, stop_after):
    out = folder / f"stopped-{stop_after}"
    options = capture_options(target, data, out, layers=(0, 2))
    commit, committed = CacheWriter.commit_shard, []

    def stop(self, shard, arrays):
        if len(committed) == stop_after:
            raise StoppedError
        committed.append(shard)
        return commit(self, shard, arrays)

    with monkeypatch.context() as patch:
        patch.setattr(CacheWriter, "commit_shard", stop)
        with pytest.raises(StoppedError):
            capture(options, Recorder())
    assert (out / "plan.parquet").exists()
    monkeypatch.setattr(planning_module, "collect", lambda *_: pytest.fail("the plan is there: no tokenising again"))
    say = Recorder()
    capture(options, say)
    shards = open_cache(str(finished)).manifest.totals.shards
    assert any(f"{shards - stop_after} of {shards} shards to do" in note for note in say.notes)
    assert any(f"{ROWS} samples taken from the plan" in note for note in say.notes)
    assert contents(out) == contents(finished)


KILLED = """
import os, signal, sys
sys.path[:0] = [{root!r}, {tests!r}]
from pathlib import Path
import cache.store
from capture_fixtures import Recorder, capture_options
from capture.run import capture
rename = os.rename
for limit in map(int, sys.argv[1:]):
    child = os.fork()  # spares each run its imports; no thread has been started yet
    if not child:
        renames = []
        def counted(*names):
            if len(renames) == limit:
                os.kill(os.getpid(), signal.SIGKILL)
            renames.append(names)
            rename(*names)
        os.rename = counted
        capture(capture_options({target!r}, {data!r}, Path({out!r}), layers=(0, 2)), Recorder())
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, limit
    assert not os.path.exists({out!r} + "/index.parquet"), limit
"""


def test_kill_dash_nine_at_any_object(finished, folder, target, data):
    """Killed before one object after another appears; each run goes on where the last one was killed."""
    out = folder / "killed"
    script = KILLED.format(root=str(ROOT), tests=str(ROOT / "tests"), target=target, data=data, out=str(out))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", script, *["0", "1", "7", "14", "20", "9", "8"]], env=environment, check=True)
    with pytest.raises(CacheError):
        open_cache(str(out))
    capture(capture_options(target, data, out, layers=(0, 2)), Recorder())
    assert contents(out) == contents(finished)


@pytest.mark.parametrize("harm", ["object", "record", "index", "head", "config", "array", "group"])
def test_the_same_command_mends_a_damaged_cache(finished, folder, target, data, harm):
    out = folder / f"damaged-{harm}"
    shutil.copytree(finished, out)
    before = contents(out)
    names = {
        "object": "hidden/2/c/1/0",
        "record": "shards/000001.json",
        "index": "index.parquet",
        "head": "target/head.safetensors",
        "config": "target/config.json",
        "array": "hidden/2/zarr.json",
        "group": "logits/zarr.json",
    }
    (out / names[harm]).unlink()
    say = Recorder()
    assert capture(capture_options(target, data, out, layers=(0, 2)), say).complete
    assert any("is damaged" in warning for warning in say.warnings)
    assert contents(out) == before


def test_the_targets_files_are_vouched_for(finished, folder):
    """A flipped bit of the head is found before training, and by reading deep; one of the tokenizer's at a look."""
    out = folder / "flipped"
    shutil.copytree(finished, out)
    for name, deep in (("head.safetensors", True), ("tokenizer.json", False), ("tokenizer_config.json", False)):
        path = out / "target" / name
        data = path.read_bytes()
        path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        (fault,) = verify(str(out), deep, Recorder())[1]
        assert fault.where == f"target/{name}" and "has CRC-32C" in fault.what
        if deep:
            assert not verify(str(out), False, Recorder())[1]
            with pytest.raises(CacheDamaged, match=r"head\.safetensors has CRC-32C"):
                open_cache(str(out)).head()
        path.write_bytes(data)
    assert verify(str(out), True, Recorder())[1] == []


def test_a_damaged_head_is_mended_by_the_same_command_after_repair(finished, folder, target, data):
    out = folder / "headless"
    shutil.copytree(finished, out)
    head = bytearray((out / "target/head.safetensors").read_bytes())
    head[-9] ^= 1
    (out / "target/head.safetensors").write_bytes(head)
    forget(str(out), verify(str(out), True, Recorder())[1])
    assert capture(capture_options(target, data, out, layers=(0, 2)), Recorder()).complete
    assert contents(out) == contents(finished)


@pytest.mark.parametrize("lost", [False, True])
def test_target_files_that_are_written_otherwise_now(finished, folder, target, data, monkeypatch, lost):
    """As by another version of a library: what the manifest vouches for stays, and is replaced by nothing else."""
    out = folder / f"otherwise-{lost}"
    options = capture_options(target, data, out, layers=(0, 2))
    with monkeypatch.context() as patch:
        patch.setattr(CacheWriter, "commit_shard", stop_at_once)
        with pytest.raises(StoppedError):
            capture(options, Recorder())
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "head_file", lambda *given, real=run_module.head_file: real(*given) + b" ")
        if lost:
            (out / "target/head.safetensors").unlink()
            with pytest.raises(
                CacheError, match=r"head\.safetensors is missing or damaged, and this target's has CRC-32C"
            ):
                capture(options, Recorder())
        else:
            capture(options, Recorder())
    assert capture(options, Recorder()).complete
    assert contents(out) == contents(finished)


def test_overwrite(finished, folder, target, data):
    out = folder / "overwritten"
    shutil.copytree(finished, out)
    manifest = capture(capture_options(target, data, out, layers=(1,), overwrite=True), Recorder())
    assert manifest.identity.layers == (1,)
    say = Recorder()
    assert capture(capture_options(target, data, out, layers=(1,), overwrite=True), say) == manifest
    assert any("nothing to do" in note for note in say.notes), "overwriting replaces what differs, not what is the same"
    assert not (out / "hidden" / "0").exists()
    assert sorted(path.name for path in folder.glob("overwritten*")) == ["overwritten"]


def test_dry_run_plans_and_writes_nothing(finished, folder, target, data, monkeypatch):
    monkeypatch.setattr(run_module, "load_target", lambda *_: pytest.fail("the weights are not needed"))
    out = folder / "dry"
    numbers = dry_run(capture_options(target, data, out, layers=(0, 2)), Recorder())
    assert not out.exists()
    totals = open_cache(str(finished)).manifest.totals
    assert numbers.manifest.totals == totals
    assert numbers.manifest.identity == open_cache(str(finished)).manifest.identity
    # ids, mask, two layers of 32 floats, 8 ids and 8 half floats, the rest.
    assert bytes_per_token(numbers.manifest.identity)[0] == 4 + 1 + 2 * 32 * 4 + 8 * 4 + 8 * 2 + 4
    assert numbers.free_bytes > 0


def test_defaults_are_said(folder, target):
    say = Recorder()
    numbers = dry_run(CaptureOptions(target=target, out=str(folder / "none"), limit=30, max_length=256), say)
    assert any("no --data given" in note for note in say.notes)
    assert any("no --layers given: taking 1 of 4" in note for note in say.notes)
    assert any("mask token: 3 (tokenizer)" in note for note in say.notes)
    assert any("capture/data/conversations.jsonl: 30 of 30 rows kept" in note for note in say.notes)
    assert (numbers.manifest.totals.samples, numbers.manifest.identity.shard_tokens) == (30, 65_536)


def test_counts_are_reported(folder, target):
    rows = [talk("a", "b c d"), talk("a", "b c d"), talk("x", "word " * 300), talk("no answer"), "no row"]
    path = write_jsonl(folder / "mixed.jsonl", rows)
    say = Recorder()
    numbers = dry_run(
        capture_options(target, path, folder / "none", skip_bad_rows=True, layers=(1,), val_fraction=1e-9), say
    )
    assert numbers.manifest.sources[0].skipped == {"duplicate": 1, "no assistant turn": 1, "bad line": 1}
    assert (numbers.manifest.totals.samples, numbers.truncated) == (2, 1)
    assert any("2 of 5 rows kept" in note for note in say.notes)
    assert any("1 samples cut at 256 tokens" in note for note in say.notes)
    assert any("held-out" in warning for warning in say.warnings)


def test_a_target_that_forgets_its_mask_token_resumes(folder, data, monkeypatch):
    """An "unused special" mask token follows from the data, which a rerun does not read again."""
    target = Path(random_target(folder / "maskless"))
    copy_tokenizer(target)
    config = json.loads((target / "tokenizer_config.json").read_text())
    del config["mask_token"]
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    options = capture_options(str(target), data, folder / "maskless-cache", layers=(1,))
    manifest = capture(options, Recorder())
    assert (manifest.identity.mask_token_id, manifest.mask_token_source) == (3, "unused special")
    monkeypatch.setattr(planning_module, "collect", lambda *_: pytest.fail("no tokenising again"))
    assert capture(options, Recorder()) == manifest


def test_another_capture_that_comes_first_is_left_as_it_is(finished, folder, target, data, monkeypatch):
    out, load = folder / "raced", run_module.load_target

    def slow_load(*arguments):
        shutil.copytree(finished, out)
        monkeypatch.setattr(run_module, "load_target", lambda *_: pytest.fail("all is done"))
        return load(*arguments)

    monkeypatch.setattr(run_module, "load_target", slow_load)
    monkeypatch.setattr(CacheWriter, "create", lambda *_: pytest.fail("it is finished"))
    say = Recorder()
    assert capture(capture_options(target, data, out, layers=(0, 2)), say).complete
    assert any("another capture came first" in note for note in say.notes)
    assert contents(out) == contents(finished)


def test_progress_adds_up(finished, folder, target, data):
    say = Recorder()
    manifest = capture(capture_options(target, data, folder / "progress", layers=(0,)), say)
    steps = [step for step in say.steps if step[0] == "capture"]
    assert steps[-1] == ("capture", manifest.totals.tokens, manifest.totals.tokens)
    assert np.all(np.diff([done for _, done, _ in steps]) >= 0)


def test_channels_are_chosen_once_and_a_resumed_capture_keeps_them(folder, target, data, monkeypatch):
    """Killed behind the layout: what goes on reads the channels there, even if it would choose others."""
    options = capture_options(target, data, folder / "chosen", layers=(0, 2), codec="int8")
    whole = options.model_copy(update={"out": str(folder / "chosen-whole")})
    capture(whole, Recorder())
    with monkeypatch.context() as killed:
        killed.setattr("capture.run.run_shards", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            capture(options, Recorder())
    monkeypatch.setattr("capture.calibrate.widest_channels", lambda _: pytest.fail("calibrated again"))
    assert capture(options, Recorder()).complete
    assert contents(folder / "chosen") == contents(folder / "chosen-whole")
