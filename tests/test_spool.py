"""Planning more rows than memory would hold: the same plan.parquet, byte for byte, with the tokens in a file meanwhile."""

import gc
import os
import tracemalloc
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from capture_fixtures import TINY_CHAT, shipped_rows, talk, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.plan import PLAN, write_plan
from cache.store import LocalStore
from capture import spool as spool_module
from capture.collect import Samples, collect
from capture.lines import read_lines, scan_files
from capture.plan import assign_batches, build_plan, pack
from capture.samples import Sample, SampleRules, samples_of
from capture.spool import Spool, spool_folder
from schemas.errors import DflashError
from schemas.index import PLAN_SCHEMA
from target.chat import open_chat
from target.load import resolve_target

RULES = SampleRules("tok", 2048, 200, 0.2)


@pytest.fixture(scope="module")
def chat():
    return open_chat(resolve_target(str(TINY_CHAT)))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two files: short and long rows, duplicates of both kinds, names and none, a row of several samples' worth of nothing."""
    folder = tmp_path_factory.mktemp("data")
    rows = shipped_rows(60)
    more = [
        talk("a", "b c d e"),
        rows[5],
        talk("x", "y z y z", "and", "so on it goes", id="näme"),
        talk("only"),
        *rows[60:],
        talk("end", "of the file"),
    ]
    return write_jsonl(folder / "a.jsonl", [*rows, rows[7]]), write_jsonl(folder / "b.jsonl", more)


def in_memory(chat, scans, shard_tokens, batch_tokens, path):
    """The plan of all samples as one table, written a row group a shard: no spool, no batches of rows, no class of ours."""
    samples, source_of, known = [], [], set()
    for source, scan in enumerate(scans):
        for result in samples_of(chat, read_lines(scan), RULES):
            fresh = [sample for sample in result.samples if sample.tokens_sha256 not in known]
            known.update(sample.tokens_sha256 for sample in fresh)
            samples += fresh
            source_of += [source] * len(fresh)
    rows, offsets = [], {}
    for shard in sorted(set(shard_of := pack([len(s.input_ids) for s in samples], shard_tokens))):
        inside = [place for place in range(len(samples)) if shard_of[place] == shard]
        batches = assign_batches(np.array([len(samples[place].input_ids) for place in inside]), batch_tokens)
        for place, batch in zip(inside, batches.tolist(), strict=True):
            sample = samples[place]
            offset = offsets.get(shard, shard * shard_tokens)
            offsets[shard] = offset + len(sample.input_ids)
            rows.append(
                {name: getattr(sample, name) for name in ("sample_id", "row_id", "truncated", "split", "source_row")}
                | {"offset": offset, "length": len(sample.input_ids), "supervised": int(sample.loss_mask.sum())}
                | {"shard": shard, "source": source_of[place], "tokens_sha256": sample.tokens_sha256, "batch": batch}
                | {"input_ids": sample.input_ids.tolist(), "loss_mask": sample.loss_mask.tolist()}
            )
    with pq.ParquetWriter(path, PLAN_SCHEMA, compression="zstd", write_page_checksum=True) as writer:
        for shard in sorted(offsets):
            writer.write_table(pa.Table.from_pylist([row for row in rows if row["shard"] == shard], schema=PLAN_SCHEMA))
    return path.read_bytes()


