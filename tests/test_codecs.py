"""Every codec against a naive loop over values, its size, its error on real states, and its arrays as zarr-python reads them."""

import json
import math
import warnings
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import zarr
from capture_fixtures import TINY_CHAT, Recorder, capture_options, random_target, shipped_rows, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from cache import lent
from cache.calibrate import calibration_samples, widest_channels
from cache.chunks import ChunkReader
from cache.codecs import HiddenCodec, check_codec
from cache.layout import write_arrays
from cache.mapped import MappedFiles
from cache.quantise import pack_nibbles, unpack_nibbles
from cache.read import open_cache
from cache.rows import read_rows
from cache.shard import encode_shard
from cache.store import LocalStore
from capture.run import capture
from schemas.arrays import array_specs, bytes_per_token, chunk_tokens
from schemas.errors import CacheDamaged, OptionError

CODECS = ["f32", "bf16", "bf16-zstd", "fp8", "int8", "int4"]
CHANNELS = (1, 2, 3, 5, 8, 9, 11, 14)


def bf16(value):
    """The nearest bfloat16, ties to even, by the bits of the float32."""
    bits = int(np.float32(value).view(np.uint32))
    return np.uint32((bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000) & 0xFFFFFFFF).view(np.float32)


def e4m3(bits):
    """float8_e4m3fn from its definition: 1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinities."""
    exponent, mantissa, sign = bits >> 3 & 15, bits & 7, -1.0 if bits & 128 else 1.0
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def nearest_e4m3(value):
    """The bits of the nearest one; of two equally near the even one."""
    finite = range(127)
    best = min(finite, key=lambda bits: (abs(e4m3(bits) - abs(value)), bits & 1))
    return best | (128 if math.copysign(1, value) < 0 else 0)


def naive(rows, codec):
    """Arrays and decoded rows of float32 rows, value by value."""
    largest = {"fp8": 448, "int8": 127, "int4": 7}[codec]
    apart = CHANNELS if codec != "fp8" else ()
    scales, stored, decoded = [], [], []
    for row in rows:
        inner = [np.float32(0) if c in apart else value for c, value in enumerate(row)]
        scale = np.float32(max(abs(value) for value in inner)) / np.float32(largest)
        whole = []
        for value in inner:
            share = value / scale if scale > 0 else np.float32(0)
            share = min(max(share, np.float32(-largest)), np.float32(largest))
            whole.append(nearest_e4m3(share) if codec == "fp8" else round(float(share)))
        values = [e4m3(bits) for bits in whole] if codec == "fp8" else whole
        back = [bf16(np.float32(value) * scale) for value in values]
        for channel in apart:
            back[channel] = bf16(row[channel])
        if codec == "int4":
            whole = [(low & 15) | (high & 15) << 4 for low, high in zip(whole[::2], whole[1::2], strict=True)]
        scales.append(scale)
        stored.append(whole)
        decoded.append(back)
    return np.array(scales), np.array(stored), np.array(decoded)


def difficult_rows(draw, count, width=16):
    rows = draw.standard_normal((count, width)).astype(np.float32) * 10.0 ** draw.integers(-6, 5, (count, 1))
    rows[:, 5] *= 1000
    rows[0] = 0
    rows[1, [c for c in range(width) if c not in CHANNELS]] = 0
    rows[2] = np.float32(1e-45)
    rows[3] = np.float32(3e38)
    rows[4] = (np.arange(width) - 8) / 2
    return rows.astype(np.float32)


