"""What `capture` refuses: other settings, data or weights than a cache's, and what cannot be captured; nothing is harmed."""

import shutil
from pathlib import Path

import pytest
from capture_fixtures import (
    Recorder,
    capture_options,
    contents,
    random_target,
    shipped_rows,
    write_jsonl,
)

from cache.read import open_cache
from capture.run import capture, dry_run
from schemas.errors import CacheError, CaptureFault, DataError, OptionError, TargetError

ROWS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("capture-refused")


@pytest.fixture(scope="module")
def target(folder):
    return random_target(folder / "tiny")


@pytest.fixture(scope="module")
def data(folder):
    return write_jsonl(folder / "rows.jsonl", shipped_rows(ROWS))


@pytest.fixture(scope="module")
def finished(folder, target, data):
    """An uninterrupted capture of several shards."""
    capture(capture_options(target, data, folder / "whole", layers=(0, 2)), Recorder())
    return folder / "whole"


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"layers": (0, 1)}, r"layers \(0, 2\).*asks for \(0, 1\)"),
        ({"codec": "bf16"}, "codec 'f32'.*'bf16'"),
        ({"max_length": 128}, "max_length 256.*128"),
        ({"top_k": 4}, "top_k 8.*4"),
        ({"mask_token_id": 2047}, "mask_token_id 3.*2047"),
        ({"limit": 5}, "24 rows.*takes 5"),
        ({"dtype": "bfloat16"}, "dtype 'float32'.*'bfloat16'"),
        ({"shard_tokens": 2048}, "shard_tokens 1024.*2048"),
    ],
)
def test_other_settings_are_refused_naming_both(finished, target, data, options, rule):
    before = contents(finished)
    for work in (capture, dry_run):
        with pytest.raises(CacheError, match=rule) as caught:
            work(capture_options(target, data, finished, **{"layers": (0, 2), **options}), Recorder())
        assert "another --out" in str(caught.value)
    assert contents(finished) == before


def test_other_data_and_other_weights_are_refused(finished, folder, target, data):
    other = write_jsonl(folder / "other.jsonl", shipped_rows(ROWS - 1))
    with pytest.raises(CacheError, match="the data changed"):
        capture(capture_options(target, other, finished, layers=(0, 2)), Recorder())
    with pytest.raises(CacheError, match="1 data files, this command gives 2"):
        capture(
            capture_options(target, data, finished, layers=(0, 2)).model_copy(update={"data": (data, other)}),
            Recorder(),
        )
    retrained = folder / "again" / "tiny"
    shutil.copytree(target, retrained)
    weights = bytearray((retrained / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (retrained / "model.safetensors").write_bytes(weights)
    with pytest.raises(CacheError, match=r"target\.revision 'local-"):
        capture(capture_options(str(retrained), data, finished, layers=(0, 2)), Recorder())


@pytest.mark.parametrize(
    ("options", "error", "rule"),
    [
        ({"target": "nobody/nothing"}, TargetError, "nobody/nothing"),
        ({"layers": (4,)}, OptionError, "layer 4 is out of range"),
        ({"layers": (1, 1)}, OptionError, "given twice"),
        ({"mask_token_id": 2048}, OptionError, "2048 is out of range"),
        ({"mask_token_id": -1}, OptionError, "-1 is out of range"),
        ({"mask_token_id": 1}, OptionError, "occurs in the captured tokens"),
        ({"top_k": 4096}, OptionError, "2048 tokens"),
        ({"max_length": 2048}, OptionError, "--shard-tokens 2048"),
        ({"device": "toaster"}, OptionError, "toaster"),
        ({"attn": "toaster"}, TargetError, "--attn toaster"),
        ({"data": ("nowhere.jsonl",)}, DataError, "no such file"),
    ],
)
def test_refusals_write_nothing(folder, target, data, options, error, rule):
    out = folder / "refused"
    with pytest.raises(error, match=rule) as caught:
        capture(capture_options(target, data, out, layers=(0,)).model_copy(update=options), Recorder())
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert not out.exists()


def test_an_out_that_is_something_else_is_refused(folder, target, data):
    for name in ("occupied", "file"):
        out = folder / name
        if name == "file":
            out.write_text("precious")
        else:
            out.mkdir()
            (out / "precious").write_text("precious")
        with pytest.raises(CacheError, match="--out"):
            capture(capture_options(target, data, out, layers=(0,), overwrite=True), Recorder())
    with pytest.raises(OptionError, match="file is a file, not a folder"):
        capture(capture_options(target, data, folder / "file" / "below", layers=(0,)), Recorder())
    assert (folder / "occupied" / "precious").read_text() == (folder / "file").read_text() == "precious"


def test_weights_that_cannot_be_used_cost_no_cache(folder, target, data):
    torn = shutil.copytree(target, folder / "torn")
    (torn / "model.safetensors").write_bytes((torn / "model.safetensors").read_bytes()[:-100])
    out = folder / "kept"
    with pytest.raises(TargetError, match="weights"):
        capture(capture_options(str(torn), data, out, layers=(0,)), Recorder())
    assert not out.exists()
    capture(capture_options(target, data, out, layers=(0,)), Recorder())
    before = contents(out)
    with pytest.raises(TargetError, match="weights"):
        capture(capture_options(str(torn), data, out, layers=(0,), overwrite=True), Recorder())
    assert contents(out) == before


def test_a_fault_of_the_target_leaves_no_complete_cache(folder, data):
    from safetensors.torch import load_file, save_file

    broken = Path(random_target(folder / "nan"))
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.2.mlp.down_proj.weight"][5] = float("nan")
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises((CaptureFault, TargetError), match=r"layer 2|logits"):
        capture(capture_options(str(broken), data, folder / "nan-cache", layers=(0, 2)), Recorder())
    with pytest.raises(CacheError, match="complete"):
        open_cache(str(folder / "nan-cache"))
