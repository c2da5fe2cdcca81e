"""Appending at the level of the cache: old objects stay as they are, and every reader sees the old cache or the new one."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from cache_fixtures import make_cache, manifest, plan, shard_arrays
from capture_fixtures import contents
from kills import killed_before_object

from cache.append import begin_append, grown, moved, pending_append, resume_append
from cache.generations import Generation, generations_of
from cache.layout import read_root, write_arrays
from cache.read import open_cache
from cache.store import LocalStore
from cache.verify import forget, verify
from cache.write import CacheWriter
from schemas.errors import CacheError
from schemas.manifest import Manifest
from schemas.say import Silent

SHARD, OLD, NEW = 64, 2, 2


def stamps(path: Path) -> dict[str, int]:
    return {str(file.relative_to(path)): file.stat().st_mtime_ns for file in path.rglob("*") if file.is_file()}


def append(path: Path, seed: int = 9) -> Manifest:
    """`NEW` shards of random samples behind what the cache holds; goes on with an append that was killed."""
    held = read_root(LocalStore(path))
    writer = resume_append(str(path)) if pending_append(str(path)) else None
    if writer is None:
        table = plan(NEW, SHARD, seed=seed)
        part = manifest(table, held.identity)
        source = part.sources[0].model_copy(update={"path": f"more{seed}.jsonl", "sha256": f"{seed:064d}"})
        table = moved(table, held.totals.shards, len(held.sources), SHARD)
        writer = begin_append(str(path), grown(held, (source,), part.totals), table)
    for shard in writer.missing_shards():
        writer.commit_shard(shard, shard_arrays(writer, shard))
    return writer.finish()


@pytest.fixture(scope="module")
def old(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("old") / "hs.zarr"
    make_cache(path, shards=OLD, layers=(0, 2))
    return path


@pytest.fixture(scope="module")
def new(old, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("new") / "hs.zarr"
    shutil.copytree(old, path)
    append(path)
    return path


def test_an_appended_cache_holds_both(old, new):
    before, after = open_cache(str(old)), open_cache(str(new))
    assert after.manifest.totals.shards == OLD + NEW
    assert after.manifest.totals.samples == len(after.index) == len(before.index) + 4 * NEW
    assert after.index.slice(0, len(before.index)) == before.index
    assert [source.path for source in after.manifest.sources] == ["rows.jsonl", "more9.jsonl"]
    assert generations_of(after.manifest) == [Generation(0, 1), Generation(OLD, 1)]
    assert after.index["offset"].to_pylist() == sorted(after.index["offset"].to_pylist())
    assert set(after.index["source"].to_pylist()[-4 * NEW :]) == {1}
    assert verify(str(new), True, Silent())[1] == []
    assert not (new / "plan.parquet").exists()
    group = zarr.open_group(str(new), mode="r")
    for row in after.index.to_pylist():
        rows = slice(row["offset"], row["offset"] + row["length"])
        assert np.array_equal(group["hidden/2"][rows], after.hidden(row["offset"], row["length"], [2])[:, 0])
        assert np.array_equal(group["tokens/input_ids"][rows], after.tokens(row["offset"], row["length"])[0])


def test_the_old_objects_are_not_touched(old, tmp_path):
    path = tmp_path / "hs.zarr"
    shutil.copytree(old, path)
    before, times = contents(path), stamps(path)
    append(path)
    after, now = contents(path), stamps(path)
    changed = {name for name in before if after[name] != before[name] or now[name] != times[name]}
    assert changed == {"zarr.json", "index.parquet"} | {
        name for name in before if name.endswith("/zarr.json") and name.count("/") == 2
    }


def test_the_arrays_documents_are_those_of_a_cache_of_that_size(new, tmp_path):
    """Only their shape was changed, so this also says that nothing else of them depends on the size."""
    write_arrays(LocalStore(tmp_path), read_root(LocalStore(new)))
    made = contents(tmp_path)
    assert made
    assert {name: data for name, data in contents(new).items() if name in made} == made


def read_all(path: Path) -> list[list[float]]:
    """Every sample of the index as any reader gets it: the cache's own, and plain Zarr with the rows of the manifest."""
    cache = open_cache(str(path))
    group = zarr.open_group(str(path), mode="r")
    samples = json.loads((path / "zarr.json").read_text())["attributes"]["dflash"]["totals"]["samples"]
    plain = pq.read_table(path / "index.parquet").slice(0, samples)
    assert plain.to_pylist() == cache.index.to_pylist()
    states = []
    for row in plain.to_pylist():
        hidden = cache.hidden(row["offset"], row["length"], [0])[:, 0]
        assert np.array_equal(group["hidden/0"][row["offset"] : row["offset"] + row["length"]], hidden)
        assert hidden.abs().sum(dim=1).min() > 0
        states.append(hidden.sum(dim=1).tolist())
    return states


