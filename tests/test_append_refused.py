"""What `capture --append` refuses, and what it leaves as it was."""

import json
import shutil
from pathlib import Path

import pytest
from append_fixtures import LAST, MORE, ROWS, command, three_files
from capture_fixtures import Recorder, contents, random_target, talk, write_jsonl

from cache.merge import merge
from cache.read import open_cache
from cache.verify import forget, verify
from capture.run import capture
from pipeline.cli import main
from schemas.errors import CacheError, OptionError
from schemas.options import CaptureOptions
from schemas.say import Silent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("append-refused")


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


@pytest.fixture
def copy(tmp_path):
    """Makes a copy that a test may harm."""

    def copied(path: Path) -> Path:
        return Path(shutil.copytree(path, tmp_path / "copy"))

    return copied


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"layers": (0, 1)}, r"layers \(0, 2\).*asks for \(0, 1\)"),
        ({"max_length": 128}, "max_length 256.*128"),
        ({"mask_token_id": 2047}, "mask_token_id 3.*2047"),
        ({"shard_tokens": 2048}, "shard_tokens 1024.*2048"),
        ({"reasoning": "mask"}, "reasoning 'keep'.*'mask'"),
    ],
)
def test_other_settings_are_refused_naming_both(target, data, base, options, rule):
    before = contents(base)
    with pytest.raises(CacheError, match=rule):
        capture(command(target, data[1:2], base, append=True, **options), Recorder())
    assert contents(base) == before


def test_a_mask_token_that_the_new_data_holds_is_refused(folder, target, data, base):
    token = json.loads((Path(target) / "tokenizer_config.json").read_text())["mask_token"]
    path = write_jsonl(folder / "masked.jsonl", [talk("what?", f"this: {token} and more")])
    before = contents(base)
    with pytest.raises(OptionError, match=r"the mask token of .*, 3 \('.*'\), occurs in .*masked.jsonl"):
        capture(command(target, [path], base, append=True), Recorder())
    assert contents(base) == before


def test_what_cannot_be_appended_to_is_refused(tmp_path, target, data, base, copy):
    with pytest.raises(CacheError, match="holds no cache yet: leave out --append"):
        capture(command(target, data[1:2], tmp_path / "none", append=True), Recorder())
    out = copy(base)
    (out / "hidden/0/c/0/0").unlink()
    for files in (data[1:2], data[:1]):  # also where all of it is in already
        with pytest.raises(
            CacheError,
            match=r"is damaged \(hidden/0/c/0/0: missing\): first run the same `dflash capture`.*without --append",
        ):
            capture(command(target, files, out, append=True), Recorder())
    forget(str(out), verify(str(out), False, Silent())[1])
    with pytest.raises(CacheError, match="is not finished"):
        capture(command(target, data[1:2], out, append=True), Recorder())
    assert not (out / "plan.parquet").exists()


def test_append_and_overwrite_contradict_each_other():
    with pytest.raises(ValueError, match="give one of them"):
        CaptureOptions(target="x", append=True, overwrite=True)


def test_a_merged_cache_is_not_captured_again(target, data, base, tmp_path, capsys):
    other, out = tmp_path / "other", tmp_path / "merged"
    capture(command(target, data[1:2], other), Recorder())
    merge([str(base), str(other)], str(out), Silent())
    say = Recorder()
    capture(command(target, data[:2], out), say)
    assert "nothing to do" in say.notes[-1]
    harmed = tmp_path / "harmed"
    shutil.copytree(out, harmed)
    (harmed / "hidden/0/c/1/0").unlink()
    with pytest.raises(CacheError, match="cannot be captured again: run the same `dflash merge`"):
        capture(command(target, data[:2], harmed), Recorder())
    capture(command(target, data[2:], out, append=True), Recorder())
    assert open_cache(str(out)).manifest.totals.samples == ROWS + MORE + LAST
    (out / "hidden/0/c/1/0").unlink()
    before = contents(out)
    way = "merge its caches again, into another --out, and append"
    with pytest.raises(CacheError, match=way):
        capture(command(target, data, out), Recorder())
    with pytest.raises(CacheError, match=rf"is damaged \(hidden/0/c/1/0: missing\): first {way}"):
        capture(command(target, data[2:], out, append=True), Recorder())
    # No command makes its shards again, so none of them may be forgotten.
    with pytest.raises(SystemExit) as caught:
        main(["verify", str(out), "--repair"])
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert caught.value.code == 1 and said.startswith("error: ") and way in said
    assert contents(out) == before
