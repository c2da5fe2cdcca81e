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
def test_bytes_equal_zarrs_own(dtype, chunks, chunk_rows, width, zero, seed):
    shape = (chunks * chunk_rows,) if width is None else (chunks * chunk_rows, width)
    rows = (np.random.default_rng(seed).integers(0, 100, shape) * (not zero)).astype(dtype)
    store, array = zarr_array(rows, chunk_rows)
    array[:] = rows
    key = "a/c/0" if width is None else "a/c/0/0"
    assert b"".join(encode_shard(rows, chunk_rows)) == store._store_dict[key].to_bytes()


def test_a_flipped_bit_is_seen_by_zarr():
    rows = np.arange(64, dtype=np.int32).reshape(16, 4)
    store, array = zarr_array(rows, 4)
    data = bytearray(b"".join(encode_shard(rows, 4)))
    data[10] ^= 1
    asyncio.run(store.set("a/c/0/0", zarr.core.buffer.cpu.Buffer.from_bytes(bytes(data))))
    with pytest.raises(ValueError, match="checksum"):
        array[:]