def test_killed_before_any_object_the_cache_is_the_old_one_or_the_new_one(old, new, tmp_path):
    wanted, states = contents(new), {"old": read_all(old), "new": read_all(new)}
    old_objects = {
        name: data for name, data in contents(old).items() if "/c/" in name or name.startswith(("shards/", "target/"))
    }
    seen, number = [], 0
    while True:
        path = tmp_path / str(number)
        shutil.copytree(old, path)
        killed = killed_before_object(number, lambda path=path: append(path))
        found = read_all(path)
        seen.append("old" if found == states["old"] else "new")
        assert found == states[seen[-1]]
        assert verify(str(path), True, Silent())[1] == []
        now = contents(path)
        assert {name: now[name] for name in old_objects} == old_objects
        append(path) if pending_append(str(path)) or seen[-1] == "old" else None
        assert contents(path) == wanted
        if not killed:
            break
        shutil.rmtree(path)
        number += 1
    # One object after the other, and the last of them made it the new cache.
    assert number == 1 + 7 + NEW * 8 + 2
    assert seen == ["old"] * number + ["new"]


def test_killed_again_and_again_it_still_ends_the_same(old, new, tmp_path):
    path = tmp_path / "hs.zarr"
    shutil.copytree(old, path)
    for number in (3, 0, 7, 12, 1, 4):
        assert killed_before_object(number, lambda: append(path))
        assert read_all(path) == read_all(old)
    append(path)
    assert contents(path) == contents(new)


def test_a_kill_after_the_last_object_leaves_a_plan_that_the_next_one_removes(new, tmp_path, monkeypatch):
    path = tmp_path / "hs.zarr"
    shutil.copytree(new, path)
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "delete", lambda *_: None)
        append(path, seed=5)
    assert (path / "plan.parquet").exists()
    held = open_cache(str(path)).manifest
    assert pending_append(str(path)) is None
    assert not (path / "plan.parquet").exists()
    assert read_root(LocalStore(path)) == held
    assert append(path, seed=6).totals.shards == OLD + 3 * NEW
    assert generations_of(read_root(LocalStore(path))) == [Generation(first, 1) for first in (0, 2, 4, 6)]
    assert verify(str(path), True, Silent())[1] == []


def begun(path: Path, seed: int) -> CacheWriter:
    held = read_root(LocalStore(path))
    table = plan(NEW, SHARD, seed=seed)
    part = manifest(table, held.identity)
    return begin_append(str(path), grown(held, part.sources, part.totals), moved(table, OLD, 1, SHARD))


def test_only_one_append_at_a_time(old, tmp_path):
    path = tmp_path / "hs.zarr"
    shutil.copytree(old, path)
    first = begun(path, 1)
    before = contents(path)
    with pytest.raises(CacheError, match="another append came first"):
        begun(path, 2)
    assert contents(path) == before
    # Two processes of the same append do no harm to each other.
    second = CacheWriter.resume(str(path))
    assert second is not None and second.missing_shards() == first.missing_shards() == [2, 3]
    for shard in (2, 3):
        first.commit_shard(shard, shard_arrays(first, shard))
    assert second.missing_shards() == []
    done = first.finish()
    assert second.finish() == done == read_root(LocalStore(path))
    assert verify(str(path), True, Silent())[1] == []


@pytest.mark.parametrize("change", ["forgotten", "another plan", "no plan"])
def test_a_cache_that_changed_under_an_append_is_not_declared_complete(old, tmp_path, change):
    path = tmp_path / "hs.zarr"
    shutil.copytree(old, path)
    writer = begun(path, 1)
    for shard in (2, 3):
        writer.commit_shard(shard, shard_arrays(writer, shard))
    if change == "forgotten":
        forget(str(path), [])
        assert CacheWriter.resume(str(path)) is None, "an append's plan is not the plan of the cache below it"
    else:
        (path / "plan.parquet").unlink()
    if change == "another plan":
        begun(path, 2)
    with pytest.raises(CacheError, match="changed while it was appended to"):
        writer.finish()
    assert read_root(LocalStore(path)).totals.shards == OLD


def test_a_mended_cache_takes_each_shard_by_the_plan_of_its_generation(new, tmp_path):
    path = tmp_path / "hs.zarr"
    shutil.copytree(new, path)
    held = read_root(LocalStore(path))
    plans = [plan(OLD, SHARD), moved(plan(NEW, SHARD, seed=9), OLD, 1, SHARD)]
    digests = [json.loads((path / f"shards/{shard:06d}.json").read_text())["plan_sha256"] for shard in (0, OLD)]
    assert digests[0] != digests[1]
    (path / "hidden/2/c/1/0").unlink()
    (path / "hidden/2/c/3/0").write_bytes(b"torn")
    writer = CacheWriter.create(
        str(path),
        held.model_copy(update={"complete": False}),
        pa.concat_tables(plans),
        list(zip((0, OLD), digests, strict=True)),
    )
    assert writer.missing_shards() == [1, 3]
    again = CacheWriter.resume(str(path))
    assert again is not None and again.missing_shards() == [1, 3]
    for shard in (1, 3):
        again.commit_shard(shard, shard_arrays(again, shard))
    again.finish()
    assert contents(path) == contents(new)


@pytest.mark.parametrize("text", ["", "0:1", "0:1 2:x", "2:1 0:1", "0:1 2:2", "0:1:1"])
def test_a_record_of_generations_that_says_nonsense_is_refused(new, text):
    held = read_root(LocalStore(new))
    with pytest.raises(CacheError, match="generations"):
        generations_of(held.model_copy(update={"record": held.record | {"generations": text}}))
