"""Everything on disk and in configs: round trips, unknown keys, wrong types, versions."""

import datetime
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cache_fixtures import identity, manifest, plan

from schemas.arrays import array_specs, bytes_per_token, chunk_rows, chunk_tokens
from schemas.errors import CacheDamaged, CacheError, CaptureFault, DflashError, Interrupted, OptionError, UserError
from schemas.index import INDEX_SCHEMA, PLAN_SCHEMA, check_table
from schemas.manifest import ATTRIBUTE, first_difference, read_manifest
from schemas.options import CaptureOptions, EvaluateOptions, RegenerateOptions, TrainOptions
from schemas.records import CommitRecord, ObjectRecord, record_name
from schemas.strict import parse


def through_json(model):
    return json.loads(model.model_dump_json())


def test_manifest_round_trip():
    one = manifest(plan(2, 64), identity())
    assert read_manifest({ATTRIBUTE: through_json(one)}, "hs.zarr") == one


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(version=2), "version 2"),
        (lambda m: m.update(format="other"), "no hidden-state cache"),
        (lambda m: m.update(surprise=1), "surprise: unknown key"),
        (lambda m: m["identity"].update(layers=[3, 1]), "ascending"),
        (lambda m: m["identity"].update(layers=[]), "identity.layers"),
        (lambda m: m["identity"].update(top_k="64"), "identity.top_k"),
        (lambda m: m["identity"].update(codec="float16"), "identity.codec"),
        (lambda m: m["identity"]["chunk_tokens"].pop("tokens"), "chunk_tokens has no tokens"),
        (lambda m: m["identity"]["chunk_tokens"].update(hidden=7), "hidden 7 does not divide shard_tokens 64"),
        (lambda m: m["identity"]["chunk_tokens"].update(hidden=0), "chunk_tokens.hidden"),
        (lambda m: m["totals"].update(shards=-1), "totals.shards"),
        (lambda m: m["totals"].update(samples=0), "totals.samples"),
        (lambda m: m["identity"]["target"].pop("hidden_size"), "identity.target.hidden_size: missing"),
        (lambda m: m.update(mask_token_source="guess"), "mask_token_source"),
    ],
)
def test_manifest_refuses(change, message):
    data = through_json(manifest(plan(2, 64), identity()))
    change(data)
    with pytest.raises(CacheError, match=message) as caught:
        read_manifest({ATTRIBUTE: data}, "hs.zarr")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_first_difference_names_the_nested_field():
    one = identity()
    other = one.model_copy(update={"target": one.target.model_copy(update={"name": "else"})})
    assert first_difference(one, other) == ("target.name", "tiny", "else")
    assert first_difference(one, one) is None


def test_commit_record_round_trip_and_refusals():
    one = CommitRecord(
        shard=3,
        rows=(192, 256),
        plan_sha256="e" * 64,
        objects={"hidden/1/c/3/0": ObjectRecord(bytes=7, crc32c="0123abcd")},
    )
    assert parse(CommitRecord, through_json(one), "x", CacheError) == one
    assert record_name(3) == "shards/000003.json"
    for key, value in {"shard": -1, "rows": [1], "objects": {"a": {"bytes": 1, "crc32c": "xyz"}}, "extra": 0}.items():
        with pytest.raises(CacheError, match=key):
            parse(CommitRecord, {**through_json(one), key: value}, "x", CacheError)


@pytest.mark.parametrize(("schema", "columns"), [(PLAN_SCHEMA, 14), (INDEX_SCHEMA, 11)])
def test_tables_round_trip_through_parquet(schema, columns):
    table = plan(2, 64).select(schema.names)
    assert len(schema) == columns
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    assert check_table(pq.read_table(io.BytesIO(buffer.getvalue())), schema, "x").equals(table)


def test_tables_refuse_missing_unknown_and_wrong_columns():
    table = plan(2, 64)
    with pytest.raises(CacheError, match="'offset' is missing"):
        check_table(table.drop_columns(["offset"]), PLAN_SCHEMA, "x")
    with pytest.raises(CacheError, match="unknown column 'more'"):
        check_table(table.append_column("more", pa.array([1] * len(table))), PLAN_SCHEMA, "x")
    position = table.schema.get_field_index("offset")
    with pytest.raises(CacheError, match="'offset' holds string"):
        check_table(table.set_column(position, "offset", pa.array(["1"] * len(table))), PLAN_SCHEMA, "x")


