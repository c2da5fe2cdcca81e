"""The same data captured anew takes its tokens from the cache that is there: the same bytes as without it, or the data is read."""

import json
import random
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from capture_fixtures import Recorder, capture_options, contents, random_target, shipped_rows, talk, write_jsonl

from cache.write import CacheWriter, existing_manifest
from capture import planning as planning_module
from capture.collect import collect
from capture.lines import BadRow
from capture.recall import recall
from capture.run import capture, dry_run
from capture.settings import scan_data, settle
from capture.tell import first_skipped_of_record, first_skipped_record
from schemas.errors import CacheError
from schemas.manifest import Manifest, Source


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recall")
    random_target(folder / "tiny")
    rows = shipped_rows(24)
    rows += [rows[3], talk("only a question"), talk("", "an answer"), talk("a", "b c d", "e", "f g h", id="two")]
    write_jsonl(folder / "rows.jsonl", rows)
    return folder


def command(folder: Path, out: Path, **options):
    small = {"layers": (0, 2), "max_length": 128, "shard_tokens": 512, "overwrite": True} | options
    return capture_options(str(folder / "tiny"), str(folder / "rows.jsonl"), out, **small)


@pytest.fixture(scope="module")
def finished(folder):
    capture(command(folder, folder / "hs.zarr"), Recorder())
    return folder / "hs.zarr"


class StoppedError(Exception):
    pass


@pytest.fixture(scope="module")
def stopped(folder):
    """Stopped in its first shard."""

    def stop(*_):
        raise StoppedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CacheWriter, "commit_shard", stop)
        with pytest.raises(StoppedError):
            capture(command(folder, folder / "stopped.zarr"), Recorder())
    return folder / "stopped.zarr"


@pytest.mark.parametrize("which", ["finished", "stopped"])
@pytest.mark.parametrize(
    "options",
    [
        {"layers": (1, 3)},
        {"codec": "int8", "top_k": 4},
        {"shard_tokens": 256, "batch_tokens": 300},
        {"shard_tokens": 4096},
    ],
)
def test_other_layers_codec_or_shards_take_the_same_tokens(request, folder, tmp_path, monkeypatch, which, options):
    fresh, heard = tmp_path / "fresh.zarr", Recorder()
    capture(command(folder, fresh, **options), heard)
    out = tmp_path / "hs.zarr"
    shutil.copytree(request.getfixturevalue(which), out)
    monkeypatch.setattr(planning_module, "collect", lambda *_, **__: pytest.fail("the tokens are there"))
    say = Recorder()
    dry = dry_run(command(folder, out, **options), Recorder())
    manifest = capture(command(folder, out, **options), say)
    taken = f"samples taken from the {'cache' if which == 'finished' else 'plan'} that is there"
    assert [note for note in say.notes if taken in note] == [f"{out}: {manifest.totals.samples} {taken}"]
    assert contents(out) == contents(fresh)
    assert dry.manifest.totals == manifest.totals and dry.manifest.sources == manifest.sources
    # What is said of the data is said again.
    assert say.warnings == heard.warnings
    assert (
        len([note for note in heard.notes if note in say.notes and ("rows.jsonl" in note or "duplicates" in note)]) >= 5
    )


@pytest.mark.parametrize(
    "options",
    [{"max_length": 64}, {"val_fraction": 0.6}, {"reasoning": "mask"}, {"format": "messages"}, {"limit": 20}],
)
def test_whatever_decides_tokens_makes_the_data_be_read(finished, folder, tmp_path, options):
    fresh, out, say = tmp_path / "fresh.zarr", tmp_path / "hs.zarr", Recorder()
    capture(command(folder, fresh, **options), Recorder())
    shutil.copytree(finished, out)
    capture(command(folder, out, **options), say)
    assert not any("taken from" in note for note in say.notes)
    assert contents(out) == contents(fresh)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[9] ^= 1
    path.write_bytes(data)


def another_hash(path: Path) -> None:
    table = pq.read_table(path)
    place = table.schema.get_field_index("tokens_sha256")
    hashes = ["0" * 64, *table["tokens_sha256"].to_pylist()[1:]]
    pq.write_table(table.set_column(place, table.schema.field(place), pa.array(hashes)), path)


def changed(out: Path, change) -> None:
    """Change the manifest's record, or a file of the cache."""
    document = json.loads((out / "zarr.json").read_text())
    change(document["attributes"]["dflash"]["record"], out)
    (out / "zarr.json").write_text(json.dumps(document))


