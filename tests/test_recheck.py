"""A cache of the target's own states passes; other weights, or other rows under right checksums, do not."""

import shutil

import pytest
import torch
from capture_fixtures import Recorder, capture_options, random_target, shipped_rows, write_jsonl
from safetensors.torch import load_file, save_file

from cache.shard import encode_shard
from cache.store import LocalStore
from cache.verify import verify
from cache.write import read_record
from capture.recheck import recheck
from capture.run import capture
from schemas.arrays import array_specs
from schemas.errors import CacheError, OptionError, TargetError
from schemas.records import record_name
from schemas.say import Silent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("recheck")


@pytest.fixture(scope="module")
def target(folder):
    return random_target(folder / "tiny")


@pytest.fixture(scope="module", params=["f32", "bf16", "fp8", "int8", "int4"])
def captured(request, folder, target):
    data = write_jsonl(folder / "rows.jsonl", shipped_rows(24))
    out = folder / request.param
    capture(capture_options(target, data, out, layers=(0, 2), codec=request.param), Recorder())
    return out


def test_what_was_captured_is_what_the_target_computes(captured, target):
    say = Recorder()
    assert recheck(str(captured), target, 10, "cpu", False, say) == []
    assert recheck(str(captured), target, 1000, "cpu", False, say) == []
    assert say.warnings == []


def test_other_weights_are_found(captured, folder, target):
    other = folder / f"retrained-{captured.name}"
    shutil.copytree(target, other)
    weights = load_file(other / "model.safetensors")
    name = next(name for name in weights if name.endswith("layers.0.mlp.down_proj.weight"))
    weights[name] = weights[name] + 0.05 * torch.randn(weights[name].shape, generator=torch.Generator().manual_seed(0))
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    say = Recorder()
    faults = recheck(str(captured), str(other), 4, "cpu", False, say)
    assert ["may be the target's weights, and not the cache" in text for text in say.warnings] == [True]
    assert {fault.where for fault in faults} >= {"hidden/0", "hidden/2"}
    assert len({fault.samples for fault in faults}) == 4


def test_rows_that_went_to_the_wrong_place_are_found(captured, folder, target):
    """Checksums are right, hashes of tokens are right, and yet one layer's rows belong to other tokens."""
    path = folder / f"shifted-{captured.name}"
    shutil.copytree(captured, path)
    store = LocalStore(path)
    from cache.read import open_cache

    cache = open_cache(str(path))
    manifest = cache.manifest
    spec = next(s for s in array_specs(manifest.identity, manifest.totals.shards) if s.name == "hidden/2")
    rows = cache.rows("hidden/2", 0, manifest.identity.shard_tokens)
    written = store.put(spec.object_key(0), encode_shard(rows[::-1].copy(), spec.chunk_rows))
    record = read_record(store, 0)
    objects = {**record.objects, spec.object_key(0): written}
    store.put(record_name(0), [record.model_copy(update={"objects": objects}).model_dump_json().encode()])
    assert [f for f in verify(str(path), True, Silent())[1] if "zero" not in f.what] == []
    faults = recheck(str(path), target, 1000, "cpu", False, Silent())
    assert {(fault.where, fault.shard) for fault in faults} == {("hidden/2", 0)}


def test_another_target_is_refused(captured, folder, target):
    with pytest.raises(CacheError, match="config sha256"):
        recheck(
            str(captured),
            random_target(folder / f"deeper-{captured.name}", num_hidden_layers=6),
            4,
            "cpu",
            False,
            Silent(),
        )
    with pytest.raises(TargetError):
        recheck(str(captured), "./nowhere", 4, "cpu", False, Silent())
    with pytest.raises(OptionError, match="--samples 0"):
        recheck(str(captured), target, 0, "cpu", False, Silent())