@pytest.mark.parametrize("codec", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("seed", range(3))
def test_quantised_rows_are_those_of_a_loop_over_values(codec, seed):
    rows = difficult_rows(np.random.default_rng(seed), 12)
    own = HiddenCodec(codec, {4: CHANNELS})
    arrays = own.encode(torch.from_numpy(rows), 4)
    scale, stored, decoded = naive(rows, codec)
    np.testing.assert_array_equal(arrays["hidden_scale"], scale)
    np.testing.assert_array_equal(arrays["hidden"], stored.astype(arrays["hidden"].dtype))
    assert arrays["hidden"].shape[1] == (8 if codec == "int4" else 16)
    np.testing.assert_array_equal(own.decode(arrays, 4).float().numpy(), decoded)


def test_a_row_of_zeros_is_zeros_on_disk_and_back():
    for codec in ("fp8", "int8", "int4"):
        own = HiddenCodec(codec, {0: CHANNELS})
        arrays = own.encode(torch.zeros(2, 16), 0)
        assert not any(values.any() for values in arrays.values()) and not own.decode(arrays, 0).any()


def test_nibbles_low_one_first_and_every_byte_both_ways():
    assert pack_nibbles(torch.tensor([[1, -1, 7, -7]], dtype=torch.int8)).tolist() == [[0xF1, 0x97]]
    every = torch.arange(256, dtype=torch.uint8)[None]
    assert torch.equal(pack_nibbles(unpack_nibbles(every)), every)


@pytest.mark.parametrize("codec", CODECS)
def test_a_round_trip_is_what_a_cache_gives_back(codec):
    hidden = torch.from_numpy(difficult_rows(np.random.default_rng(0), 30)).view(10, 3, 16)
    own = HiddenCodec(codec, {layer: tuple(range(layer, layer + 8)) for layer in (0, 2, 7)})
    by_layer = [own.decode(own.encode(hidden[:, place], layer), layer) for place, layer in enumerate((0, 2, 7))]
    assert torch.equal(own.roundtrip(hidden, (0, 2, 7)), torch.stack(by_layer, 1))
    exact = {"f32": hidden, "bf16": hidden.bfloat16(), "bf16-zstd": hidden.bfloat16()}
    if codec in exact:
        assert torch.equal(torch.stack(by_layer, 1), exact[codec])


@pytest.fixture(scope="module")
def real_states():
    """tiny-chat's own states of three layers over shipped conversations: {layer: [T, H]}."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_CHAT)
    model = AutoModelForCausalLM.from_pretrained(TINY_CHAT, dtype=torch.float32).eval()
    rows = {1: [], 2: [], 4: []}
    with torch.inference_mode():
        for row in shipped_rows(24):
            ids = tokenizer(row["messages"][-1]["content"], return_tensors="pt")["input_ids"][:, :256]
            states = model(input_ids=ids, output_hidden_states=True).hidden_states
            for layer, own in rows.items():
                own.append(states[layer + 1][0])
    return {layer: torch.cat(own) for layer, own in rows.items()}


@pytest.mark.parametrize(
    ("codec", "least", "most"),
    [("bf16", 1e-3, 0.003), ("fp8", 0.01, 0.03), ("int8", 0.004, 0.009), ("int4", 0.08, 0.13)],
)
def test_the_error_on_real_states_is_what_the_format_says(real_states, codec, least, most):
    for layer, rows_TH in real_states.items():
        own = HiddenCodec(codec, {layer: widest_channels([rows_TH])})
        back_TH = own.decode(own.encode(rows_TH, layer), layer).float()
        error = float(((back_TH - rows_TH).norm(dim=1) / rows_TH.norm(dim=1)).mean())
        assert least < error < most


def test_shuffle_and_zstd_shrink_real_states(real_states):
    rows = np.concatenate([HiddenCodec("bf16").encode(own, 0)["hidden"] for own in real_states.values()])
    rows = np.ascontiguousarray(rows[: len(rows) // 512 * 512])
    small = sum(map(len, encode_shard(rows, 512, shuffled_zstd=True)))
    assert 1.3 < rows.nbytes / small < 1.6


@pytest.mark.parametrize(("codec", "ratio"), [("fp8", 0.51), ("int8", 0.53), ("int4", 0.28)])
@pytest.mark.parametrize("hidden", [576, 1024, 4096])
def test_bytes_per_token_with_scales_and_outliers(codec, ratio, hidden):
    from cache_fixtures import identity

    def size(name):
        who = identity(name)
        return bytes_per_token(
            who.model_copy(update={"target": who.target.model_copy(update={"hidden_size": hidden})})
        )[1]

    assert size(codec) / size("bf16") <= ratio


class Unmapped(MappedFiles):
    """Nothing lies in memory: all is read."""

    def file(self, *_):
        return None


@settings(max_examples=12, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("codec", CODECS)
def test_any_chunk_and_shard_size_reads_as_zarr_reads_it(codec, data, tmp_path_factory):
    from cache_fixtures import identity, manifest, outliers, plan

    folder = tmp_path_factory.mktemp("any")
    chunks = data.draw(st.integers(1, 4))
    rows, shards = chunks * data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3))
    who = identity(codec, layers=(0, 1))
    sizes = dict.fromkeys(chunk_tokens(codec, 16, 4, 64), rows // chunks)
    who = who.model_copy(update={"shard_tokens": rows, "chunk_tokens": sizes})
    table = manifest(plan(shards, 64), who)
    store, draw = LocalStore(folder), np.random.default_rng(data.draw(st.integers(0, 99)))
    write_arrays(store, table, outliers(who))
    store.put("zarr.json", [b'{"zarr_format": 3, "node_type": "group", "attributes": {}}'])
    together = data.draw(st.sampled_from((1, 300, lent.VERIFIED_BYTES)))
    with warnings.catch_warnings(), patch.object(lent, "VERIFIED_BYTES", together):
        warnings.filterwarnings("ignore", message="Numcodecs codecs")
        group = zarr.open_group(str(folder), mode="r")
        for spec in array_specs(who, shards):
            whole = draw.integers(0, 200, spec.shape).astype(spec.dtype)
            for shard in range(shards):
                part = np.ascontiguousarray(whole[shard * rows : (shard + 1) * rows])
                store.put(spec.object_key(shard), encode_shard(part, spec.chunk_rows, spec.shuffled_zstd))
            readers = [
                ChunkReader(replace(store, mapped=way), spec, verify_every=3) for way in (MappedFiles(), Unmapped())
            ]
            np.testing.assert_array_equal(group[spec.name][:], whole)
            for reader in readers * 5:  # first verified, then sampled
                offset = int(draw.integers(0, rows * shards))
                length = int(draw.integers(1, rows * shards - offset + 1))
                np.testing.assert_array_equal(
                    read_rows([reader], [(offset, length)])[0], whole[offset : offset + length]
                )


def test_channels_are_the_widest_by_mean_magnitude_and_ties_go_to_the_first():
    rows = torch.ones(6, 12)
    rows[:, 4] = 3
    rows[0, 9] = 1000
    rows[:, 11] = -2
    assert widest_channels([rows[:2], rows[2:]]) == (0, 1, 2, 3, 4, 5, 9, 11)
    assert [calibration_samples(lengths) for lengths in ([5], [8192, 1], [8191, 1, 7], [4000] * 9)] == [1, 1, 2, 3]


def test_a_target_too_narrow_for_a_codec_is_refused():
    assert check_codec("int4", 16) == "int4"
    for codec, hidden, what in (("int8", 8, "8 channels apart"), ("int4", 8, "channels"), ("int4", 17, "odd")):
        with pytest.raises(OptionError, match=what):
            check_codec(codec, hidden)


@pytest.mark.parametrize("codec", CODECS)
def test_capture_verify_and_read_end_to_end(codec, tmp_path, capsys):
    from cache.verify import verify
    from pipeline.cli import main

    target = random_target(tmp_path / "tiny", dtype=torch.bfloat16)
    data = write_jsonl(tmp_path / "rows.jsonl", shipped_rows(16))
    for name, batch_tokens in (("exact", 512), ("hs", 512)):
        options = {"layers": (0, 2), "dtype": "bfloat16", "batch_tokens": batch_tokens}
        capture(
            capture_options(target, data, tmp_path / name, codec="bf16" if name == "exact" else codec, **options),
            Recorder(),
        )
    assert verify(str(tmp_path / "hs"), True, Recorder())[1] == []
    exact, stored = open_cache(str(tmp_path / "exact")), open_cache(str(tmp_path / "hs"))
    row = exact.index.slice(3, 1).to_pylist()[0]
    hidden = exact.hidden(row["offset"], row["length"], (0, 2))
    expected = hidden.float() if codec == "f32" else stored.codec.roundtrip(hidden, (0, 2))
    assert torch.equal(stored.hidden(row["offset"], row["length"], (0, 2)), expected)
    if codec in ("int8", "int4"):
        rows = [exact.hidden(r["offset"], r["length"], (0, 2)) for r in exact.index.to_pylist()]
        assert stored.codec.channels == {n: widest_channels([r[:, n // 2] for r in rows]) for n in (0, 2)}
    with pytest.raises(SystemExit) as caught:
        main(["inspect", str(tmp_path / "hs")])
    assert caught.value.code == 0 and f"{codec}: " in capsys.readouterr().out


def test_channels_that_are_not_there_are_damage(tmp_path):
    from cache_fixtures import make_cache

    from cache.verify import verify

    make_cache(tmp_path / "hs", "int8")
    path = tmp_path / "hs" / "hidden_outliers" / "2" / "zarr.json"
    document = json.loads(path.read_text())
    document["attributes"]["channels"] = [1, 1, 2, 3, 4, 5, 6, 7]
    path.write_text(json.dumps(document))
    with pytest.raises(CacheDamaged, match="which 8 channels"):
        open_cache(str(tmp_path / "hs"))
    assert open_cache(str(tmp_path / "hs"), [0, 3]).layers == (0, 3)
    (fault,) = verify(str(tmp_path / "hs"), False, Recorder())[1]
    assert "which 8 channels" in fault.what
