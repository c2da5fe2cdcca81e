"""`capture --append` from options to a grown cache: what is added, going on after a kill, and mending what was appended."""

import shutil
from pathlib import Path

import pytest
from append_fixtures import LAST, MORE, ROWS, command, three_files
from capture_fixtures import Recorder, contents, random_target, shipped_rows, write_jsonl
from kills import killed_before_object

from cache.append import pending_append
from cache.read import open_cache
from cache.verify import verify
from cache.write import CacheWriter
from capture import append as append_module
from capture import planning as planning_module
from capture import run as run_module
from capture.run import capture, dry_run
from schemas.errors import CacheError, DflashError
from schemas.options import CaptureOptions
from schemas.say import Silent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("append")


@pytest.fixture(scope="module")
def target(folder):
    return random_target(folder / "tiny")


@pytest.fixture(scope="module")
def data(folder) -> list[str]:
    return three_files(folder)


@pytest.fixture(scope="module")
def base(folder, target, data):
    capture(command(target, data[:1], folder / "base"), Recorder())
    return folder / "base"


@pytest.fixture(scope="module")
def grown(folder, target, data, base):
    """Two appends behind a capture."""
    out = folder / "grown"
    shutil.copytree(base, out)
    for path in data[1:]:
        capture(command(target, [path], out, append=True), Recorder())
    return out


@pytest.fixture
def copy(tmp_path):
    """Makes a copy that a test may harm."""

    def copied(path: Path) -> Path:
        return Path(shutil.copytree(path, tmp_path / "copy"))

    return copied


def test_an_appended_cache(base, grown, data):
    before, cache = open_cache(str(base)), open_cache(str(grown))
    sources = cache.manifest.sources
    assert [source.path for source in sources] == data
    assert [(source.rows, source.kept, source.skipped) for source in sources] == [
        (ROWS, ROWS, {}),
        (MORE + 2, MORE, {"duplicate": 2}),
        (LAST + 2, LAST, {"duplicate": 2}),
    ]
    assert cache.manifest.totals.samples == ROWS + MORE + LAST == len(set(cache.index["tokens_sha256"].to_pylist()))
    assert cache.index.slice(0, ROWS) == before.index
    assert cache.manifest.identity == before.manifest.identity
    assert cache.manifest.mask_token_source == before.manifest.mask_token_source
    firsts = [cache.index["shard"][row].as_py() for row in (0, ROWS, ROWS + MORE)]
    assert cache.manifest.record == before.manifest.record | {"generations": " ".join(f"{first}:1" for first in firsts)}
    assert verify(str(grown), True, Silent())[1] == []
    old = contents(base)
    assert {name: data for name, data in contents(grown).items() if name in old and "zarr.json" not in name} == {
        **{name: data for name, data in old.items() if "zarr.json" not in name},
        "index.parquet": (grown / "index.parquet").read_bytes(),
    }


def test_the_appended_states_are_those_of_a_capture_of_the_new_file(folder, target, data, grown):
    alone = folder / "alone"
    capture(command(target, data[1:2], alone), Recorder())
    whole, part = open_cache(str(grown)), open_cache(str(alone))
    places = {row["tokens_sha256"]: row for row in whole.index.to_pylist()}
    for row in part.index.to_pylist():
        same = places[row["tokens_sha256"]]
        here, there = (cache.hidden(at["offset"], at["length"], [0, 2]) for cache, at in ((part, row), (whole, same)))
        # Two samples of the first file ran in batches of another shape there.
        assert (here - there).abs().max() <= 1e-4 * here.abs().max()


def test_again_is_no_work(grown, target, data, monkeypatch):
    for module, name in ((run_module, "load_target"), (planning_module, "collect"), (append_module, "collect")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("nothing is to do"))
    before = contents(grown)
    for options in (
        command(target, data[1:2], grown, append=True),
        command(target, data[::-1], grown, append=True),
        command(target, data, grown),
    ):
        say = Recorder()
        assert capture(options, say) == open_cache(str(grown)).manifest
        assert "nothing to do" in say.notes[-1]
    assert contents(grown) == before
    assert dry_run(command(target, data[1:2], grown, append=True), Recorder()) is None


def test_files_that_are_in_already_are_left_out_of_an_append(target, data, base, copy):
    out = copy(base)
    say = Recorder()
    capture(command(target, data[:2], out, append=True), say)
    assert any(f"{data[0]} is already in" in note for note in say.notes)
    assert [source.path for source in open_cache(str(out)).manifest.sources] == data[:2]


def test_more_rows_of_a_file_of_which_a_part_is_in(target, data, folder, tmp_path):
    out = tmp_path / "part"
    capture(command(target, data[:1], out, limit=6), Recorder())
    capture(command(target, data[:1], out, limit=4, append=True), Recorder())
    assert open_cache(str(out)).manifest.totals.samples == 6
    capture(command(target, data[:1], out, append=True), Recorder())
    manifest = open_cache(str(out)).manifest
    assert manifest.totals.samples == ROWS
    assert [(source.rows, source.kept, source.skipped) for source in manifest.sources] == [
        (6, 6, {}),
        (ROWS, ROWS - 6, {"duplicate": 6}),
    ]


