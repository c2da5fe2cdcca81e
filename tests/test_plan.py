"""The plan: packing, batches, tables and totals."""

from itertools import combinations, pairwise

import numpy as np
import pyarrow as pa
import pytest
from capture_fixtures import TINY_CHAT, shipped_rows, talk, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

from capture import plan as plan_module
from capture.collect import DUPLICATE, collect
from capture.lines import scan_files
from capture.plan import assign_batches, build_plan, default_shard_tokens, pack
from capture.samples import SampleRules
from capture.settings import DEFAULT_DATA
from schemas.errors import DataError
from schemas.index import PLAN_SCHEMA
from schemas.manifest import Identity, TargetIdentity
from target.chat import open_chat
from target.load import resolve_target

RULES = SampleRules("tok", 2048, 256, 0.2)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 64), min_size=1, max_size=200), st.integers(1, 6))
def test_pack_never_overfills_or_skips_a_shard(lengths, open_shards):
    shard_of = pack(lengths, 64, open_shards)
    filled = np.bincount(shard_of, weights=lengths)
    assert filled.max() <= 64
    assert filled.min() > 0
    firsts = [shard_of.index(shard) for shard in range(len(filled))]
    assert firsts == sorted(firsts), "shards are numbered in the order in which they are begun"


def test_pack_fills_real_mixes_to_99_percent():
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6, 0.9, size=20_000), 16, 4096).astype(int).tolist()
    filled = np.bincount(pack(lengths, 65_536), weights=lengths)
    assert filled[:-1].mean() > 0.99 * 65_536


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=80), st.integers(1, 200))
def test_batches_stay_under_the_budget(lengths, budget):
    batch_of = assign_batches(np.array(lengths), budget)
    assert sorted(set(batch_of.tolist())) == list(range(batch_of.max() + 1))
    for batch in range(batch_of.max() + 1):
        inside = np.array(lengths)[batch_of == batch]
        assert len(inside) == 1 or len(inside) * inside.max() <= budget
    longest = [np.array(lengths)[batch_of == batch].max() for batch in range(batch_of.max() + 1)]
    assert longest == sorted(longest, reverse=True)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=9), st.integers(50, 900))
def test_batches_cost_the_least_of_all_ways_to_cut(lengths, budget):
    """Against every way to cut the sorted samples into batches."""
    longest_first, count = sorted(lengths, reverse=True), len(lengths)

    def cost(bounds):
        pieces = [longest_first[a:b] for a, b in pairwise((0, *bounds, count))]
        if any(len(piece) > 1 and len(piece) * piece[0] > budget for piece in pieces):
            return np.inf
        return sum(len(piece) * piece[0] + plan_module.BATCH_COST for piece in pieces)

    cuts = (bounds for size in range(count) for bounds in combinations(range(1, count), size))
    batch_of = assign_batches(np.array(lengths), budget)
    pieces = [[n for n, b in zip(lengths, batch_of, strict=True) if b == batch] for batch in range(batch_of.max() + 1)]
    found = sum(len(piece) * max(piece) + plan_module.BATCH_COST for piece in pieces)
    assert found == min(cost(bounds) for bounds in cuts)


@pytest.mark.parametrize(("shard_tokens", "most"), [(65_536, 0.02), (16_384, 0.03)])
def test_conversations_hardly_need_padding(shard_tokens, most):
    chat = open_chat(resolve_target(str(TINY_CHAT)))
    data = collect(chat, scan_files((str(DEFAULT_DATA),), None), RULES, lambda *_: None)
    shards, totals = build_plan(data, shard_tokens, 16_384)
    table = pa.concat_tables(shards)
    shard, batch, length = (table[name].to_numpy().astype(np.int64) for name in ("shard", "batch", "length"))
    _, group = np.unique(shard * 10_000 + batch, return_inverse=True)
    longest = np.zeros(group.max() + 1, np.int64)
    np.maximum.at(longest, group, length)
    places = (np.bincount(group) * longest).sum()
    assert 1 - length.sum() / places <= most
    filled = np.bincount(shard, weights=length) / shard_tokens
    assert filled[:-1].min() >= 0.99, "all but the last, which takes what is left"
    assert totals.tokens == length.sum()


