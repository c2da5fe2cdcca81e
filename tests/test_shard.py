"""A shard object is what zarr-python itself would read and write."""

import asyncio

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import Crc32cCodec
from zarr.storage import MemoryStore

from cache.shard import encode_shard


def zarr_array(rows: np.ndarray, chunk_rows: int, shards: int = 1) -> tuple[MemoryStore, zarr.Array]:
    store = MemoryStore()
    width = rows.shape[1:]
    array = zarr.create_array(
        store, name="a", shape=(shards * len(rows), *width), shards=(len(rows), *width), chunks=(chunk_rows, *width), dtype=rows.dtype,
        compressors=[Crc32cCodec()], filters=None, fill_value=0, config={"write_empty_chunks": True},
    )  # fmt: skip
    return store, array


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(["int32", "uint8", "float16", "float32", "uint16", "int8"]),
    chunks=st.integers(1, 5),
    chunk_rows=st.integers(1, 8),
    width=st.sampled_from([None, 1, 7]),
    zero=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_zarr_reads_what_was_written_and_raw_chunks_are_aligned(dtype, chunks, chunk_rows, width, zero, seed):
    shape = (chunks * chunk_rows,) if width is None else (chunks * chunk_rows, width)
    rows = (np.random.default_rng(seed).integers(0, 100, shape) * (not zero)).astype(dtype)
    store, array = zarr_array(rows, chunk_rows)
    array[:] = rows
    key = "a/c/0" if width is None else "a/c/0/0"
    own, ours = store._store_dict[key].to_bytes(), b"".join(encode_shard(rows, chunk_rows))
    for number in range(chunks):
        places = [np.frombuffer(data[-4 - 16 * chunks : -4], "<u8").reshape(-1, 2) for data in (own, ours)]
        chunk, aligned = (
            data[at : at + size]
            for data, (at, size) in zip((own, ours), [p[number].tolist() for p in places], strict=True)
        )
        assert chunk == aligned and places[1][number, 0] % 64 == 0
    asyncio.run(store.set(key, zarr.core.buffer.cpu.Buffer.from_bytes(ours)))
    np.testing.assert_array_equal(array[:], rows)
    first, last = sorted(np.random.default_rng(seed).integers(0, len(rows) + 1, 2).tolist())
    np.testing.assert_array_equal(array[first:last], rows[first:last])


@pytest.mark.parametrize("dtype", ["int32", "float16", "uint16", "int8"])
def test_tensorstore_reads_what_was_written(dtype, tmp_path):
    tensorstore = pytest.importorskip("tensorstore")
    rows = np.random.default_rng(0).integers(0, 100, (24, 7)).astype(dtype)
    store, _ = zarr_array(rows, 6)
    for key, data in [
        ("zarr.json", store._store_dict["a/zarr.json"].to_bytes()),
        ("c/0/0", b"".join(encode_shard(rows, 6))),
    ]:
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_bytes(data)
    array = tensorstore.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{tmp_path}/"}}).result()
    np.testing.assert_array_equal(array[:].read().result(), rows)
    np.testing.assert_array_equal(array[5:9].read().result(), rows[5:9])


def test_a_flipped_bit_is_seen_by_zarr():
    rows = np.arange(64, dtype=np.int32).reshape(16, 4)
    store, array = zarr_array(rows, 4)
    data = bytearray(b"".join(encode_shard(rows, 4)))
    data[10] ^= 1
    asyncio.run(store.set("a/c/0/0", zarr.core.buffer.cpu.Buffer.from_bytes(bytes(data))))
    with pytest.raises(ValueError, match="checksum"):
        array[:]