@pytest.mark.parametrize(
    ("codec", "hidden_bytes", "families"),
    [
        ("f32", 4 * 16, {"hidden"}),
        ("bf16", 2 * 16, {"hidden"}),
        ("bf16-zstd", 2 * 16, {"hidden"}),
        ("fp8", 16 + 4, {"hidden", "hidden_scale"}),
        ("int8", 16 + 4 + 16, {"hidden", "hidden_scale", "hidden_outliers"}),
        ("int4", 8 + 4 + 16, {"hidden", "hidden_scale", "hidden_outliers"}),
    ],
)
def test_every_codec_has_its_arrays(codec, hidden_bytes, families):
    who = identity(codec)
    specs = {spec.name: spec for spec in array_specs(who, 3)}
    assert {name.split("/")[0] for name in specs} - {"tokens", "logits"} == families
    assert bytes_per_token(who) == (3 * hidden_bytes + 4 + 1 + 4 * (4 + 2) + 4, 3 * hidden_bytes)
    assert all(spec.shape[0] == 3 * 64 and 64 % spec.chunk_rows == 0 for spec in specs.values())
    assert specs["hidden/2"].shape[1] == (8 if codec == "int4" else 16)
    assert specs["hidden/2"].object_key(1) == "hidden/2/c/1/0"
    assert specs["tokens/input_ids"].object_key(1) == "tokens/input_ids/c/1"


def test_chunks_are_about_a_mebibyte_of_whole_rows():
    assert chunk_rows(4096 * 2, 65_536) == 128
    assert chunk_rows(192 * 4, 16_384) == 1024
    assert chunk_rows(1 << 22, 64) == 1
    assert chunk_rows(768, 100) == 100  # divides the shard, whatever its size
    assert chunk_rows(768, 100_000) == 1250
    assert chunk_rows(768, 65_537) == 1, "a prime"
    assert chunk_tokens("f32", 192, 8, 30_000)["tokens"] == 15_000
    assert chunk_tokens("int4", 4096, 64, 65_536)["hidden"] == 512


@pytest.mark.parametrize(
    ("model", "minimal"),
    [
        (CaptureOptions, {"target": "t"}),
        (RegenerateOptions, {"target": "t", "prompts": "p", "out": "o"}),
        (TrainOptions, {}),
        (EvaluateOptions, {"draft": "d"}),
    ],
)
def test_options_round_trip_and_refuse_unknown_keys(model, minimal):
    options = parse(model, minimal, "options", OptionError)
    assert parse(model, through_json(options), "options", OptionError) == options
    with pytest.raises(OptionError, match="surprise: unknown key"):
        parse(model, {**minimal, "surprise": 1}, "options", OptionError)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"draft": {"block_size": 1}}, "draft.block_size"),
        ({"draft": {"kind": "eagle"}}, "draft.kind"),
        ({"optim": {"lr": "fast"}}, "optim.lr"),
        ({"optim": {"betas": [0.9]}}, "optim.betas"),
        ({"run": {"steps": 10, "epochs": 2}}, "steps and epochs"),
        ({"optim": {"warmup": 1.5}}, "optim.warmup: from 1 on it is a number of steps"),
        ({"data": {"anchor_rate": 1.2}}, "data.anchor_rate"),
        ({"log": {"to": ["mlflow"]}}, "log.to"),
        ({"loss": {"gamma": "often"}}, "loss.gamma"),
        ({"loss": {"gamma": -3.0}}, "loss.gamma"),
        ({"loss": {"gamma": 0}}, "loss.gamma"),
        ({"optim": {"lr": float("inf")}}, "config.yaml"),
        ({"optim": {"lr": float("nan")}}, "config.yaml"),
        ({"data": {"seed": datetime.date(2024, 1, 1)}}, "data.seed.*2024-01-01"),
    ],
)
def test_train_options_refuse(data, message):
    with pytest.raises(OptionError, match=message) as caught:
        parse(TrainOptions, data, "config.yaml", OptionError)
    assert "\n" not in str(caught.value)


def test_exit_codes_of_the_error_tree():
    assert (UserError("x").exit_code, OptionError("x").exit_code, CacheError("x").exit_code) == (2, 2, 2)
    assert (DflashError("x").exit_code, CaptureFault("x").exit_code, CacheDamaged("x").exit_code) == (1, 1, 1)
    assert Interrupted("x").exit_code == 143
