"""`train --partial`: the committed shards of a capture that still runs, and those alone until the run ends."""

import json
import shutil
from pathlib import Path

import pytest
from cache_fixtures import manifest, plan, shard_arrays
from safetensors.torch import load_file
from train_fixtures import Heard, options, stable_lines, tensor_files, train_cache

from cache.append import begin_append, grown, moved
from cache.layout import read_root
from cache.partial import committed_shards, open_partial, open_shards
from cache.read import open_cache
from cache.store import LocalStore
from cache.verify import forget, verify
from cache.write import CacheWriter
from pipeline.cli import main
from schemas.errors import CacheDamaged, CacheError
from schemas.say import Silent
from train.run import train
from train.rundir import provenance_of, read_provenance

SHARDS = 4


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> str:
    return train_cache(tmp_path_factory.mktemp("partial") / "hs.zarr", shards=SHARDS)


def growing(finished: str, path: Path, shards: tuple[int, ...] = ()) -> CacheWriter:
    """A capture of the same cache that has committed these shards."""
    held = read_root(LocalStore(Path(finished)))
    writer = CacheWriter.create(str(path), held.model_copy(update={"complete": False}), plan(SHARDS, 64))
    for key in ("target/head.safetensors", "target/config.json"):
        writer.put_file(key, (Path(finished) / key).read_bytes())
    commit(writer, *shards)
    return writer


def commit(writer: CacheWriter, *shards: int) -> None:
    for shard in shards:
        writer.commit_shard(shard, shard_arrays(writer, shard))


def test_only_committed_shards_are_there(finished, tmp_path):
    writer = growing(finished, tmp_path / "hs.zarr", (2, 0))
    found = open_partial(str(tmp_path / "hs.zarr"))
    assert (found.shards, found.planned) == ((0, 2), SHARDS)
    whole = open_cache(finished)
    rows = [row for row in whole.index.to_pylist() if row["shard"] in (0, 2)]
    assert found.cache.index.to_pylist() == rows
    assert found.cache.manifest.totals.samples == len(rows)
    assert found.cache.manifest.totals.tokens == sum(row["length"] for row in rows)
    assert found.cache.manifest.totals.val_samples == sum(row["split"] == "val" for row in rows)
    for row in rows:
        place = (row["offset"], row["length"], [0, 3])
        assert found.cache.hidden(*place).equal(whole.hidden(*place))
    # What is committed later is another cache; the same shards of the finished one are the same.
    commit(writer, 1, 3)
    assert provenance_of(found.cache, "x") != provenance_of(open_partial(str(tmp_path / "hs.zarr")).cache, "x")
    writer.finish()
    same = open_shards(str(tmp_path / "hs.zarr"), (0, 2))
    assert provenance_of(same, "x") == provenance_of(found.cache, "x")


def test_a_shard_is_committed_by_its_record_and_its_sizes(finished, tmp_path):
    path = tmp_path / "hs.zarr"
    growing(finished, path, (0, 1, 2, 3))
    (path / "shards/000000.json").unlink()
    (path / "hidden/2/c/1/0").write_bytes(b"torn")
    record = json.loads((path / "shards/000002.json").read_text())
    (path / "shards/000002.json").write_text(json.dumps(record | {"plan_sha256": "of another plan"}))
    assert open_partial(str(path)).shards == (3,)


def test_an_incomplete_cache_names_the_option_and_nothing_committed_is_an_error(finished, tmp_path):
    path = str(tmp_path / "hs.zarr")
    writer = growing(finished, Path(path))
    run = str(tmp_path / "run")
    with pytest.raises(
        CacheError, match=r"is incomplete \(0 of 4 shards\): run the same .* again to finish it, or train .*--partial"
    ):
        train(options(), path, run, False, Silent())
    with pytest.raises(CacheError, match="none of 4 shards is committed yet: wait for the capture"):
        train(options(), path, run, False, Silent(), partial=True)
    commit(writer, 0)
    (Path(path) / "target/head.safetensors").unlink()
    with pytest.raises(CacheError, match="none of 4 shards is committed yet"):
        train(options(), path, run, False, Silent(), partial=True)
    assert not Path(run).exists()


