"""How the reader reads: which files, into which memory, what it verifies when, and what it says of what it cannot read."""

import gc
import json
import os
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
import zarr
from cache_fixtures import make_cache

from cache.buffers import Buffers
from cache.chunks import ChunkReader
from cache.mapped import MappedFiles
from cache.read import open_cache
from cache.rows import read_rows
from cache.spans import Run
from cache.store import LocalStore
from cache.write import read_record
from schemas.errors import CacheDamaged
from schemas.records import ObjectRecord, record_name

CODECS = ["f32", "bf16", "bf16-zstd", "fp8", "int8", "int4"]


@pytest.fixture(scope="module")
def cached(tmp_path_factory):
    path = tmp_path_factory.mktemp("reader") / "hs.zarr"
    make_cache(path, "int8")
    return path


@pytest.fixture(params=["lent", "read"], autouse=True)
def way(request, monkeypatch):
    """Rows come from mapped memory where they lie in it, or all by reading."""
    if request.param == "read":
        monkeypatch.setattr(MappedFiles, "file", lambda *_: None)
    return request.param


@pytest.mark.parametrize("codec", CODECS)
def test_a_subset_of_layers_opens_no_other_layers_files(codec, tmp_path, monkeypatch):
    make_cache(tmp_path / "hs", codec)
    opened, real = Counter(), os.open
    monkeypatch.setattr(os, "open", lambda path, *rest, **more: opened.update([str(path)]) or real(path, *rest, **more))
    cache = open_cache(str(tmp_path / "hs"), [2])
    cache.samples([(0, 64), (100, 30)], [2])
    layers = {path.split("/hidden")[1].split("/")[1] for path in opened if "/hidden" in path}
    assert layers == {"2"} and any(path.endswith("hidden/2/c/1/0") for path in opened)


def test_a_chunk_is_verified_first_then_at_every_so_many_th_reading(tmp_path):
    make_cache(tmp_path / "hs", "bf16", shard_tokens=64)
    spec = open_cache(str(tmp_path / "hs")).arrays["hidden/2"].spec
    victim = tmp_path / "hs" / "hidden/2/c/1/0"
    sound = victim.read_bytes()
    broken = bytes([sound[0] ^ 1]) + sound[1:]

    def fails(reader):
        try:
            read_rows([reader], [(64, 10)])
        except CacheDamaged:
            return True
        return False

    for every in (1, 4):
        victim.write_bytes(broken)
        reader = ChunkReader(LocalStore(tmp_path / "hs"), spec, verify_every=every)
        assert fails(reader) and fails(reader), "a chunk that failed was never verified"
        victim.write_bytes(sound)
        assert not fails(reader)
        victim.write_bytes(broken)
        assert sum(fails(reader) for _ in range(12)) == (12 if every == 1 else 3)


def test_every_chunk_has_its_turn_to_be_verified_in_whatever_order_a_shard_is_read(cached):
    spec = replace(open_cache(str(cached)).arrays["hidden/2"].spec, shard_rows=64, chunk_rows=1)
    for order in ([(n, n + 1) for n in range(64)], [(n, n + 8) for n in range(0, 64, 8)]):
        reader, found = ChunkReader(LocalStore(cached), spec, verify_every=16), Counter()
        reader.verified[0] = bytearray(b"\1" * 64)
        for _ in range(160):
            for first, end in order:
                found.update(reader.due(0, first, end))
        assert all(5 <= found[number] <= 15 for number in range(64)), "10 of 160 readings"


@pytest.mark.parametrize("codec", CODECS)
def test_sampled_readings_are_those_that_are_verified(codec, tmp_path):
    make_cache(tmp_path / "hs", codec)
    always = open_cache(str(tmp_path / "hs")).verifying(1)
    sampled = open_cache(str(tmp_path / "hs")).verifying(5)
    draw = np.random.default_rng(0)
    for _ in range(30):
        starts = draw.integers(0, 150, 3)
        spans = [(int(start), int(draw.integers(1, 192 - start + 1))) for start in starts]
        (ids, mask, states), (ids2, mask2, states2) = (cache.samples(spans, (3, 0)) for cache in (always, sampled))
        assert torch.equal(ids, ids2) and torch.equal(mask, mask2)
        assert all(torch.equal(states.parts[name], states2.parts[name]) for name in states.parts)