def test_data_without_a_new_sample_changes_nothing(folder, target, data, base, monkeypatch):
    monkeypatch.setattr(run_module, "load_target", lambda *_: pytest.fail("nothing is to do"))
    path = write_jsonl(folder / "same.jsonl", shipped_rows(3)[::-1])
    before = contents(base)
    say = Recorder()
    capture(command(target, [path], base, append=True), say)
    assert "every sample of this data is already in: nothing to do" in say.notes[-1]
    assert contents(base) == before


def test_a_dry_run_shows_what_would_be_added(target, data, base, grown):
    before = contents(base)
    plan = dry_run(command(target, data[1:2], base, append=True), Recorder())
    assert plan is not None
    assert plan.manifest.totals.samples == MORE
    assert [source.path for source in plan.manifest.sources] == data[1:2]
    assert contents(base) == before


def test_the_mask_token_that_was_chosen_once_need_not_be_typed_again(target, data, tmp_path):
    out = tmp_path / "chosen"
    capture(command(target, data[:1], out, mask_token_id=2047), Recorder())
    capture(command(target, data[1:2], out, append=True), Recorder())
    assert open_cache(str(out)).manifest.identity.mask_token_id == 2047


def killed(number: int, options: CaptureOptions) -> None:
    assert killed_before_object(number, lambda: capture(options, Recorder()))


@pytest.mark.parametrize("number", [0, 4, 11, 23])
def test_a_killed_append_goes_on_by_its_own_plan(target, data, base, grown, copy, number, monkeypatch):
    out = copy(base)
    append = command(target, data[1:2], out, append=True)
    killed(number, append)
    assert open_cache(str(out)).manifest == open_cache(str(base)).manifest
    assert verify(str(out), True, Silent())[1] == []
    if number:
        with pytest.raises(
            CacheError, match=rf"unfinished append of {data[1]} \(14 rows.*this command gives {data[2]} \(7 rows"
        ):
            capture(command(target, data[2:], out, append=True), Recorder())
        with monkeypatch.context() as patch:
            patch.setattr(append_module, "collect", lambda *_: pytest.fail("the plan is there"))
            say = Recorder()
            capture(append, say)
        assert any("shards to do" in note for note in say.notes)
    else:
        assert pending_append(str(out)) is None
        capture(append, Recorder())
    capture(command(target, data[2:], out, append=True), Recorder())
    assert contents(out) == contents(grown)


def test_an_append_does_not_read_or_write_the_head_again(target, data, base, copy):
    out = copy(base)
    before = {path: path.stat().st_mtime_ns for path in (out / "target").iterdir()}
    capture(command(target, data[1:2], out, append=True), Recorder())
    assert {path: path.stat().st_mtime_ns for path in (out / "target").iterdir()} == before


@pytest.mark.parametrize("harm", ["first", "second", "third", "each", "index", "document"])
def test_the_command_with_all_data_mends_an_appended_cache(target, data, grown, copy, harm, monkeypatch):
    out = copy(grown)
    before = contents(out)
    by_source = {row["source"]: row["shard"] for row in open_cache(str(out)).index.to_pylist()}
    wanted = {"first": [0], "second": [1], "third": [2], "each": [0, 1, 2], "index": [], "document": []}[harm]
    for source in wanted:
        (out / f"hidden/2/c/{by_source[source]}/0").write_bytes(b"torn")
    if harm == "index":
        (out / "index.parquet").unlink()
    if harm == "document":
        (out / "tokens/input_ids/zarr.json").write_text("{}")
        with pytest.raises(
            CacheError, match=r"is damaged \(tokens/input_ids/zarr.json: is no document.*, without --append"
        ):
            capture(command(target, data[:1], out, append=True), Recorder())
    with pytest.raises(CacheError, match="captured from 3 data files, this command gives 1"):
        capture(command(target, data[:1], out), Recorder())
    done = []
    commit = CacheWriter.commit_shard

    def counted(self, shard, arrays):
        done.append(shard)
        return commit(self, shard, arrays)

    monkeypatch.setattr(CacheWriter, "commit_shard", counted)
    say = Recorder()
    capture(command(target, data, out), say)
    assert sorted(done) == sorted(by_source[source] for source in wanted)
    assert contents(out) == before


def test_mending_that_is_killed_goes_on(target, data, grown, copy):
    out = copy(grown)
    before = contents(out)
    for shard in (0, open_cache(str(out)).manifest.totals.shards - 1):
        (out / f"hidden/2/c/{shard}/0").unlink()
    for number in (0, 2, 9, 14, 20):
        killed(number, command(target, data, out))
        with pytest.raises(DflashError, match=r"incomplete|damaged"):
            open_cache(str(out))
    capture(command(target, data, out), Recorder())
    assert contents(out) == before


def test_an_append_that_was_forgotten_under_repair_begins_anew(target, data, base, grown, copy):
    """Mending the cache below an unfinished append takes the plan's place; the append is then begun again."""
    out = copy(base)
    append = command(target, data[1:2], out, append=True)
    killed(20, append)
    (out / "hidden/2/c/0/0").unlink()
    with pytest.raises(CacheError, match="is damaged"):
        capture(append, Recorder())
    capture(command(target, data[:1], out), Recorder())
    assert verify(str(out), True, Silent())[1] == []
    for path in data[1:]:
        capture(command(target, [path], out, append=True), Recorder())
    assert contents(out) == contents(grown)
