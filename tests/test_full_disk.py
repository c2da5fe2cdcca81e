"""A disk that fills up: a clear error, nothing torn, nothing left over, and a rerun that ends with the same bytes."""

import errno
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from cache_fixtures import identity
from capture_fixtures import Recorder, capture_options, contents, random_target, shipped_rows, write_jsonl

from cache.disk import SMALL_FILES_BYTES, check_free, needed_bytes
from cache.read import open_cache
from cache.store import LocalStore
from capture import run as run_module
from capture.run import capture
from schemas.arrays import bytes_per_token
from schemas.errors import DflashError, OptionError

FULL = r"cannot write .*: No space left on device: free some space or mend it, then run the same command again"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("full")
    random_target(folder / "tiny")
    write_jsonl(folder / "rows.jsonl", shipped_rows(16))
    capture(options(folder, folder / "whole"), Recorder())
    return folder


def options(folder: Path, out: Path):
    return capture_options(str(folder / "tiny"), str(folder / "rows.jsonl"), out, layers=(0, 2))


def check_nothing_torn(out: Path, whole: dict[str, bytes]) -> None:
    """Whatever has a name is whole: it is what the uninterrupted capture has, or its manifest or plan before the end."""
    for name, data in contents(out).items():
        assert ".tmp-" not in name
        if name == "zarr.json":
            assert b'"complete": false' in data
        elif name != "plan.parquet":
            assert data == whole[name], name


class Disk:
    """Files of `cache.whole` on a disk with `left` bytes; the write that exceeds it is cut, as the kernel does it, then refused."""

    def __init__(self, left: int) -> None:
        self.left = left

    def writev(self, file: int, pieces: list[memoryview]) -> int:
        if not self.left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = os.write(file, b"".join(pieces)[: self.left])
        self.left -= taken
        return taken


def test_a_disk_that_fills_up_at_any_byte(folder, tmp_path, monkeypatch):
    whole, out = contents(folder / "whole"), tmp_path / "out"
    total, draw = sum(map(len, whole.values())), np.random.default_rng(5)
    # Each run has a little more room than the last one, at random; the first has none at all.
    for left in [0, *draw.integers(1, total * 7 // 10, 6).tolist()]:
        disk = Disk(int(left))
        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", disk.writev)
            with pytest.raises(DflashError, match=FULL) as caught:
                capture(options(folder, out), Recorder())
        assert (caught.value.exit_code, disk.left) == (1, 0)
        assert "\n" not in str(caught.value)
        check_nothing_torn(out, whole)
    assert any(out.glob("shards/*"))
    capture(options(folder, out), Recorder())
    assert contents(out) == whole


@pytest.mark.parametrize("call", ["rename", "fsync"])
@pytest.mark.parametrize("number", [0, 9, 26])
def test_a_disk_that_has_no_room_for_a_name(folder, tmp_path, monkeypatch, call, number):
    out, act, done = tmp_path / "out", getattr(os, call), []

    def refuse(*arguments):
        if len(done) == number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done.append(arguments)
        return act(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(DflashError, match=FULL):
            capture(options(folder, out), Recorder())
    check_nothing_torn(out, contents(folder / "whole"))
    capture(options(folder, out), Recorder())
    assert contents(out) == contents(folder / "whole")


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a memory disk, where this is permitted."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(size: int, *more: str) -> Path:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", ",".join([*more, f"size={size}"]), "tmpfs", str(place)],
            capture_output=True,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"mounting is not permitted here: {done.stderr.decode().strip()}")
        return place

    if shutil.which("mount") is None:
        pytest.skip("no mount here")
    yield mount
    subprocess.run(["umount", str(place)], capture_output=True, check=False)


def test_a_real_disk_that_fills_up(folder, small_disk, monkeypatch):
    whole = contents(folder / "whole")
    total = sum(map(len, whole.values()))
    out = small_disk(total * 2 // 3) / "hs.zarr"
    with pytest.raises(OptionError, match=r"needs 0\.\d+ GB \(of which 0\.\d+ GB margin.*are free"):
        capture(options(folder, out), Recorder())
    assert not out.exists()
    # Something else fills it after the look.
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "free_bytes", lambda _: 1 << 40)
        with pytest.raises(DflashError, match=FULL):
            capture(options(folder, out), Recorder())
        check_nothing_torn(out, whole)
        before = set(contents(out))
        assert any(name.startswith("shards/") for name in before)
        with pytest.raises(DflashError, match="incomplete"):
            open_cache(str(out))
        small_disk(total * 4, "remount")
        capture(options(folder, out), Recorder())
    assert contents(out) == whole


def test_the_margin_covers_what_a_capture_writes_beside_the_rows(folder):
    """All that a finished cache takes, and its plan, fits into what was asked for; so it does with a head of its own."""
    whole = contents(folder / "whole")
    manifest = open_cache(str(folder / "whole")).manifest
    needed, margin = needed_bytes(manifest.identity, manifest.totals.shards, len(whole["index.parquet"]))
    rows = manifest.totals.shards * manifest.identity.shard_tokens
    assert needed == rows * bytes_per_token(manifest.identity)[0] + margin
    objects = sum(len(data) for name, data in whole.items() if "/c/" in name)
    assert rows * bytes_per_token(manifest.identity)[0] < objects
    assert sum(map(len, whole.values())) < needed
    assert margin - SMALL_FILES_BYTES > len(whole["target/head.safetensors"])
    untied = manifest.identity.model_copy(
        update={"target": manifest.identity.target.model_copy(update={"tied": False})}
    )
    head = manifest.identity.target.vocab_size * manifest.identity.target.hidden_size * 4
    assert needed_bytes(untied, 1, 0)[1] - needed_bytes(manifest.identity, 1, 0)[1] == 2 * head


def test_room_is_looked_for_before_the_target_is_loaded(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "load_target", lambda *_: pytest.fail("the weights are not needed"))
    monkeypatch.setattr(LocalStore, "free_bytes", lambda _: 33_000_000)
    with pytest.raises(
        OptionError, match=r"out needs 0\.04 GB \(of which 0\.03 GB margin .*0\.03 GB are free: free some"
    ):
        capture(options(folder, tmp_path / "out"), Recorder())
    assert not (tmp_path / "out").exists()
    # Also where a capture is gone on with.
    shutil.copytree(folder / "whole", tmp_path / "out")
    (tmp_path / "out" / "hidden/0/c/0/0").unlink()
    with pytest.raises(OptionError, match="are free"):
        capture(options(folder, tmp_path / "out"), Recorder())


def test_a_store_without_bounds_has_room_for_anything():
    class Place:
        def __init__(self, free: int | None) -> None:
            self.free = free

        def free_bytes(self) -> int | None:
            return self.free

        def where(self) -> str:
            return "s3://bucket"

    needed, margin = needed_bytes(identity(), 1 << 30, 0)
    with pytest.raises(OptionError, match="s3://bucket needs"):
        check_free(Place(needed - 1), needed, margin)
    assert all(check_free(Place(free), needed, margin) is None for free in (needed, None))
