"""What is written is what is read, by us and by plain Zarr; what is missing or torn is an error, never zeros."""

import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import zarr
from cache_fixtures import begin_cache, make_cache, plan, shard_arrays
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.read import open_cache
from cache.write import CacheWriter, check_same, existing_manifest
from schemas.errors import CacheDamaged, CacheError, OptionError


@pytest.fixture(scope="module", params=["f32", "bf16", "bf16-zstd", "fp8", "int8", "int4"])
def cached(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("cache") / "hs.zarr"
    return path, make_cache(path, request.param)


def copy(source, tmp_path):
    shutil.copytree(source, tmp_path / "hs.zarr")
    return tmp_path / "hs.zarr"


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.filterwarnings("ignore:Numcodecs codecs")
def test_plain_zarr_reads_every_array(cached):
    path, writer = cached
    group = zarr.open_group(str(path), mode="r")
    expected = [shard_arrays(writer, shard) for shard in range(3)]
    for name in expected[0]:
        np.testing.assert_array_equal(group[name][:], np.concatenate([arrays[name] for arrays in expected]))
    assert group.attrs["dflash"]["complete"] is True
    kinds = {"bf16": "bfloat16", "bf16-zstd": "bfloat16", "fp8": "float8_e4m3fn", "int4": "int4"}
    codec = writer.manifest.identity.codec
    assert group["hidden/2"].attrs.get("dtype") == kinds.get(codec)
    if codec in ("int8", "int4"):
        assert dict(group["hidden_outliers/2"].attrs) == {"dtype": "bfloat16", "channels": [2, 3, 4, 5, 6, 7, 8, 9]}


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_rows_of_any_layers_are_what_was_written(cached, data):
    path, writer = cached
    layers = data.draw(st.lists(st.sampled_from([0, 2, 3]), min_size=1, unique=True).map(sorted))
    offset = data.draw(st.integers(0, 191))
    length = data.draw(st.integers(1, 192 - offset))
    cache = open_cache(str(path), layers)
    expected = [shard_arrays(writer, shard) for shard in range(3)]
    hidden_nLH = cache.hidden(offset, length, layers)
    for position, layer in enumerate(layers):
        own = {
            family: np.concatenate([arrays[f"{family}/{layer}"] for arrays in expected])[offset : offset + length]
            for family in cache.codec.families
        }
        assert torch.equal(hidden_nLH[:, position], writer.codec.decode(own, layer))
    ids, mask = cache.tokens(offset, length)
    np.testing.assert_array_equal(
        ids.numpy(), np.concatenate([a["tokens/input_ids"] for a in expected])[offset : offset + length]
    )
    np.testing.assert_array_equal(
        mask.numpy(), np.concatenate([a["tokens/loss_mask"] for a in expected])[offset : offset + length]
    )


@pytest.mark.filterwarnings("ignore:Numcodecs codecs")
def test_every_array_reads_as_plain_zarr_reads_it(cached):
    path, _ = cached
    group, cache = zarr.open_group(str(path), mode="r"), open_cache(str(path))
    draw = np.random.default_rng(0)
    for name in cache.arrays:
        for _ in range(20):
            offset = int(draw.integers(0, 192))
            length = int(draw.integers(1, 193 - offset))
            np.testing.assert_array_equal(cache.rows(name, offset, length), group[name][offset : offset + length])


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_samples_end_to_end_are_the_samples_one_by_one(cached, data):
    cache = open_cache(str(cached[0]))
    offsets = data.draw(st.lists(st.integers(0, 191), max_size=6))
    spans = [(offset, data.draw(st.integers(1, 192 - offset))) for offset in offsets]
    layers = data.draw(st.lists(st.sampled_from([0, 2, 3]), min_size=1, unique=True))
    ids, mask, states = cache.samples(spans, layers)
    together = ids, mask, states.decode()
    for start, (offset, length) in zip(np.cumsum([0, *(n for _, n in spans)]), spans, strict=False):
        own = slice(int(start), int(start) + length)
        alone = *cache.tokens(offset, length), cache.hidden(offset, length, layers)
        assert all(torch.equal(packed[own], one) for packed, one in zip(together, alone, strict=True))
    assert {len(packed) for packed in together} == {sum(length for _, length in spans)}


@pytest.mark.parametrize("where", [0, -1, -20])
def test_any_flipped_byte_of_a_shard_is_seen(cached, tmp_path, where):
    path = copy(cached[0], tmp_path)
    victim = path / "hidden/2/c/1/0"
    data = bytearray(victim.read_bytes())
    data[where] ^= 1
    victim.write_bytes(bytes(data))
    with pytest.raises(CacheDamaged, match=r"hidden/2, shard 1: .*checksum"):
        open_cache(str(path)).hidden(64, 64, [2])


def test_any_order_and_any_restart_give_the_same_bytes(tmp_path):
    make_cache(tmp_path / "once")
    begin_cache(tmp_path / "often")
    for shard in (2, 0):
        writer = CacheWriter.resume(str(tmp_path / "often"))
        writer.commit_shard(shard, shard_arrays(writer, shard))
    writer = CacheWriter.resume(str(tmp_path / "often"))
    assert writer.missing_shards() == [1]
    writer.commit_shard(1, shard_arrays(writer, 1))
    for key in ("target/head.safetensors", "target/config.json"):
        writer.put_file(key, (tmp_path / "once" / key).read_bytes())
    assert writer.finish().complete
    assert files(tmp_path / "once") == files(tmp_path / "often")
    assert not list(tmp_path.glob("*/.tmp-*"))
    assert not (tmp_path / "often" / "plan.parquet").exists()


@pytest.mark.parametrize("harm", ["truncate", "remove", "record"])
def test_a_harmed_shard_is_done_again(tmp_path, harm):
    writer = begin_cache(tmp_path / "hs.zarr")
    for shard in range(3):
        writer.commit_shard(shard, shard_arrays(writer, shard))
    victim = tmp_path / "hs.zarr" / ("shards/000001.json" if harm == "record" else "hidden/2/c/1/0")
    if harm == "truncate":
        victim.write_bytes(victim.read_bytes()[:-1])
    else:
        victim.unlink()
    assert CacheWriter.resume(str(tmp_path / "hs.zarr")).missing_shards() == [1]


def test_killed_before_the_plan_was_written(tmp_path):
    begin_cache(tmp_path / "hs.zarr")
    (tmp_path / "hs.zarr" / "plan.parquet").unlink()
    assert CacheWriter.resume(str(tmp_path / "hs.zarr")) is None


def test_an_incomplete_cache_is_refused_with_its_progress(tmp_path):
    writer = begin_cache(tmp_path / "hs.zarr")
    writer.commit_shard(0, shard_arrays(writer, 0))
    with pytest.raises(CacheError, match="1 of 3 shards"):
        open_cache(str(tmp_path / "hs.zarr"))


@pytest.mark.parametrize(
    ("harm", "error", "message"),
    [
        (lambda p: (p / "hidden/2/c/1/0").unlink(), CacheDamaged, "hidden/2/c/1/0 is missing"),
        (lambda p: (p / "hidden/3/c/0/0").write_bytes(b"short"), CacheDamaged, "5 bytes"),
        (lambda p: (p / "shards/000002.json").unlink(), CacheDamaged, "record of shard 2"),
        (lambda p: (p / "shards/000002.json").write_text("{"), CacheError, "not JSON"),
        (lambda p: (p / "index.parquet").write_bytes(b"PAR1"), CacheDamaged, "index.parquet"),
        (lambda p: (p / "zarr.json").write_text("{"), CacheError, "not JSON"),
        (lambda p: (p / "zarr.json").write_text('{"attributes": {}}'), CacheError, "no hidden-state cache"),
        (lambda p: (p / "zarr.json").unlink(), CacheError, "no zarr.json"),
    ],
)
def test_damage_is_refused_when_the_cache_is_opened(cached, tmp_path, harm, error, message):
    path = copy(cached[0], tmp_path)
    harm(path)
    with pytest.raises(error, match=message) as caught:
        open_cache(str(path))
    assert "\n" not in str(caught.value)


def test_a_flipped_bit_is_refused_when_it_is_read(cached, tmp_path):
    path = copy(cached[0], tmp_path)
    victim = path / "hidden/2/c/1/0"
    data = bytearray(victim.read_bytes())
    data[3] ^= 4
    victim.write_bytes(bytes(data))
    cache = open_cache(str(path))
    cache.hidden(64, 10, [0, 3])
    with pytest.raises(CacheDamaged, match="hidden/2, shard 1"):
        cache.hidden(64, 10, [2])


def test_a_layer_that_is_not_there_is_refused_with_those_that_are(cached):
    with pytest.raises(CacheError, match=r"layer 1 .* holds 0, 2, 3"):
        open_cache(str(cached[0]), [0, 1])


def test_damage_to_an_unread_layer_does_not_matter(cached, tmp_path):
    path = copy(cached[0], tmp_path)
    (path / "hidden/2/c/1/0").unlink()
    assert open_cache(str(path), [0, 3]).layers == (0, 3)


def test_another_version_is_refused(cached, tmp_path):
    path = copy(cached[0], tmp_path)
    root = json.loads((path / "zarr.json").read_text())
    root["attributes"]["dflash"]["version"] = 2
    (path / "zarr.json").write_text(json.dumps(root))
    with pytest.raises(CacheError, match="version 2"):
        open_cache(str(path))


def test_existing_manifest(tmp_path, cached):
    assert existing_manifest(str(tmp_path / "new")) is None
    (tmp_path / "empty").mkdir()
    assert existing_manifest(str(tmp_path / "empty")) is None
    assert existing_manifest(str(cached[0])).complete
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(CacheError, match="something else"):
        existing_manifest(str(tmp_path / "other"))
    with pytest.raises(CacheError, match="is a file"):
        existing_manifest(str(tmp_path / "other" / "thesis.txt"))
    with pytest.raises(OptionError, match=r"thesis\.txt is a file, not a folder"):
        existing_manifest(str(tmp_path / "other" / "thesis.txt" / "hs.zarr"))
    with pytest.raises(OptionError, match="too long"):
        existing_manifest(str(tmp_path / ("x" * 300)))


def test_a_place_that_cannot_be_written_is_refused_unless_the_work_is_done(tmp_path, cached, monkeypatch):
    monkeypatch.setattr("cache.store.os.access", lambda *_: False)
    with pytest.raises(OptionError, match="cannot be written"):
        existing_manifest(str(tmp_path / "new" / "hs.zarr"))
    assert existing_manifest(str(cached[0])).complete


def test_other_settings_or_data_are_refused_with_both_values(cached):
    found = existing_manifest(str(cached[0]))
    source = found.sources[0]
    same = [("moved.jsonl", source.sha256, source.rows)]
    check_same("hs.zarr", found, found.identity, same)
    with pytest.raises(CacheError, match=r"layers \(0, 2, 3\).*\(1,\)"):
        check_same("hs.zarr", found, found.identity.model_copy(update={"layers": (1,)}), same)
    with pytest.raises(CacheError, match=r"sha256 d{16}, x has e{16}"):
        check_same("hs.zarr", found, found.identity, [("x", "e" * 64, source.rows)])
    with pytest.raises(CacheError, match=r"12 rows .* takes 3"):
        check_same("hs.zarr", found, found.identity, [("x", source.sha256, 3)])
    with pytest.raises(CacheError, match="1 data files"):
        check_same("hs.zarr", found, found.identity, [])


def test_index_is_the_first_rows_the_manifest_counts(cached):
    path, _ = cached
    cache = open_cache(str(path))
    assert cache.index.equals(plan(3, 64).select(cache.index.schema.names))
    assert pq.read_table(path / "index.parquet").num_rows == cache.manifest.totals.samples


def test_head_is_tied_and_scaled(cached):
    head = open_cache(str(cached[0])).head()
    assert head.lm_head_VH is head.embed_VH
    ids = torch.tensor([[3, 5]])
    assert torch.equal(head.embed(ids), head.embed_VH[ids])
