"""Rows copied from the page cache's own memory are those that Zarr reads, verified as those that are read."""

import sys

import numpy as np
import pytest
import zarr
from cache_fixtures import make_cache

from cache import mapped, runs
from cache.chunks import ChunkReader
from cache.mapped import MappedFile, MappedFiles
from cache.read import open_cache
from cache.rows import read_rows
from cache.store import LocalStore
from schemas.errors import CacheDamaged

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what is in memory")


def nothing_is_read(monkeypatch):
    monkeypatch.setattr("cache.rows.read_runs", lambda *_: pytest.fail("read, though it lies in memory"))


@pytest.mark.parametrize("codec", ["f32", "bf16", "fp8", "int8", "int4"])
def test_lent_rows_are_those_that_zarr_reads(codec, tmp_path, monkeypatch):
    make_cache(tmp_path / "hs", codec)
    group, draw = zarr.open_group(str(tmp_path / "hs"), mode="r"), np.random.default_rng(0)
    nothing_is_read(monkeypatch)
    cache = open_cache(str(tmp_path / "hs")).verifying(3)
    names = [name for name in cache.arrays if not name.startswith("logits")]
    for _ in range(12):
        offset = int(draw.integers(0, 192))
        length = int(draw.integers(1, 193 - offset))
        for name in names:
            np.testing.assert_array_equal(cache.rows(name, offset, length), group[name][offset : offset + length])


def test_what_is_not_in_memory_is_read(tmp_path, monkeypatch):
    make_cache(tmp_path / "hs", "bf16")
    expected = open_cache(str(tmp_path / "hs")).rows("hidden/2", 10, 100)
    monkeypatch.setattr(MappedFile, "_present", lambda *_: False)
    read = []
    monkeypatch.setattr("cache.rows.read_runs", lambda *each: read.append(1) or runs.read_runs(*each))
    np.testing.assert_array_equal(open_cache(str(tmp_path / "hs")).rows("hidden/2", 10, 100), expected)
    assert read


def test_lent_chunks_are_verified_first_and_then_now_and_then_as_read_ones_are(tmp_path, monkeypatch):
    make_cache(tmp_path / "hs", "bf16", shard_tokens=64)
    spec = open_cache(str(tmp_path / "hs")).arrays["hidden/2"].spec
    victim = tmp_path / "hs" / "hidden/2/c/1/0"
    sound = victim.read_bytes()
    broken = bytes([sound[0] ^ 1]) + sound[1:]

    def outcomes(reader):
        found = []
        for data in (broken, sound, *[broken] * 6, sound, *[broken] * 6):
            victim.write_bytes(data)
            try:
                read_rows([reader], [(64, 10), (70, 5)])
                found.append(True)
            except CacheDamaged:
                found.append(False)
        return found

    by_memory = outcomes(ChunkReader(LocalStore(tmp_path / "hs"), spec, verify_every=4))
    assert by_memory[:2] == [False, True] and not all(by_memory[2:])
    monkeypatch.setattr("cache.rows.copy_lent", lambda pieces, _: pieces)
    assert outcomes(ChunkReader(LocalStore(tmp_path / "hs"), spec, verify_every=4)) == by_memory


def test_a_chunk_that_two_spans_share_is_verified_once(tmp_path, monkeypatch):
    make_cache(tmp_path / "hs", "bf16", shard_tokens=64)
    verified, real = [], ChunkReader.check

    def watched(self, shard, number, *data):
        verified.append((shard, number))
        real(self, shard, number, *data)

    monkeypatch.setattr(ChunkReader, "check", watched)
    spec = open_cache(str(tmp_path / "hs")).arrays["hidden/2"].spec
    rows = read_rows([ChunkReader(LocalStore(tmp_path / "hs"), spec)], [(70, 60), (100, 10)])[0]
    assert sorted(verified) == [(1, 0), (2, 0)]
    held = zarr.open_group(str(tmp_path / "hs"), mode="r")["hidden/2"]
    np.testing.assert_array_equal(rows, np.concatenate([held[70:130], held[100:110]]))


def test_a_file_cut_off_or_gone_after_it_was_mapped_is_an_error_that_names_it(tmp_path):
    make_cache(tmp_path / "hs", "bf16")
    cache = open_cache(str(tmp_path / "hs"))
    cache.rows("hidden/2", 0, 64)
    victim = tmp_path / "hs" / "hidden/2/c/0/0"
    with open(victim, "r+b") as file:
        file.truncate(100)
    with pytest.raises(CacheDamaged, match="hidden/2, shard 0: chunk 0 is cut short"):
        cache.rows("hidden/2", 0, 64)
    victim.unlink()
    with pytest.raises(CacheDamaged, match="hidden/2, shard 0: cannot be opened"):
        cache.rows("hidden/2", 0, 64)


def test_a_file_that_was_replaced_is_mapped_anew_and_what_was_lent_stays(tmp_path):
    path, files = tmp_path / "object", MappedFiles(mapped_bytes=10)
    path.write_bytes(b"old bytes")
    old = files.file(str(path)).lend(4, 5)
    assert files.file(str(path)).lend(0, 9).tobytes() == b"old bytes"
    (tmp_path / "new").write_bytes(b"new bytes")
    (tmp_path / "new").rename(path)
    (tmp_path / "other").write_bytes(b"something else")
    assert files.file(str(path)).lend(0, 9).tobytes() == b"new bytes"
    assert files.file(str(tmp_path / "other")).lend(0, 9).tobytes() == b"something"
    assert old.tobytes() == b"bytes"
    assert files.file(str(path)).lend(5, 5) is None, "more than there is"


def test_no_more_files_stay_mapped_than_may(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped, "MAPPED_FILES", 3)
    files, live = MappedFiles(), []
    for number in range(6):
        path = tmp_path / str(number)
        path.write_bytes(bytes([number]) * 10)
        live.append(files.file(str(path)).lend(0, 10))
    assert [bytes(each) for each in live] == [bytes([number]) * 10 for number in range(6)]
    assert len(files._held) == 3 and files._held_bytes == 30
