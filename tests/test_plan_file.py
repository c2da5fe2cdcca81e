"""plan.parquet by shard: any shard reads as that part of the table, at the cost of that part."""

import gc
import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cache_fixtures import plan as plan_table
from capture_fixtures import Recorder, capture_options, random_target, shipped_rows, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.plan import PLAN, Plan, write_plan
from cache.store import LocalStore
from capture import run as run_module
from capture import shards as shards_module
from capture.forward import shard_plan
from capture.samples import Sample
from schemas.errors import CacheError
from schemas.index import INDEX_SCHEMA, PLAN_SCHEMA


def table_of(shards: list[list[int]], first: int, seed: int) -> pa.Table:
    """A plan whose shards, numbered from `first`, hold samples of these lengths."""
    draw, rows = np.random.default_rng(seed), []
    for shard, lengths in enumerate(shards, first):
        offset = shard * 1000
        for length in lengths:
            ids, mask = draw.integers(0, 1 << 30, length), draw.integers(0, 2, length)
            rows.append(
                {
                    "sample_id": f"{len(rows):016x}-0",
                    "row_id": None if draw.integers(2) else f"row {len(rows)}",
                    "offset": offset,
                    "length": length,
                    "supervised": int(mask.sum()),
                    "truncated": bool(draw.integers(2)),
                    "split": "val" if draw.integers(2) else "train",
                    "shard": shard,
                    "source": 0,
                    "source_row": len(rows),
                    "tokens_sha256": f"{len(rows):064x}",
                    "input_ids": ids.tolist(),
                    "loss_mask": mask.tolist(),
                    "batch": int(draw.integers(5)),
                }
            )
            offset += length
    return pa.Table.from_pylist(rows, schema=PLAN_SCHEMA)


class CountingStore(LocalStore):
    """Counts the bytes that are read of it."""

    taken = 0

    def read(self, spans):
        CountingStore.taken += sum(span.size for span in spans)
        return super().read(spans)


@settings(max_examples=40, deadline=None)
@given(
    shards=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=8),
    first=st.sampled_from([0, 3]),
    seed=st.integers(0, 1000),
)
def test_any_shard_is_that_part_of_the_table(tmp_path_factory, shards, first, seed):
    store, table = LocalStore(tmp_path_factory.mktemp("plan")), table_of(shards, first, seed)
    written = write_plan(store, table)
    for plan in (written, Plan.open(store)):
        assert plan.sha256 == hashlib.sha256((store.root / PLAN).read_bytes()).hexdigest()
        assert plan.shards == list(range(first, first + len(shards)))
        assert plan.index().equals(table.select(INDEX_SCHEMA.names))
        assert plan.tokens(plan.shards) == sum(map(sum, shards))
        for shard, lengths in enumerate(shards, first):
            part = plan.shard(shard)
            assert part.equals(table.filter(pa.compute.equal(table["shard"], shard)))
            assert plan.tokens([shard]) == sum(lengths)
            assert shard_plan(part, shard, 1000).length.tolist() == lengths
    assert pq.read_table(store.root / PLAN).equals(table), "any Parquet reader sees the same rows"


def test_the_bytes_follow_from_the_rows_alone(tmp_path):
    table = table_of([[5, 9], [30], [1, 2, 3]], 0, 0)
    pieces = pa.concat_tables([table.slice(row, 1) for row in range(len(table))])
    first = write_plan(LocalStore(tmp_path / "a"), table).sha256
    assert write_plan(LocalStore(tmp_path / "b"), pieces).sha256 == first
    other = table.set_column(0, PLAN_SCHEMA.field(0), pa.array([f"x{row}" for row in range(len(table))]))
    assert write_plan(LocalStore(tmp_path / "c"), other).sha256 != first


def test_a_shard_costs_its_own_bytes(tmp_path):
    store = CountingStore(tmp_path)
    plan = write_plan(store, table_of([[900] * 3] * 40, 0, 1))
    CountingStore.taken = 0
    plan.shard(17)
    assert 3 * 900 < CountingStore.taken < plan.size / 20


def test_no_flipped_byte_changes_a_row_unseen(tmp_path):
    store = LocalStore(tmp_path)
    plan = write_plan(store, table_of([[30, 20], [40, 10]], 0, 2))
    path, good = tmp_path / PLAN, plan.shard(1)
    whole = path.read_bytes()
    group = plan.footer.row_group(1)
    seen = []
    for name in ("length", "input_ids.list.element", "loss_mask.list.element"):
        column = next(c for c in map(group.column, range(group.num_columns)) if c.path_in_schema == name)
        for place in range(column.dictionary_page_offset, column.dictionary_page_offset + column.total_compressed_size):
            harmed = bytearray(whole)
            harmed[place] ^= 1
            path.write_bytes(harmed)
            try:
                assert plan.shard(1).equals(good), "what a header says besides is no harm"
            except CacheError as fault:
                seen.append(str(fault))
    assert len(seen) > 400
    assert all("plan.parquet cannot be read" in text and "\n" not in text for text in seen)
    assert Plan.open(store).sha256 != plan.sha256


def test_a_torn_plan_is_refused(tmp_path):
    store = LocalStore(tmp_path)
    write_plan(store, table_of([[300], [400]], 0, 2))
    whole = (tmp_path / PLAN).read_bytes()
    for data in (whole[:-5], b"PAR1", b""):
        (tmp_path / PLAN).write_bytes(data)
        with pytest.raises(CacheError, match=r"plan\.parquet cannot be read"):
            Plan.open(store)


def test_a_plan_that_another_process_removed_is_no_damage(tmp_path):
    store = LocalStore(tmp_path)
    plan = write_plan(store, table_of([[300], [400]], 0, 2))
    store.delete(PLAN)
    for read in (lambda: plan.shard(1), plan.index):
        with pytest.raises(CacheError, match=r"is gone: another process .* run the same command again"):
            read()


def test_a_plan_that_is_not_by_shard_is_refused(tmp_path):
    pq.write_table(plan_table(3, 64), tmp_path / PLAN)
    with pytest.raises(CacheError, match="another version"):
        Plan.open(LocalStore(tmp_path))
    pq.write_table(pa.table({"a": [1]}), tmp_path / PLAN)
    with pytest.raises(CacheError, match="another version"):
        Plan.open(LocalStore(tmp_path))


def test_samples_are_let_go_before_a_shard_runs(tmp_path, monkeypatch):
    """A capture's memory must not grow with its data."""
    target = random_target(tmp_path / "tiny")
    data = write_jsonl(tmp_path / "rows.jsonl", shipped_rows(12))
    run, seen = shards_module.run_shard, []

    def look(*arguments, **named):
        gc.collect()
        held = gc.get_objects()
        seen.append(sum(type(item) is Sample for item in held))
        tables = [item for item in held if type(item) is pa.Table and "input_ids" in item.column_names]
        seen.append(sum(len(table) for table in tables))
        return run(*arguments, **named)

    monkeypatch.setattr(shards_module, "run_shard", look)
    run_module.capture(capture_options(target, data, tmp_path / "out", layers=(1,)), Recorder())
    assert seen
    assert not any(seen)