@settings(max_examples=12, deadline=None)
@given(
    shard_tokens=st.integers(200, 20_000),
    batch_tokens=st.integers(50, 3000),
    held=st.integers(1, 70),
    block=st.sampled_from([1, 700, 1 << 20]),
)
def test_the_plan_is_that_of_all_samples_in_memory(
    tmp_path_factory, chat, data, shard_tokens, batch_tokens, held, block
):
    folder, scans = tmp_path_factory.mktemp("plan"), scan_files(data, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("capture.collect.BATCH_SAMPLES", held)
        patch.setattr(spool_module, "WRITE_BYTES", block)
        plan, _ = build_plan(collect(chat, scans, RULES, lambda *_: None, folder=folder), shard_tokens, batch_tokens)
        assert list(folder.iterdir()) == [], "the file has no name"
        write_plan(LocalStore(folder), plan)
    assert (folder / PLAN).read_bytes() == in_memory(chat, scans, shard_tokens, batch_tokens, folder / "naive")


def test_samples_come_back_as_they_were(chat, data):
    scans = scan_files(data, None)
    plain = [
        sample for scan in scans for result in samples_of(chat, read_lines(scan), RULES) for sample in result.samples
    ]
    first: dict[str, Sample] = {}
    for sample in plain:
        first.setdefault(sample.tokens_sha256, sample)
    plain = list(first.values())
    found = collect(chat, scans, RULES, lambda *_: None).samples
    assert len(found) == len(plain) > 60
    for ours, theirs in zip(found, plain, strict=True):
        for name in Sample.__dataclass_fields__:
            assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
        assert (ours.input_ids.dtype, ours.loss_mask.dtype) == (np.int32, np.uint8)
    with pytest.raises(IndexError):
        found[len(plain)]


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    block=st.sampled_from([1, 60, 1 << 20]),
    seed=st.integers(0, 9),
)
def test_any_samples_in_any_order(lengths, block, seed):
    draw, spool = np.random.default_rng(seed), Spool()
    ids = [draw.integers(0, 1 << 31, n).astype(np.int32) for n in lengths]
    masks = [draw.integers(0, 2, n).astype(np.uint8) for n in lengths]
    starts = np.cumsum(lengths) - lengths
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spool_module, "WRITE_BYTES", block)
        for place, pair in enumerate(zip(ids, masks, strict=True)):
            spool.add(*pair)
            if place == len(lengths) // 2:
                assert np.array_equal(spool.take([int(starts[place])], [lengths[place]])[0], ids[place])
    chosen = draw.permutation(len(lengths))[: draw.integers(0, len(lengths) + 1)]
    taken = spool.take(starts[chosen].tolist(), [lengths[place] for place in chosen])
    assert taken[0].tolist() == [i for place in chosen for i in ids[place].tolist()]
    assert taken[1].tolist() == [m for place in chosen for m in masks[place].tolist()]


def test_the_file_goes_with_its_samples():
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    samples = Samples()
    assert len(set(os.listdir("/proc/self/fd")) - before) == 1
    del samples
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) == before


def test_tokens_are_kept_beside_the_cache_on_its_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    assert spool_folder(str(tmp_path / "new" / "hs.zarr")) == tmp_path
    (tmp_path / "hs.zarr").mkdir()
    assert spool_folder(str(tmp_path / "hs.zarr")) == tmp_path, "not inside, where a replaced cache must be emptied"
    monkeypatch.chdir(tmp_path)
    assert spool_folder("hs.zarr") == tmp_path
    assert spool_folder("s3://bucket/hs.zarr") == tmp_path / "temporary"
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert spool_folder(str(tmp_path / "hs.zarr")) == tmp_path / "temporary"


def test_a_full_disk_is_said_in_one_line(tmp_path, monkeypatch):
    with pytest.raises(DflashError, match=r"cannot keep tokens in .*gone until they are planned: No such file"):
        Spool(tmp_path / "gone")
    spool = Spool(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    spool.add(np.arange(3, dtype=np.int32), np.ones(3, np.uint8))
    with pytest.raises(
        DflashError, match=rf"cannot keep tokens in {tmp_path} .*: No space left on device: free some space"
    ):
        spool.take([0], [3])


def test_memory_does_not_hold_the_tokens(chat, tmp_path, monkeypatch):
    """At no time do Python and numpy hold a third of what the tokens come to, with what Arrow has at the end."""
    monkeypatch.setattr("capture.samples.GROUP_BYTES", 1 << 16)
    monkeypatch.setattr(spool_module, "WRITE_BYTES", 1 << 16)
    monkeypatch.setattr("cache.plan.BLOCK_BYTES", 1 << 16)
    length, rows = 2000, 800
    ids = np.random.default_rng(0).integers(100, 2000, length).tolist()
    lines = [{"input_ids": [100 + row // 40, 100 + row % 40, *ids], "prompt_length": 3} for row in range(rows)]
    scans = scan_files((write_jsonl(tmp_path / "rows.jsonl", lines),), None)
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        rules = replace(RULES, max_length=4096, format="tokens")
        plan, totals = build_plan(collect(chat, scans, rules, lambda *_: None, folder=tmp_path), 8192, 8192)
        write_plan(LocalStore(tmp_path), plan)
        held = tracemalloc.get_traced_memory()[1] + pa.total_allocated_bytes() - before
    finally:
        tracemalloc.stop()
    assert (totals.samples, totals.tokens) == (rows, rows * (length + 2))
    assert held < 5 * totals.tokens / 3, held