def test_a_complete_cache_is_all_there(finished, tmp_path):
    heard = Heard()
    train(options(), finished, str(tmp_path / "partial"), False, heard, partial=True)
    assert any("is complete: --partial trains on all of it" in note for note in heard.notes)
    train(options(), finished, str(tmp_path / "plain"), False, Silent())
    assert tensor_files(tmp_path / "partial") == tensor_files(tmp_path / "plain")
    assert read_provenance(tmp_path / "partial") == read_provenance(tmp_path / "plain")
    assert read_provenance(tmp_path / "partial").shards is None


def cut_to(run: Path, step: int) -> None:
    """As a kill after the checkpoint of `step` would have left it."""
    shutil.rmtree(run / "draft")
    for path in (run / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)


@pytest.mark.parametrize("then", ["more", "finished", "appended"])
def test_a_resumed_run_stays_with_its_shards(finished, tmp_path, then):
    path, run, chosen = tmp_path / "hs.zarr", tmp_path / "run", options(run={"eval_every": 7})
    writer = growing(finished, path, (1, 3))
    heard = Heard()
    train(chosen, str(path), str(run), False, heard, partial=True)
    assert any("training on the 2 of 4 shards that are committed now (8 samples)" in note for note in heard.notes)
    assert read_provenance(run).shards == (1, 3)
    wanted, lines = tensor_files(run), stable_lines(run)
    commit(writer, 0)
    if then != "more":
        commit(writer, 2)
        held = writer.finish()
    if then == "appended":
        table = plan(1, 64, seed=5)
        part = manifest(table, held.identity)
        more = begin_append(str(path), grown(held, part.sources, part.totals), moved(table, SHARDS, 1, 64))
        commit(more, SHARDS)
        more.finish()
    # With and without the option: what the run began with is written down.
    for partial in (True, False):
        cut_to(run, 6)
        heard = Heard()
        train(chosen, str(path), str(run), True, heard, partial=partial)
        assert any("going on with the 2 shards that the run began with (8 samples)" in note for note in heard.notes)
        assert tensor_files(run) == wanted and stable_lines(run) == lines
    assert load_file(run / "draft" / "model.safetensors")


def test_a_resumed_run_whose_shards_are_gone_or_harmed_is_refused(finished, tmp_path):
    path, run = tmp_path / "hs.zarr", tmp_path / "run"
    growing(finished, path, (1, 3))
    train(options(), str(path), str(run), False, Silent(), partial=True)
    (path / "hidden/2/c/3/0").write_bytes(b"torn")
    with pytest.raises(CacheDamaged, match="hidden/2/c/3/0 is 4 bytes"):
        train(options(), str(path), str(run), True, Silent())
    other = train_cache(tmp_path / "other", shards=2)
    with pytest.raises(CacheError, match="has no shard 3, of 2: give the cache that the run began on"):
        train(options(), other, str(run), True, Silent())


def test_what_a_repaired_cache_still_holds_can_be_trained_on(finished, tmp_path):
    path = tmp_path / "hs.zarr"
    shutil.copytree(finished, path)
    (path / "hidden/2/c/1/0").unlink()
    forget(str(path), verify(str(path), False, Silent())[1])
    assert committed_shards(LocalStore(path), read_root(LocalStore(path))) == (0, 2, 3)
    assert open_partial(str(path)).shards == (0, 2, 3)


def test_the_command(finished, tmp_path, capsys):
    path = tmp_path / "hs.zarr"
    growing(finished, path, (0,))
    words = [
        "train",
        "--cache",
        str(path),
        "--draft",
        "dflash",
        "--out",
        str(tmp_path / "run"),
        "--steps",
        "2",
        "--set",
        "draft.num_layers=1",
    ]
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert "dflash train --partial" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main([*words, "--partial"])
    assert caught.value.code == 0
    assert "1 of 4 shards" in capsys.readouterr().err
    assert json.loads((tmp_path / "run/provenance.json").read_text())["shards"] == [0]


def test_a_sweep_takes_no_growing_cache(finished, capsys):
    with pytest.raises(SystemExit):
        main(["train", "--cache", finished, "--draft", "dflash", "--partial", "--sweep", "optim.lr=1e-3,1e-4"])
    assert "--partial would give each run of a --sweep other shards" in capsys.readouterr().err