def test_memory_is_aligned_and_used_again_only_when_nobody_holds_it():
    buffers = Buffers()
    first = buffers.array((1000, 300), np.float32)
    assert first.ctypes.data % 64 == 0 and buffers.array((3,), np.uint8).ctypes.data % 64 == 0
    place, view = first.ctypes.data, torch.from_numpy(first[10:20])
    del first
    gc.collect()
    second = buffers.array((1000, 300), np.float32)
    assert second.ctypes.data != place, "a tensor still looks at the first"
    view.fill_(1)
    del view
    gc.collect()
    assert buffers.array((1000, 290), np.float32).ctypes.data == place


def test_states_that_are_kept_stay_what_they_were(cached):
    cache = open_cache(str(cached))
    kept = [cache.samples([(start, 40)], (0, 2, 3))[2] for start in range(0, 150, 10)]
    copies = [{name: part.clone() for name, part in states.parts.items()} for states in kept]
    for start in range(150):
        cache.samples([(start, 40)], (0, 2, 3))
    assert all(torch.equal(s.parts[n], c[n]) for s, c in zip(kept, copies, strict=True) for n in c)


@pytest.mark.parametrize("name", ["hidden/2", "hidden_scale/2", "hidden_outliers/2", "tokens/input_ids"])
@pytest.mark.parametrize("harm", ["flip", "short", "missing"])
def test_what_cannot_be_read_names_array_shard_and_samples(cached, tmp_path, name, harm):
    path = tmp_path / "hs.zarr"
    shutil.copytree(cached, path)
    cache = open_cache(str(path))
    victim = next(
        file for file in (path / name / "c").rglob("*") if file.is_file() and "1" in file.relative_to(path / name).parts
    )
    data = bytearray(victim.read_bytes())
    data[0] ^= 1
    if harm == "missing":
        victim.unlink()
    else:
        victim.write_bytes(bytes(data) if harm == "flip" else bytes(data[: len(data) // 2]))
    touched = cache.index["sample_id"].to_pylist()[4:8]
    with pytest.raises(CacheDamaged) as caught:
        cache.samples([(70, 20)], (0, 2))
    assert f"{name}, shard 1: " in str(caught.value) and f"(samples {', '.join(touched)})" in str(caught.value)
    assert "\n" not in str(caught.value)
    cache.samples([(0, 64), (128, 64)], (0, 2))


def test_an_array_in_other_codecs_is_read_by_plain_zarr_and_said_so(cached, tmp_path):
    path = tmp_path / "hs.zarr"
    shutil.copytree(cached, path)
    expected = open_cache(str(cached))
    group = zarr.open_group(str(path), mode="r+")
    rows, attributes = group["hidden/2"][:], dict(group["hidden/2"].attrs)
    array = group.create_array(
        "hidden/2", data=rows, shards=(64, 16), chunks=(16, 16), compressors=zarr.codecs.GzipCodec(), overwrite=True
    )
    array.attrs.update(attributes)
    store = LocalStore(path)
    for shard in range(3):
        key = f"hidden/2/c/{shard}/0"
        record = read_record(store, shard)
        objects = {**record.objects, key: ObjectRecord(bytes=store.size(key), crc32c="00000000")}
        store.put(record_name(shard), [record.model_copy(update={"objects": objects}).model_dump_json().encode()])
    cache = open_cache(str(path))
    (note,) = cache.notes
    assert "hidden/2 is not stored as this program stores it" in note and not expected.notes
    for spans in ([(0, 192)], [(60, 10), (3, 100)]):
        ours, theirs = (each.samples(spans, (0, 2))[2].decode() for each in (cache, expected))
        assert torch.equal(ours, theirs)
    (path / "hidden/2/c/1/0").write_bytes(b"nonsense" * 20)
    with pytest.raises(CacheDamaged, match=r"hidden/2, shard 1: plain Zarr cannot read it .*\(samples "):
        cache.hidden(64, 64, [2])


def test_another_chunk_size_in_the_metadata_is_not_taken_for_ours(cached, tmp_path):
    path = tmp_path / "hs.zarr"
    shutil.copytree(cached, path)
    file = path / "hidden/2/zarr.json"
    document = json.loads(file.read_text())
    document["codecs"][0]["configuration"]["index_location"] = "start"
    file.write_text(json.dumps(document))
    assert len(open_cache(str(path)).notes) == 1


def test_a_call_that_gives_less_than_was_asked_for_is_gone_on_with(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(bytes(range(100)))
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, into, offset: real(file, [into[0][:7]], offset))
    for size, there in ((60, 60), (95, 90)):  # the second begins at 10 and ends behind the end
        pieces = [memoryview(bytearray(n)) for n in (13, 4, size - 17)]
        (got,) = LocalStore(tmp_path).fill([Run("file", 10, pieces, size)])
        assert got == there and b"".join(pieces)[:there] == bytes(range(10, 10 + there))
