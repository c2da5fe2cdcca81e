"""Merging caches: the same bytes in one place, samples once, and any kill survived."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import zarr
from cache_fixtures import manifest, plan, shard_arrays
from capture_fixtures import contents
from kills import killed_before_object
from train_fixtures import Heard, options, train_cache

from cache.append import begin_append, grown, moved
from cache.layout import read_root
from cache.merge import merge
from cache.read import open_cache
from cache.store import LocalStore
from cache.verify import forget, verify
from cache.write import CacheWriter
from pipeline.cli import main
from schemas.errors import CacheDamaged, CacheError, OptionError
from schemas.say import Silent
from train.run import train

SHARD = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("merge")


@pytest.fixture(scope="module")
def parts(folder) -> list[str]:
    """Three caches; the second is of other data, the third has the first's first shard's samples and two shards of its own."""
    first = train_cache(folder / "a", shards=2, seed=1)
    second = train_cache(folder / "b", shards=3, seed=2)
    table = plan(3, SHARD, seed=3)
    again = plan(2, SHARD, seed=1).slice(0, 4)
    table = pa.concat_tables([again, table.slice(4)])
    who = read_root(LocalStore(Path(first))).identity
    writer = CacheWriter.create(str(folder / "c"), manifest(table, who), table)
    for shard in writer.missing_shards():
        writer.commit_shard(shard, shard_arrays(writer, shard))
    for key in ("target/head.safetensors", "target/config.json"):
        writer.put_file(key, (folder / "a" / key).read_bytes())
    writer.finish()
    return [first, second, str(folder / "c")]


@pytest.fixture(scope="module")
def merged(folder, parts) -> Path:
    merge(parts, str(folder / "merged"), Silent())
    return folder / "merged"


def test_a_merged_cache_holds_every_sample_once(parts, merged):
    whole, caches = open_cache(str(merged)), [open_cache(part) for part in parts]
    by_tokens = {row["tokens_sha256"]: row for row in whole.index.to_pylist()}
    assert len(by_tokens) == len(whole.index) == 8 + 12 + 8
    group = zarr.open_group(str(merged), mode="r")
    seen = set()
    for number, cache in enumerate(caches):
        for row in cache.index.to_pylist():
            if row["tokens_sha256"] in seen:
                continue
            seen.add(row["tokens_sha256"])
            there = by_tokens[row["tokens_sha256"]]
            same = ("sample_id", "row_id", "length", "supervised", "truncated", "split", "source_row")
            assert {name: there[name] for name in same} == {name: row[name] for name in same}
            assert there["source"] == number
            assert there["shard"] == there["offset"] // SHARD
            for read in ("tokens", "topk"):
                for ours, theirs in zip(
                    getattr(whole, read)(there["offset"], there["length"]),
                    getattr(cache, read)(row["offset"], row["length"]),
                    strict=True,
                ):
                    assert ours.equal(theirs)
            states = whole.hidden(there["offset"], there["length"], [0, 2, 3, 5])
            assert states.equal(cache.hidden(row["offset"], row["length"], [0, 2, 3, 5]))
            plain = group["hidden/3"][there["offset"] : there["offset"] + there["length"]]
            assert np.array_equal(plain, states[:, 2])
    assert seen == set(by_tokens)
    assert whole.index["offset"].to_pylist() == sorted(whole.index["offset"].to_pylist())


def test_what_is_told_of_a_merged_cache(parts, merged):
    manifest, caches = open_cache(str(merged)).manifest, [open_cache(part).manifest for part in parts]
    # The third cache's first shard holds nothing new, so it is not there.
    assert manifest.totals.shards == 2 + 3 + 2
    assert manifest.totals.samples == sum(cache.totals.samples for cache in caches) - 4
    assert manifest.identity == caches[0].identity
    assert manifest.record == {"dflash": "0.1.0", "merged": "3 caches"}
    last = manifest.sources[2]
    assert (last.rows, last.kept, last.skipped) == (12, 8, {"duplicate": 4})
    assert manifest.sources[:2] == (caches[0].sources[0], caches[1].sources[0])
    assert not (merged / "plan.parquet").exists()


def test_objects_are_the_same_bytes_under_other_numbers(parts, merged):
    for number, (part, shard) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 1), (2, 2)]):
        theirs = json.loads((Path(parts[part]) / f"shards/{shard:06d}.json").read_text())
        ours = json.loads((merged / f"shards/{number:06d}.json").read_text())
        assert ours["plan_sha256"] == theirs["plan_sha256"]
        assert ours["rows"] == [number * SHARD, (number + 1) * SHARD]
        assert len(ours["objects"]) == len(theirs["objects"]) == 2 + 4 + 3
        for (new, item), (old, wanted) in zip(ours["objects"].items(), theirs["objects"].items(), strict=True):
            assert item == wanted
            assert (merged / new).read_bytes() == (Path(parts[part]) / old).read_bytes()
            assert (merged / new).stat().st_ino != (Path(parts[part]) / old).stat().st_ino


def test_it_verifies_and_trains(merged, tmp_path):
    assert verify(str(merged), True, Silent())[1] == []
    assert train(options(), str(merged), str(tmp_path / "run"), False, Silent()).steps == 14


def test_again_is_no_work(parts, merged):
    before = {path: path.stat().st_mtime_ns for path in merged.rglob("*")}
    heard = Heard()
    assert merge(parts, str(merged), heard).manifest == read_root(LocalStore(merged))
    assert "nothing to do" in heard.notes[-1]
    assert {path: path.stat().st_mtime_ns for path in merged.rglob("*")} == before


def test_killed_before_any_object_the_same_command_ends_the_same(parts, merged, tmp_path):
    wanted = contents(merged)
    objects = 1 + 3 + 9 + 7 * 10 + 2 + 1 + 1
    out = tmp_path / "out"
    # Every kind of object, and the first and the last; each run goes on where the last one was killed.
    for number in (0, 1, 8, 14, 30, 3):
        assert killed_before_object(number, lambda: merge(parts, str(out), Silent()))
        if (out / "zarr.json").exists():
            with pytest.raises(CacheError, match="run the same `dflash merge` command again"):
                open_cache(str(out))
    merge(parts, str(out), Silent())
    assert contents(out) == wanted
    for number in (objects - 1, objects - 2):
        shutil.rmtree(out)
        assert killed_before_object(number, lambda: merge(parts, str(out), Silent()))
        with pytest.raises(CacheError, match="is incomplete"):
            open_cache(str(out))
        merge(parts, str(out), Silent())
        assert contents(out) == wanted
    shutil.rmtree(out)
    assert not killed_before_object(objects, lambda: merge(parts, str(out), Silent()))
    assert contents(out) == wanted


@pytest.mark.parametrize("harm", ["torn", "missing", "record", "index"])
def test_the_same_command_mends_a_damaged_merge(parts, merged, tmp_path, harm, capsys):
    out = tmp_path / "out"
    shutil.copytree(merged, out)
    before = contents(out)
    if harm == "torn":
        data = bytearray((out / "hidden/2/c/3/0").read_bytes())
        data[7] ^= 1
        (out / "hidden/2/c/3/0").write_bytes(bytes(data))
    else:
        (out / {"missing": "hidden/2/c/3/0", "record": "shards/000003.json", "index": "index.parquet"}[harm]).unlink()
    with pytest.raises(SystemExit):
        main(["verify", str(out), "--deep", "--repair"])
    said = " ".join(capsys.readouterr())
    assert "run the same `dflash merge` command again, it does what is missing" in said
    assert "`dflash capture`" not in said
    merge(parts, str(out), Silent())
    assert contents(out) == before


def test_a_damaged_part_is_found_while_it_is_copied(parts, tmp_path):
    part, out = tmp_path / "part", tmp_path / "out"
    shutil.copytree(parts[1], part)
    data = bytearray((part / "hidden/3/c/2/0").read_bytes())
    data[100] ^= 1
    (part / "hidden/3/c/2/0").write_bytes(bytes(data))
    with pytest.raises(CacheDamaged, match=r"part/hidden/3/c/2/0 does not match its commit record .*--deep --repair"):
        merge([parts[0], str(part)], str(out), Silent())
    assert not (out / "hidden/3/c/4/0").exists()
    assert not list(out.glob(".tmp-*/*"))
    merge(parts[:2], str(out), Silent())
    assert verify(str(out), True, Silent())[1] == []


def changed(part: str, to: Path, change) -> str:
    shutil.copytree(part, to)
    change(to)
    return str(to)


def rewrite_manifest(path: Path, **identity: object) -> None:
    document = json.loads((path / "zarr.json").read_text())
    document["attributes"]["dflash"]["identity"] |= identity
    (path / "zarr.json").write_text(json.dumps(document))


def rewrite_record(path: Path, **record: str) -> None:
    document = json.loads((path / "zarr.json").read_text())
    document["attributes"]["dflash"]["record"] |= record
    (path / "zarr.json").write_text(json.dumps(document))


def rewrite_array(path: Path) -> None:
    document = json.loads((path / "hidden/2/zarr.json").read_text())
    document["attributes"]["channels"] = [1, 2]
    (path / "hidden/2/zarr.json").write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda p: rewrite_manifest(p, mask_token_id=38), r"b was captured with mask_token_id 38, .*a with 39"),
        (lambda p: rewrite_manifest(p, max_length=32), r"max_length 32, .* with 64: only caches of the same settings"),
        (lambda p: rewrite_record(p, reasoning="mask"), r"b was captured with reasoning 'mask', .*a with 'keep'"),
        (
            lambda p: (p / "target/config.json").write_text("{}"),
            r"target/config.json has sha256 44136fa355b3678a, .*same target",
        ),
        (
            lambda p: (p / "target/extra.json").write_text("{}"),
            r"target/extra.json has sha256 44136fa355b3678a, .* none",
        ),
        (rewrite_array, r"hidden/2 was written with attributes \{'channels': \[1, 2\]\}"),
    ],
)
def test_caches_that_differ_are_refused_naming_both(parts, tmp_path, change, rule):
    other = changed(parts[1], tmp_path / "b", change)
    with pytest.raises(CacheError, match=rule) as caught:
        merge([parts[0], other], str(tmp_path / "out"), Silent())
    assert caught.value.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_merged_is_refused(parts, merged, tmp_path, monkeypatch):
    out = str(tmp_path / "out")
    with pytest.raises(OptionError, match="at least two"):
        merge(parts[:1], out, Silent())
    with pytest.raises(OptionError, match="is given twice"):
        merge([parts[0], parts[0] + "/"], out, Silent())
    with pytest.raises(OptionError, match="is given twice"):
        merge(parts, parts[0], Silent())
    with pytest.raises(CacheError, match="no hidden-state cache"):
        merge([parts[0], str(tmp_path)], out, Silent())
    unfinished = changed(parts[1], tmp_path / "unfinished", lambda p: forget(str(p), []))
    with pytest.raises(CacheError, match="incomplete"):
        merge([parts[0], unfinished], out, Silent())
    with pytest.raises(
        CacheError, match=r"holds another cache, with sources .* where this merge has .*give another --out"
    ):
        merge(parts[:2], str(merged), Silent())
    with pytest.raises(CacheError, match="holds another cache, with sources"):
        merge(parts[1:], parts[0], Silent())
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "mine").write_text("precious")
    with pytest.raises(CacheError, match="holds something else"):
        merge(parts, str(tmp_path / "file"), Silent())
    monkeypatch.setattr(LocalStore, "free_bytes", lambda _: 10_000)
    with pytest.raises(OptionError, match=r"needs 0\.\d+ GB \(of which .* margin .* 0\.00 GB are free"):
        merge(parts, out, Silent())
    assert not Path(out).exists()


def test_a_merged_cache_can_be_appended_to_and_merged_again(parts, merged, tmp_path):
    out = tmp_path / "grown"
    shutil.copytree(merged, out)
    held = read_root(LocalStore(out))
    table = plan(1, SHARD, seed=8)
    part = manifest(table, held.identity)
    writer = begin_append(
        str(out), grown(held, part.sources, part.totals), moved(table, held.totals.shards, len(held.sources), SHARD)
    )
    for shard in writer.missing_shards():
        writer.commit_shard(shard, shard_arrays(writer, shard))
    writer.finish()
    assert verify(str(out), True, Silent())[1] == []
    assert merge([str(out), parts[0]], str(tmp_path / "all"), Silent()).duplicates == [0, 8]
    whole = open_cache(str(tmp_path / "all"))
    assert whole.manifest.record == {"dflash": "0.1.0", "merged": "2 caches"}
    assert whole.manifest.totals.shards == 8
    assert verify(str(tmp_path / "all"), True, Silent())[1] == []


def test_the_command_says_what_was_left_out(parts, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["merge", *parts, "--out", str(tmp_path / "out")])
    assert caught.value.code == 0
    out, err = capsys.readouterr()
    assert f"{parts[2]}: 4 samples came before and are left out" in out
    assert "out: 28 samples," in out and "7 shards, complete" in out
    assert "merge 7/7" in err
