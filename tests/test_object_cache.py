"""A cache in an object store: the same bytes, guarantees and words as on a disk, captured, mended, grown and merged."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pyarrow as pa
import pytest
import zarr
from cache_fixtures import make_cache
from capture_fixtures import ROOT, Recorder, capture_options, random_target, shipped_rows, write_jsonl
from s3_server import BUCKET, folder_contents

import cache.objects
from cache.merge import merge
from cache.partial import open_partial
from cache.read import Cache, open_cache
from cache.verify import verify
from cache.write import CacheWriter
from capture import run as run_module
from capture import shards as shards_module
from capture.run import capture, dry_run
from pipeline.cli import main
from schemas.arrays import array_specs
from schemas.errors import CacheDamaged, CacheError, DflashError
from schemas.index import PLAN_SCHEMA
from schemas.options import CaptureOptions
from schemas.say import Silent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("object-cache")


@pytest.fixture(scope="module")
def target(folder: Path) -> str:
    return random_target(folder / "tiny")


@pytest.fixture(scope="module")
def data(folder: Path) -> str:
    return write_jsonl(folder / "rows.jsonl", shipped_rows(16))


@pytest.fixture(scope="module")
def local(folder: Path, target: str, data: str) -> dict[str, bytes]:
    """Every object of the same capture on a disk."""
    capture(capture_options(target, data, folder / "local", layers=(0, 2)), Recorder())
    return folder_contents(folder / "local")


def asked(target: str, data: str, url: str, **options: Any) -> CaptureOptions:
    """The options of that capture, into an object store."""
    return capture_options(target, data, Path("unused"), **{"layers": (0, 2), **options}).model_copy(
        update={"out": url}
    )


def test_a_capture_holds_what_a_local_one_holds(s3, folder, target, data, local, monkeypatch, capsys):
    options = asked(target, data, f"s3://{BUCKET}/whole/hs.zarr")
    assert dry_run(options, Recorder()).free_bytes is None
    assert s3.contents("whole") == {}
    manifest = capture(options, Recorder())
    assert s3.contents("whole/hs.zarr") == local
    assert s3.contents("whole").keys() == {f"hs.zarr/{key}" for key in local}
    assert verify(options.out, True, Silent()) == (manifest, [])
    monkeypatch.setattr(run_module, "load_target", lambda *_: pytest.fail("the weights are not needed"))
    say = Recorder()
    assert capture(options, say) == manifest
    assert "nothing to do" in say.notes[-1]
    with pytest.raises(CacheError, match=r"layers \(0, 2\).*asks for \(0, 1\)"):
        capture(asked(target, data, options.out, layers=(0, 1)), Recorder())
    with pytest.raises(SystemExit):
        main(["inspect", options.out])
    out = capsys.readouterr().out
    assert f"({sum(map(len, local.values())):,} bytes)" in out
    assert "⟦" in out, "the tokenizer is fetched to show a sample"


def test_plain_zarr_reads_every_array(s3, folder):
    writer = make_cache(f"s3://{BUCKET}/zarr/hs.zarr")  # type: ignore[arg-type]
    make_cache(folder / "zarr")
    group = zarr.open_group(zarr.storage.ObjectStore(s3.store("zarr/hs.zarr"), read_only=True), mode="r")
    plain, cached = zarr.open_group(str(folder / "zarr"), mode="r"), open_cache(writer.store.where())
    for name in cached.arrays:
        np.testing.assert_array_equal(group[name][:], plain[name][:])
        np.testing.assert_array_equal(cached.rows(name, 50, 90), plain[name][50:140])


KILLED = """
import os, signal, sys
sys.path[:0] = [{root!r}, {tests!r}]
from pathlib import Path
from capture_fixtures import Recorder, capture_options
from capture.run import capture
from cache.objects import ObjectStore
put = ObjectStore.put
for limit in map(int, sys.argv[1:]):
    child = os.fork()  # spares each run its imports; no thread has been started yet
    if not child:
        puts = []
        def counted(self, key, parts):
            if len(puts) == limit:
                os.kill(os.getpid(), signal.SIGKILL)
            puts.append(key)
            return put(self, key, parts)
        ObjectStore.put = counted
        options = capture_options({target!r}, {data!r}, Path("unused"), layers=(0, 2))
        capture(options.model_copy(update={{"out": {out!r}}}), Recorder())
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, limit
"""


def test_kill_dash_nine_at_any_object(s3, target, data, local):
    url = f"s3://{BUCKET}/killed/hs.zarr"
    script = KILLED.format(root=str(ROOT), tests=str(ROOT / "tests"), target=target, data=data, out=url)
    environment = {**os.environ, **s3.environment, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", script, "0", "8", "14", "20"], env=environment, check=True)
    with pytest.raises(CacheError, match=r"incomplete \([1-9] of"):
        open_cache(url)
    say, before = Recorder(), s3.contents("killed/hs.zarr")
    capture(asked(target, data, url), say)
    assert any("going on" in note for note in say.notes)
    assert s3.contents("killed/hs.zarr") == local
    committed = [key for key in before if key.startswith("shards/")]
    assert committed and all(before[key] == local[key] for key in committed)


@pytest.mark.parametrize(
    ("key", "harm", "deep"),
    [
        ("hidden/2/c/1/0", lambda _: None, False),
        ("hidden/2/c/1/0", lambda data: data[:-1], False),
        ("hidden/2/c/1/0", lambda data: data[:9] + bytes([data[9] ^ 1]) + data[10:], True),
        ("hidden/2/c/1/0", lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], True),
        ("shards/000001.json", lambda _: b"{", False),
        ("shards/000001.json", lambda _: None, False),
    ],
)
def test_damage_is_found_named_repaired_and_done_again(
    s3, folder, target, data, local, key, harm, deep, capsys, monkeypatch
):
    url = s3.upload(folder / "local", "damaged/hs.zarr")
    store, harmed = s3.store("damaged/hs.zarr"), harm(local[key])
    obstore.delete(store, key) if harmed is None else obstore.put(store, key, harmed)
    if deep:
        assert verify(url, False, Silent())[1] == []
        with pytest.raises(CacheDamaged, match=f"{url}: hidden/2, shard 1: .* does not match its checksum"):
            open_cache(url).hidden(1024, 1024, [2])
    else:
        with pytest.raises((CacheDamaged, CacheError)):
            open_cache(url)
    assert {(fault.where, fault.shard) for fault in verify(url, deep, Silent())[1]} == {(key, 1)}
    with pytest.raises(SystemExit) as caught:
        main(["verify", url, "--repair", *(["--deep"] if deep else [])])
    assert caught.value.code == 1
    assert "1 shards forgotten" in capsys.readouterr().out
    run, ran = shards_module.run_shard, []
    monkeypatch.setattr(shards_module, "run_shard", lambda *given: (ran.append(given), run(*given))[1])
    capture(asked(target, data, url), Recorder())
    assert len(ran) == 1, "only the damaged shard is done again"
    assert s3.contents("damaged/hs.zarr") == local


def test_the_same_command_mends_a_damaged_cache(s3, folder, target, data, local):
    url = s3.upload(folder / "local", "mended/hs.zarr")
    for key in ("logits/topk_ids/c/0/0", "index.parquet", "target/head.safetensors", "hidden/2/zarr.json"):
        obstore.delete(s3.store("mended/hs.zarr"), key)
        say = Recorder()
        capture(asked(target, data, url), say)
        assert any("is damaged" in warning for warning in say.warnings)
        assert s3.contents("mended/hs.zarr") == local


def test_overwriting_removes_all_that_was_there(s3, folder, target, data, local, monkeypatch):
    url = s3.upload(folder / "local", "overwritten/hs.zarr")
    options = asked(target, data, url, layers=(1,), overwrite=True)
    with monkeypatch.context() as patch:
        sizes = cache.objects.ObjectStore.sizes

        def interrupted(self, prefix=""):
            if not prefix:  # all that is there, to be removed
                raise KeyboardInterrupt
            return sizes(self, prefix)

        patch.setattr(cache.objects.ObjectStore, "sizes", interrupted)
        with pytest.raises(KeyboardInterrupt):
            capture(options, Recorder())
    with pytest.raises(CacheError, match="no hidden-state cache"):
        open_cache(url)
    assert capture(options, Recorder()).identity.layers == (1,)
    capture(capture_options(target, data, folder / "other", layers=(1,)), Recorder())
    assert s3.contents("overwritten/hs.zarr") == folder_contents(folder / "other")


def test_a_cache_grows_in_an_object_store_as_on_a_disk(s3, folder, target, tmp_path):
    """Append, merge and train on what is committed: the same objects as on a disk."""
    rows = shipped_rows(26)
    parts = [
        write_jsonl(tmp_path / f"{name}.jsonl", part) for name, part in (("a", rows[:12]), ("b", [rows[3], *rows[12:]]))
    ]
    away, here = f"s3://{BUCKET}/grown", str(tmp_path / "grown")
    for out in (away, here):
        capture(asked(target, parts[0], out), Recorder())
        capture(asked(target, parts[1], out, append=True), Recorder())
    assert s3.contents("grown") == folder_contents(Path(here))
    say = Recorder()
    capture(asked(target, parts[1], away, append=True), say)
    assert "nothing to do" in say.notes[-1]
    assert verify(away, True, Silent())[1] == []
    other = str(tmp_path / "other")
    capture(asked(target, parts[1], other), Recorder())
    merge([away, other], f"s3://{BUCKET}/merged", Silent())
    merge([here, other], str(tmp_path / "merged"), Silent())
    assert s3.contents("merged") == folder_contents(tmp_path / "merged")
    held = open_cache(here)
    writer = CacheWriter.create(
        f"s3://{BUCKET}/growing", held.manifest.model_copy(update={"complete": False}), plan_of(held)
    )
    for key in ("target/head.safetensors", "target/config.json"):
        writer.put_file(key, (Path(here) / key).read_bytes())
    writer.commit_shard(
        1,
        {spec.name: held.rows(spec.name, 1024, 1024) for spec in array_specs(held.manifest.identity, 1)},
    )
    found = open_partial(f"s3://{BUCKET}/growing")
    assert found.shards == (1,)
    row = found.cache.index.to_pylist()[0]
    assert found.cache.hidden(row["offset"], row["length"], [0]).equal(held.hidden(row["offset"], row["length"], [0]))


def test_a_full_temporary_folder_is_not_taken_for_a_damaged_cache(s3, folder, local, monkeypatch, capsys):
    """Head and tokenizer are fetched into files."""

    def full(*_: object) -> Any:
        return Path("/dev/full").open("wb")

    url = s3.upload(folder / "local", "full/hs.zarr")
    cached = open_cache(url)
    advice = f"cannot keep files of {url} in .*: free some space there, or let TMPDIR name another folder"
    with monkeypatch.context() as patch:
        patch.setattr(cache.objects, "open", full, raising=False)
        with pytest.raises(DflashError, match=advice.replace(".*", ".*No space left on device")) as caught:
            cached.head()
        assert not isinstance(caught.value, CacheDamaged)
        with pytest.raises(SystemExit):
            main(["inspect", url])
        assert re.search(advice, capsys.readouterr().err)
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder / "nowhere"))
        with pytest.raises(DflashError, match=advice.replace(".*", ".*nowhere: No such file or directory")):
            cached.head()
    assert cached.head().embed_VH.shape[0]


def plan_of(held: Cache) -> pa.Table:
    """A plan that would make this cache."""
    rows = held.index.to_pylist()
    for row in rows:
        ids, mask = held.tokens(row["offset"], row["length"])
        row.update(input_ids=ids.tolist(), loss_mask=mask.int().tolist(), batch=0)
    return pa.Table.from_pylist(rows, schema=PLAN_SCHEMA)
