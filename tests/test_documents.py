"""What no commit record vouches for: each document that is missing, cut short or another is named, and no sound cache is blamed."""

import json
import os
import shutil
from pathlib import Path

import obstore
import pytest
import torch
import zarr
from cache_fixtures import HIDDEN, VOCAB, make_cache
from s3_server import BUCKET, folder_contents
from safetensors.torch import load_file, save_file
from test_append import append

from cache.append import begin_append, grown, moved
from cache.convert import convert
from cache.documents import CONFIG, HEAD
from cache.layout import read_root
from cache.merge import merge
from cache.store import LocalStore
from cache.verify import forget, verify
from cache.write import read_record
from pipeline.cli import main
from schemas.errors import CacheDamaged
from schemas.records import ObjectRecord, record_name
from schemas.say import Silent

CODECS = ["f32", "bf16", "bf16-zstd", "fp8", "int8", "int4"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A cache in int8: of every kind of array one at least."""
    path = tmp_path_factory.mktemp("documents") / "hs.zarr"
    make_cache(path, "int8")
    return path


@pytest.fixture
def copy(sound, tmp_path):
    return Path(shutil.copytree(sound, tmp_path / "hs.zarr"))


def faults_of(path, deep=False):
    return [(fault.where, fault.what, fault.samples, fault.shard) for fault in verify(str(path), deep, Silent())[1]]


def rewrite(name, change):
    """Change an array's or group's document, as JSON."""

    def harm(path):
        file = path / name / "zarr.json"
        document = json.loads(file.read_text())
        change(document)
        file.write_text(json.dumps(document))

    return harm


def inner(document):
    return document["codecs"][0]["configuration"]


def rewrite_head(change):
    def harm(path):
        weights = load_file(path / HEAD)
        change(weights)
        save_file(weights, path / HEAD)

    return harm


def flip(path, where):
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    path.write_bytes(bytes(data))


HEADS = [
    (lambda p: (p / HEAD).unlink(), HEAD, "missing"),
    (lambda p: os.truncate(p / HEAD, 1000), HEAD, "1,000 bytes, its own header says "),
    (lambda p: (p / HEAD).write_bytes((p / HEAD).read_bytes() + b"\0"), HEAD, "its own header says "),
    (lambda p: os.truncate(p / HEAD, 20), HEAD, "is no safetensors file"),
    (lambda p: os.truncate(p / HEAD, 0), HEAD, "is no safetensors file"),
    (lambda p: flip(p / HEAD, 6), HEAD, "is no safetensors file"),
    (lambda p: flip(p / HEAD, 8), HEAD, "is no safetensors file"),
    (lambda p: (p / HEAD).write_bytes(b"\2" + bytes(7) + b"{}"), HEAD, "is no safetensors file"),
    (rewrite_head(lambda w: w.pop("norm.weight")), HEAD, "lacks norm.weight"),
    (
        rewrite_head(lambda w: w.update({"embed_tokens.weight": torch.ones(VOCAB, HIDDEN - 1)})),
        HEAD,
        f"embed_tokens.weight has shape [{VOCAB}, {HIDDEN - 1}], the target's [{VOCAB}, {HIDDEN}]",
    ),
]
CONFIGS = [
    (lambda p: (p / CONFIG).unlink(), CONFIG, "missing"),
    (lambda p: flip(p / CONFIG, 20), CONFIG, "has sha256 "),
    (lambda p: (p / CONFIG).write_text("{}"), CONFIG, "has sha256 44136fa355b3678a, the target's had "),
]
ARRAYS = [
    ("hidden/2", dict.clear, "is no document of a Zarr array"),
    ("hidden/2", lambda d: d.update(shape=[]), "is no document of a Zarr array"),
    ("hidden/2", lambda d: d.update(shape=None), "is no document of a Zarr array"),
    ("hidden/2", lambda d: d.update(shape=[128, 16]), "says shape [128, 16], the manifest [192, 16]"),
    ("hidden/2", lambda d: d.update(shape=[193, 16]), "says shape [193, 16], the manifest [192, 16]"),
    ("hidden/2", lambda d: d.update(shape=[192, 8]), "says shape [192, 8], the manifest [192, 16]"),
    ("hidden/2", lambda d: d.update(shape=[192]), "says shape [192], the manifest [192, 16]"),
    ("tokens/input_ids", lambda d: d.update(data_type="int64"), "says data_type int64, the manifest int32"),
    ("tokens/input_ids", lambda d: d.update(node_type="group"), "says node_type group, the manifest array"),
    ("hidden_scale/3", lambda d: d["chunk_key_encoding"].update(name="v2"), "says chunk keys v2 /, the manifest default /"),
    ("hidden_outliers/0", lambda d: d["attributes"].pop("dtype"), "says attributes {'dtype': None}"),
    ("hidden_outliers/0", lambda d: d["attributes"].pop("channels"), "does not say which 8 channels"),
    ("logits/topk_ids", lambda d: inner(d).update(chunk_shape=[8, 4]), "describes other codecs or chunks"),
    ("logits/topk_ids", lambda d: d["chunk_grid"]["configuration"].update(chunk_shape=[32, 4]), "describes other codecs"),
    ("logits/topk_logprobs", lambda d: inner(d)["codecs"].pop(), "describes other codecs or chunks"),
    ("logits/topk_logprobs", lambda d: inner(d)["codecs"].insert(1, {"name": "gzip"}), "describes other codecs"),
    ("logits/rest_logprob", lambda d: inner(d)["codecs"][0]["configuration"].update(endian="big"), "describes other codecs"),
    ("logits/rest_logprob", lambda d: inner(d).update(index_location="start"), "describes other codecs or chunks"),
]  # fmt: skip
FILES = [
    (lambda p: (p / "hidden/2/zarr.json").unlink(), "hidden/2/zarr.json", "missing"),
    (lambda p: os.truncate(p / "hidden/2/zarr.json", 200), "hidden/2/zarr.json", "is no document of a Zarr array"),
    (lambda p: os.truncate(p / "tokens/loss_mask/zarr.json", 0), "tokens/loss_mask/zarr.json", "is no document"),
    (lambda p: flip(p / "hidden/2/zarr.json", 0), "hidden/2/zarr.json", "is no document of a Zarr array"),
    (lambda p: (p / "logits/zarr.json").unlink(), "logits/zarr.json", "missing"),
    (lambda p: os.truncate(p / "logits/zarr.json", 0), "logits/zarr.json", "is no document of a Zarr group"),
    (rewrite("logits", lambda d: d.update(node_type="array")), "logits/zarr.json", "is no document of a Zarr group"),
]
ALL = [*HEADS, *CONFIGS, *FILES, *((rewrite(name, change), f"{name}/zarr.json", what) for name, change, what in ARRAYS)]


@pytest.mark.parametrize(("harm", "where", "what"), ALL)
def test_each_damage_is_found_at_a_look_and_deep_and_blamed_on_no_shard(copy, harm, where, what):
    harm(copy)
    quick = faults_of(copy)
    assert quick == faults_of(copy, deep=True)
    ((named, told, samples, shard),) = quick
    assert what in told and (samples, shard) == ((), None)
    assert named == where or (named, where) == ("hidden_outliers", "hidden_outliers/0/zarr.json")


def test_a_damaged_document_hides_no_damage_of_the_shards(copy):
    """Without the outlier channels states cannot be decoded; all else is still looked at."""
    (copy / "hidden_outliers/2/zarr.json").unlink()
    (copy / "hidden/3/c/1/0").unlink()
    flip(copy / "logits/topk_ids/c/2/0", 5)
    missing = [("hidden_outliers/2/zarr.json", None), ("hidden/3/c/1/0", 1)]
    assert [(where, shard) for where, _, _, shard in faults_of(copy)] == missing
    assert [(where, shard) for where, _, _, shard in faults_of(copy, True)] == [*missing, ("logits/topk_ids/c/2/0", 2)]


@pytest.mark.parametrize("codec", CODECS)
def test_sound_caches_of_every_codec_and_history_have_no_faults(codec, tmp_path):
    make_cache(tmp_path / "a", codec, layers=(0, 2))
    assert faults_of(tmp_path / "a") == []
    append(tmp_path / "a")
    assert faults_of(tmp_path / "a") == faults_of(tmp_path / "a", True) == []
    make_cache(tmp_path / "b", codec, shards=2, layers=(0, 2))
    merge([str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "m"), Silent())
    assert faults_of(tmp_path / "m") == faults_of(tmp_path / "m", True) == []
    convert(str(tmp_path / "m"), str(tmp_path / "to"), "int4", [2], CPU, Silent())
    assert faults_of(tmp_path / "to") == faults_of(tmp_path / "to", True) == []


def test_an_append_that_is_under_way_or_given_up_is_no_fault(copy):
    from cache_fixtures import manifest, plan

    held = read_root(LocalStore(copy))
    table = plan(2, 64, seed=9)
    part = manifest(table, held.identity)
    source = part.sources[0].model_copy(update={"sha256": f"{9:064d}"})
    begin_append(str(copy), grown(held, (source,), part.totals), moved(table, 3, 1, 64))
    assert json.loads((copy / "hidden/2/zarr.json").read_text())["shape"][0] == 5 * 64
    assert faults_of(copy, True) == []
    (copy / "plan.parquet").unlink()
    assert faults_of(copy, True) == []


def test_documents_of_the_same_meaning_are_no_fault(copy):
    """As other versions of Zarr write them: bare names, empty configurations, nothing where the default is meant."""

    def bare(document):
        inner(document)["codecs"] = [*inner(document)["codecs"][:-1], "crc32c"]
        inner(document)["index_codecs"][-1] = {"name": "crc32c", "configuration": {}}
        inner(document).pop("index_location")
        document["chunk_key_encoding"].pop("configuration")
        document.pop("storage_transformers")

    for name in ("tokens/input_ids", "hidden/2", "hidden_outliers/2", "logits/topk_ids"):
        rewrite(name, bare)(copy)
    rewrite("tokens/input_ids", lambda document: document.pop("attributes"))(copy)
    assert faults_of(copy, True) == []


def test_an_array_that_another_tool_stored_is_read_as_it_says(copy):
    group = zarr.open_group(str(copy), mode="r+")
    rows, attributes = group["hidden/2"][:], dict(group["hidden/2"].attrs)
    gzip = zarr.codecs.GzipCodec()
    group.create_array("hidden/2", data=rows, shards=(64, 16), chunks=(16, 16), compressors=gzip, overwrite=True)
    group["hidden/2"].attrs.update(attributes)
    store = LocalStore(copy)
    for shard in range(3):
        key, record = f"hidden/2/c/{shard}/0", read_record(store, shard)
        objects = {**record.objects, key: ObjectRecord(bytes=store.size(key), crc32c="00000000")}
        store.put(record_name(shard), [record.model_copy(update={"objects": objects}).model_dump_json().encode()])
    assert faults_of(copy) == faults_of(copy, True) == []
    flip(copy / "hidden/2/c/1/0", 20)
    ((where, what, samples, shard),) = faults_of(copy, True)
    assert (where, len(samples), shard) == ("hidden/2/c/1/0", 4, 1) and "plain Zarr cannot read it" in what


def test_the_command_says_what_is_damaged_and_what_to_do(copy, capsys):
    (copy / "hidden/2/zarr.json").unlink()
    with pytest.raises(SystemExit) as caught:
        main(["verify", str(copy)])
    out, err = capsys.readouterr()
    assert caught.value.code == 1
    assert "hidden/2/zarr.json: missing\n1 faults, 0 of 12 samples touched\n" in out
    assert err.splitlines()[-1].endswith("(1 faults): --repair it, then run the same `dflash capture` command again")
    with pytest.raises(SystemExit) as caught:
        main(["verify", str(copy), "--repair"])
    assert caught.value.code == 1
    assert (
        "no shard is damaged: run the same `dflash capture` command again, it does what is missing"
        in capsys.readouterr().out
    )
    assert len(list((copy / "shards").iterdir())) == 3 and not read_root(LocalStore(copy)).complete


@pytest.mark.parametrize("repaired", [False, True])
@pytest.mark.parametrize(
    "where", [HEAD, CONFIG, "hidden/2/zarr.json", "hidden_outliers/0/zarr.json", "tokens/zarr.json"]
)
def test_merge_and_convert_mend_what_they_made(sound, tmp_path, where, repaired):
    make_cache(tmp_path / "b", "int8", shards=2)
    parts, merged, converted = [str(sound), str(tmp_path / "b")], tmp_path / "merged", tmp_path / "converted"
    for out, again in (
        (merged, lambda: merge(parts, str(merged), Silent())),
        (converted, lambda: convert(str(sound), str(converted), "int4", None, CPU, Silent())),
    ):
        again()
        before = folder_contents(out)
        (out / where).unlink()
        if repaired:
            assert forget(str(out), verify(str(out), False, Silent())[1]) == 0
        again()
        assert folder_contents(out) == before and faults_of(out, True) == []


def test_what_was_merged_and_then_grew_cannot_be_mended_and_is_left_as_it_is(sound, tmp_path, capsys):
    make_cache(tmp_path / "b", "int8", shards=2)
    merge([str(sound), str(tmp_path / "b")], str(tmp_path / "m"), Silent())
    append(tmp_path / "m")
    (tmp_path / "m/hidden/2/zarr.json").unlink()
    before = folder_contents(tmp_path / "m")
    with pytest.raises(SystemExit) as caught:
        main(["verify", str(tmp_path / "m"), "--repair"])
    assert caught.value.code == 1
    assert "merge its caches again, into another --out" in capsys.readouterr().err
    assert folder_contents(tmp_path / "m") == before


def test_a_merge_of_a_damaged_part_is_refused(sound, copy, tmp_path):
    make_cache(tmp_path / "b", "int8", shards=2)
    (copy / "tokens/zarr.json").unlink()
    with pytest.raises(CacheDamaged, match=r"tokens/zarr.json is missing"):
        merge([str(copy), str(tmp_path / "b")], str(tmp_path / "m"), Silent())


@pytest.mark.parametrize(
    ("harm", "where", "what"), [HEADS[0], HEADS[1], HEADS[4], CONFIGS[1], FILES[0], FILES[2], ALL[-1]]
)
def test_an_object_store_is_looked_at_in_the_same_words(s3, copy, harm, where, what):
    harm(copy)
    url = s3.upload(copy, "documents/hs.zarr")
    try:
        assert faults_of(url) == faults_of(url, True) == faults_of(copy)
        assert [(named, what in told) for named, told, *_ in faults_of(url)] == [(where, True)]
    finally:
        obstore.delete(s3.store(), [f"documents/hs.zarr/{key}" for key in folder_contents(copy)])


def test_an_object_store_holds_sound_caches_too(s3):
    for codec in ("bf16-zstd", "int8"):
        url = f"s3://{BUCKET}/sound/{codec}"
        make_cache(url, codec)  # type: ignore[arg-type]
        assert faults_of(url) == faults_of(url, True) == []
