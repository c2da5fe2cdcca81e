"""Objects appear whole or not at all, with the checksum of what was written."""

import os
import subprocess
import sys
from pathlib import Path

import google_crc32c
import pytest

from cache.store import LocalStore
from cache.whole import write_whole
from schemas.errors import DflashError


def test_put_returns_size_and_checksum(tmp_path):
    store = LocalStore(tmp_path / "new" / "cache")
    record = store.put("hidden/1/c/0/0", [b"abc", memoryview(b"defg")])
    assert store.get("hidden/1/c/0/0") == b"abcdefg"
    assert record.bytes == 7 == store.size("hidden/1/c/0/0")
    assert record.crc32c == f"{google_crc32c.value(b'abcdefg'):08x}"
    assert store.get("nothing") is None
    assert store.size("nothing/at/all") is None


def test_a_folder_that_cannot_be_made_is_a_fault_in_one_line(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DflashError, match="cannot write"):
        LocalStore(tmp_path / "file" / "hs.zarr").put("a/b", [b"x"])
    assert (tmp_path / "file").read_text() == "mine"


def test_a_fault_while_writing_leaves_the_old_object(tmp_path):
    path = tmp_path / "object"
    write_whole(path, [b"old"])

    def parts():
        yield b"new, but"
        raise OSError(28, "No space left on device")

    with pytest.raises(DflashError, match="No space left"):
        write_whole(path, parts())
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["object"]


def test_an_object_that_must_be_new_is_never_replaced(tmp_path, monkeypatch):
    store = LocalStore(tmp_path)
    assert store.put_new("plan", [b"first"])
    assert not store.put_new("plan", [b"second"])
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(1, "no hard links here")))
    assert not store.put_new("plan", [b"third"])
    assert store.put_new("other", [b"first"])
    assert (store.get("plan"), store.get("other")) == (b"first", b"first")
    assert not list(tmp_path.glob(".tmp-*/*"))


def filled(folder):
    for key in ("zarr.json", "hidden/1/c/0/0", "shards/000000.json"):
        LocalStore(folder).put(key, [b"old"])
    return LocalStore(folder)


def test_what_is_removed_may_be_a_link_or_where_the_user_stands(tmp_path, monkeypatch):
    filled(tmp_path / "real")
    (tmp_path / "link.zarr").symlink_to("real")
    (tmp_path / "link.zarr.removed").mkdir()
    store = LocalStore(tmp_path / "link.zarr")
    store.remove()
    assert store.vacant()
    assert (tmp_path / "link.zarr").is_symlink()
    assert (tmp_path / "link.zarr.removed").is_dir(), "a neighbour's name is not ours"
    store.put("zarr.json", [b"new"])
    assert (tmp_path / "real/zarr.json").read_bytes() == b"new"
    monkeypatch.chdir(tmp_path / "real")
    LocalStore(Path(".")).remove()
    assert LocalStore(Path(".")).vacant()


def test_a_removal_that_stops_anywhere_can_be_gone_on_with(tmp_path, monkeypatch):
    rename = Path.rename
    for stop in range(4):
        store, moves = filled(tmp_path / str(stop)), []

        def moved(path, target, moves=moves, stop=stop):
            if len(moves) == stop:
                raise InterruptedError
            moves.append(path)
            return rename(path, target)

        def freed(path, **_):
            if path.name == "removed":
                raise InterruptedError

        with monkeypatch.context() as patched:
            patched.setattr(Path, "rename", moved)
            patched.setattr("shutil.rmtree", freed)
            with pytest.raises(InterruptedError):
                store.remove()
        assert len(moves) == stop
        # A cache, or nothing: never "something else", which would have to be cleaned up by hand.
        assert store.vacant() == (stop == 3)
        store.remove()
        assert store.vacant()
        assert store.sizes() == {}


def test_only_dead_workers_leftovers_are_removed(tmp_path):
    store = LocalStore(tmp_path)
    script = "import sys; from cache.store import LocalStore; from pathlib import Path\nLocalStore(Path(sys.argv[1])).put('x', [b'1'])"
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    dead = next(tmp_path.glob(".tmp-*"))
    (dead / "unfinished").write_bytes(b"half")
    sleeper = subprocess.Popen(
        [sys.executable, "-c", f"{script}\nprint(flush=True); sys.stdin.read()", str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        sleeper.stdout.readline()
        (living,) = set(tmp_path.glob(".tmp-*")) - {dead}
        host, space, start, pid = living.name.rsplit("-", 3)
        kept = {
            living.name,
            # Of another host or pid namespace nothing can be known: not even of a host whose name goes on with a dash.
            f"{host}-2-{space}-{start}-999999999",
            f"{host}x-{space}-{start}-999999999",
            f"{host}-{int(space) + 1}-{start}-999999999",
            ".tmp-something-else",
            f"{host}-{os.getppid()}",
        }
        removed = {
            dead.name,
            f"{host}-999999999",
            # The process id is in use again, by a process that began later.
            f"{host}-{space}-{int(start) - 1}-{pid}",
            # A restarted container counts from the same ids: what bears ours is not in use, since we only begin.
            f"{host}-{space}-1-{os.getpid()}",
        }
        for name in kept | removed:
            (tmp_path / name).mkdir(exist_ok=True)
        store.clean_workspaces()
        assert {path.name for path in tmp_path.glob(".tmp-*")} == kept
    finally:
        sleeper.communicate(b"")
    store.clean_workspaces()
    assert {path.name for path in tmp_path.glob(".tmp-*")} == kept - {living.name}