@pytest.mark.parametrize(
    "change",
    [
        lambda record, _: record.pop("counts"),
        lambda record, _: record.update({"transformers": "4.0.0"}),
        lambda record, _: record.update({"merged": "2 caches"}),
        lambda record, _: record.update({"first_skipped": "something else"}),
        lambda _, out: (out / "target/generation_config.json").write_text("{}"),
        lambda _, out: (out / "index.parquet").unlink(),
        lambda _, out: (out / "tokens/input_ids/c/1").write_bytes(b"torn"),
        lambda _, out: flip(out / "tokens/loss_mask/c/1"),
        lambda _, out: another_hash(out / "index.parquet"),
    ],
)
def test_what_is_not_certainly_the_same_is_read(finished, folder, tmp_path, change, monkeypatch):
    out, say, read = tmp_path / "hs.zarr", Recorder(), []
    shutil.copytree(finished, out)
    changed(out, change)

    def counted(*arguments, **named):
        read.append(1)
        return collect(*arguments, **named)

    monkeypatch.setattr(planning_module, "collect", counted)
    capture(command(folder, out, layers=(1,)), say)
    assert read == [1]
    assert not any("taken from" in note for note in say.notes)


def test_bad_rows_that_were_skipped_once_stop_without_being_asked_for(folder, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text((folder / "rows.jsonl").read_text() + "no JSON\n")
    out = tmp_path / "hs.zarr"
    asked = command(folder, out).model_copy(update={"data": (str(data),)})
    skipping, say = asked.model_copy(update={"skip_bad_rows": True}), Recorder()
    capture(skipping, Recorder())
    with pytest.raises(BadRow, match="not valid JSON"):
        capture(asked.model_copy(update={"layers": (1,)}), Recorder())
    capture(skipping.model_copy(update={"layers": (1,)}), say)
    assert any("samples taken from the cache" in note for note in say.notes)


def test_other_data_is_still_refused(finished, folder, tmp_path):
    data = write_jsonl(tmp_path / "rows.jsonl", shipped_rows(5))
    asked = command(folder, finished, overwrite=False).model_copy(update={"data": (data,)})
    with pytest.raises(CacheError, match=r"captured from .*rows\.jsonl with sha256 .*the data changed"):
        capture(asked, Recorder())


def test_first_reasons_are_read_back_as_they_were():
    def held(first: dict[str, str]) -> dict[str, str] | None:
        source = Source(path="a", sha256="", rows=9, kept=1, skipped=dict.fromkeys(first, 1))
        manifest = Manifest.model_construct(sources=(source,), record=first_skipped_record(first))
        return first_skipped_of_record(manifest)

    for first in ({}, {"duplicate": "a:1"}, {"z": "a:9", "bad line": "a:1: x; y: z", "duplicate": "b:2; c"}):
        assert held(first) == first


def test_another_tokenizer_config_under_the_same_name_makes_the_data_be_read(folder, tmp_path):
    target, out, fresh, say = tmp_path / "tiny", tmp_path / "hs.zarr", tmp_path / "fresh.zarr", Recorder()
    shutil.copytree(folder / "tiny", target)
    asked = capture_options(str(target), str(folder / "rows.jsonl"), out, layers=(0,), max_length=128, overwrite=True)
    capture(asked, Recorder())
    config = target / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token": "<|im_start|>"}))
    again = asked.model_copy(update={"layers": (1,)})
    capture(again, say)
    capture(again.model_copy(update={"out": str(fresh)}), Recorder())
    assert not any("taken from" in note for note in say.notes)
    assert contents(out) == contents(fresh)


def test_rows_of_a_damaged_index_are_never_taken(finished, folder, tmp_path):
    out, whole = tmp_path / "hs.zarr", (finished / "index.parquet").read_bytes()
    shutil.copytree(finished, out)
    settings = settle(command(folder, out, layers=(1,)), Recorder())
    scans, found = scan_data(settings.options, Recorder()), existing_manifest(str(out))
    sound = recall(settings, scans, found, Recorder())
    assert sound is not None
    draw = random.Random(0)
    for place in draw.sample(range(len(whole)), 150):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << draw.randrange(8)
        (out / "index.parquet").write_bytes(flipped)
        taken = recall(settings, scans, found, Recorder())
        assert taken is None or taken.samples.rows().equals(sound.samples.rows()), place