def collected(tmp_path, rows, rules=RULES, name="rows.jsonl"):
    chat = open_chat(resolve_target(str(TINY_CHAT)))
    steps: list[tuple[int, int]] = []
    result = collect(
        chat, scan_files((write_jsonl(tmp_path / name, rows),), None), rules, lambda *step: steps.append(step)
    )
    assert steps[-1] == (len(rows), len(rows))
    return result


def test_plan_table(tmp_path):
    rows = shipped_rows(40)
    data = collected(tmp_path, [*rows, rows[3], {**rows[4], "id": "again"}])
    (source,) = data.sources
    assert (source.rows, source.kept, source.skipped) == (42, 40, {DUPLICATE: 2})
    assert data.duplicates == 2
    shards, totals = build_plan(data, 1024, 512)
    table = pa.concat_tables(shards)
    assert table.schema.equals(PLAN_SCHEMA)
    columns = table.to_pydict()
    assert columns["offset"] == sorted(columns["offset"])
    assert (totals.samples, totals.tokens) == (40, sum(columns["length"]))
    assert totals.supervised == sum(columns["supervised"]) == sum(map(sum, columns["loss_mask"]))
    assert totals.val_samples == columns["split"].count("val")
    assert totals.shards == max(columns["shard"]) + 1 > 2
    end = 0
    for offset, length, shard, ids in zip(
        *(columns[name] for name in ("offset", "length", "shard", "input_ids")), strict=True
    ):
        assert offset >= end
        assert len(ids) == length
        assert offset // 1024 == (offset + length - 1) // 1024 == shard, "a sample never crosses a shard"
        end = offset + length
    by_row = {sample.source_row: sample for sample in data.samples}
    for position, row in enumerate(columns["source_row"]):
        assert columns["input_ids"][position] == by_row[row].input_ids.tolist()
        assert columns["loss_mask"][position] == by_row[row].loss_mask.tolist()
        assert columns["row_id"][position] == rows[row]["id"]
    again, _ = build_plan(
        collected(tmp_path, [*rows, rows[3], {**rows[4], "id": "again"}], name="same.jsonl"), 1024, 512
    )
    assert pa.concat_tables(again).equals(table), "a pure function of its inputs"
    assert pa.concat_tables(shards).equals(table), "a plan can be gone through again"


def test_nothing_left_is_an_error(tmp_path):
    rows = [{**talk("a", "b"), "input_ids": [1, 2], "loss_mask": [0, 1], "tokenizer_sha256": "tok"}]
    with pytest.raises(DataError, match=r"none of 1 rows can be captured \(fewer than two supervised tokens: 1\)"):
        collected(tmp_path, rows)


def test_seen_ids(tmp_path):
    data = collected(
        tmp_path, [{**talk("a", "b"), "input_ids": [7, 2, 9], "loss_mask": [0, 1, 1], "tokenizer_sha256": "tok"}]
    )
    assert data.seen == {2, 7, 9}


@pytest.mark.parametrize(
    ("layers", "hidden", "codec", "tokens"),
    [
        ((1, 9, 17, 25, 33), 4096, "bf16", 16_384),
        ((1, 9, 17, 25), 4096, "bf16", 16_384),  # 32,768 tokens are exactly 1 GiB, not under it
        ((1, 2, 4), 192, "f32", 65_536),
        ((1, 9, 17, 25, 33), 4096, "f32", 8_192),
    ],
)
def test_default_shard_tokens(layers, hidden, codec, tokens):
    target = {"name": "t", "revision": "r", "architectures": (), "config_sha256": "", "num_hidden_layers": 36}
    target |= {"hidden_size": hidden, "vocab_size": 2048, "tied": True}
    target |= {"embedding_scale": 1.0, "logit_scale": 1.0, "logit_softcap": None}
    identity = {"layers": layers, "tokenizer_sha256": "", "chat_template_sha256": "", "codec": codec, "top_k": 64}
    identity |= {"dtype": "float32", "tp": 1, "mask_token_id": 0, "max_length": 64, "val_fraction": 0.0, "seed": 0}
    identity |= {"shard_tokens": 1, "batch_tokens": 1, "chunk_tokens": {"hidden": 1, "tokens": 1, "logits": 1}}
    assert default_shard_tokens(Identity(target=TargetIdentity(**target), **identity)) == tokens
