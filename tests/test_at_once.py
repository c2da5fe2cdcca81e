"""Two captures of the same folder at once: one of them is refused or goes on with the other's work, and nothing is mixed."""

import shutil
import subprocess
import sys

import pytest
from capture_fixtures import ROOT, Recorder, capture_options, contents, random_target, shipped_rows, write_jsonl

from cache.write import CacheWriter, existing_manifest
from capture.run import capture
from schemas.errors import CacheError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("at-once")


@pytest.fixture(scope="module")
def target(folder):
    return random_target(folder / "tiny")


@pytest.fixture(scope="module")
def data(folder):
    return write_jsonl(folder / "rows.jsonl", shipped_rows(16))


@pytest.fixture(scope="module")
def finished(folder, target, data):
    capture(capture_options(target, data, folder / "finished", layers=(0, 2)), Recorder())
    return folder / "finished"


def test_two_captures_at_once_never_mix(finished, folder, target, data):
    """Both have planned; one begins, and the other one, of other layers, is as far a moment later."""
    out, create = folder / "at-once", CacheWriter.create

    def second(path, manifest, *arguments, **how):
        create(path, manifest, *arguments, **how)
        begun = contents(out)
        with pytest.raises(CacheError, match="another capture came first"):
            create(path, manifest.model_copy(update={"complete": True}), *arguments, **how)
        assert contents(out) == begun
        return CacheWriter.resume(path)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CacheWriter, "create", second)
        capture(capture_options(target, data, out, layers=(0, 2)), Recorder())
    assert contents(out) == contents(finished)


def test_the_slower_of_two_equal_captures_ends_well(folder, target, data, monkeypatch):
    """Its last shard is in when the other one has finished; a shard of other settings in between is not passed over."""
    out, finish = folder / "slower", CacheWriter.finish

    def slower(writer):
        assert finish(writer) == finish(writer)
        return finish(writer)

    monkeypatch.setattr(CacheWriter, "finish", slower)
    assert capture(capture_options(target, data, out, layers=(0,)), Recorder()).complete

    def disturbed(writer):
        (out / "shards/000000.json").unlink()
        return finish(writer)

    shutil.rmtree(out)
    monkeypatch.setattr(CacheWriter, "finish", disturbed)
    with pytest.raises(CacheError, match="shard 0 was changed by another process"):
        capture(capture_options(target, data, out, layers=(0,)), Recorder())
    assert not existing_manifest(str(out)).complete


def test_leftovers_of_a_capture_that_another_one_finished_are_removed(finished, folder, target, data):
    out = folder / "leftover"
    shutil.copytree(finished, out)
    script = "import sys; from cache.store import LocalStore; from pathlib import Path\nLocalStore(Path(sys.argv[1])).put('x', [])"
    subprocess.run([sys.executable, "-c", script, str(out)], check=True, cwd=ROOT)
    (out / "x").unlink()
    assert list(out.glob(".tmp-*"))
    assert capture(capture_options(target, data, out, layers=(0, 2)), Recorder()).complete
    assert not list(out.glob(".tmp-*"))
