"""Reading and writing a cache, as ratios in the same run: to copying the same bytes in memory, to plain Zarr, to a file a sample.

    python benchmarks/reading.py [--samples 40]

H 4096, 5 layers, bf16, samples of 1,024 tokens at random places, page cache hot, one thread, the best of five rounds; once a sample
a call, and once as many a call as training reads, a micro-batch of 8,192 tokens. Memory that is copied into is used again, as the
reader's own is: fresh memory would make copying several times slower, and every ratio better.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
import zarr
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from cache.buffers import Buffers
from cache.chunks import ChunkReader
from cache.codecs import HiddenCodec
from cache.layout import write_arrays
from cache.read import Cache
from cache.shard import encode_shard
from cache.store import LocalStore
from schemas.arrays import array_specs, bytes_per_token, chunk_tokens
from schemas.index import INDEX_SCHEMA
from schemas.manifest import Codec, Identity, Manifest, TargetIdentity, Totals

HIDDEN, LAYERS, LENGTH, SHARD_TOKENS, SHARDS, TOP_K = 4096, (1, 9, 17, 25, 33), 1024, 8192, 2, 8
ROUNDS = 5
# Disks vary more than memory.
WRITING_ROUNDS = 20
A_CALL = (1, 8)
TOKENS = ("tokens/input_ids", "tokens/loss_mask")


def example(codec: Codec = "bf16", hidden: int = HIDDEN) -> Manifest:
    """The manifest of a cache at Qwen3-8B's sizes."""
    target = TargetIdentity(
        name="example", revision=None, architectures=(), config_sha256="", num_hidden_layers=36, hidden_size=hidden,
        vocab_size=1000, tied=True, embedding_scale=1.0, logit_scale=1.0, logit_softcap=None,
    )  # fmt: skip
    identity = Identity(
        target=target, layers=LAYERS, tokenizer_sha256="", chat_template_sha256="", codec=codec, top_k=TOP_K,
        dtype="bfloat16", tp=1, mask_token_id=0, max_length=LENGTH, val_fraction=0.0, seed=0, shard_tokens=SHARD_TOKENS,
        batch_tokens=LENGTH, chunk_tokens=chunk_tokens(codec, hidden, TOP_K, SHARD_TOKENS),
    )  # fmt: skip
    totals = Totals(samples=1, tokens=1, supervised=1, shards=SHARDS, val_samples=0)
    return Manifest(
        complete=False, identity=identity, sources=(), totals=totals, mask_token_source="user", record={}
    )  # fmt: skip


def fill(store: LocalStore, manifest: Manifest) -> None:
    """Write tokens and hidden arrays of random bits."""
    draw = np.random.default_rng(0)
    write_arrays(store, manifest, {})
    store.put("zarr.json", [b'{"zarr_format": 3, "node_type": "group", "attributes": {}}'])
    for spec in array_specs(manifest.identity, SHARDS):
        if spec.name in TOKENS or spec.name.startswith("hidden/"):
            rows = draw.integers(0, 1 << 16 if spec.dtype == "uint16" else 2, (SHARD_TOKENS, *spec.shape[1:]))
            for shard in range(SHARDS):
                store.put(spec.object_key(shard), encode_shard(rows.astype(spec.dtype), spec.chunk_rows))


def cache_of(store: LocalStore, manifest: Manifest, verify_every: int) -> Cache:
    """What training reads with."""
    buffers = Buffers()
    specs = array_specs(manifest.identity, SHARDS)
    arrays = {spec.name: ChunkReader(store, spec, verify_every, buffers) for spec in specs}
    index = pa.table([pa.array([], field.type) for field in INDEX_SCHEMA], schema=INDEX_SCHEMA)
    return Cache(store, manifest, LAYERS, index, arrays, HiddenCodec(manifest.identity.codec), buffers)


def rounds(ways: dict[str, Callable[[], object]], count: int = ROUNDS) -> dict[str, float]:
    """Seconds of each way: the least of several rounds, in which the ways take turns."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(count):
        for name, work in ways.items():
            started = time.perf_counter()
            work()
            best[name] = min(best[name], time.perf_counter() - started)
    return best


def reading(store: LocalStore, manifest: Manifest, folder: Path, offsets: Sequence[int]) -> None:
    """Print the rows on reading random samples."""
    draw = np.random.default_rng(1)
    held = [draw.integers(0, 1 << 16, (SHARDS * SHARD_TOKENS, HIDDEN), dtype=np.uint16) for _ in LAYERS]
    group = zarr.open_group(str(store.root), mode="r")
    plain = [group[f"hidden/{layer}"] for layer in LAYERS]
    files = {}
    for offset in offsets:
        files[offset] = folder / f"{offset}.safetensors"
        tensors = {f"hidden.{layer}": own[offset : offset + LENGTH] for layer, own in zip(LAYERS, held, strict=True)}
        save_file(tensors, files[offset])
    always, sampled = cache_of(store, manifest, 1), cache_of(store, manifest, 16)
    size = len(offsets) * len(LAYERS) * LENGTH * HIDDEN * 2
    for count in A_CALL:
        into = Buffers().array((len(LAYERS), count * LENGTH, HIDDEN), np.uint16)
        calls = [offsets[start : start + count] for start in range(0, len(offsets), count)]

        def copy(into: NDArray[np.uint16] = into, calls: Sequence[Sequence[int]] = calls) -> None:
            for call in calls:
                for layer, own in zip(into, held, strict=True):
                    for place, offset in enumerate(call):
                        layer[place * LENGTH : (place + 1) * LENGTH] = own[offset : offset + LENGTH]

        def read(cache: Cache, layers: Sequence[int], calls: Sequence[Sequence[int]] = calls) -> None:
            for call in calls:
                cache.samples([(offset, LENGTH) for offset in call], layers)

        read(sampled, LAYERS)  # the first epoch, in which all is verified
        ways = {
            "copying in memory": copy,
            "verified": lambda read=read: read(always, LAYERS),
            "sampled": lambda read=read: read(sampled, LAYERS),
            "verified, 2 layers": lambda read=read: read(always, LAYERS[1:3]),
        }
        if count == 1:
            ways |= {
                "plain Zarr": lambda: [array[offset : offset + LENGTH] for offset in offsets for array in plain],
                "a file a sample": lambda: [load_file(files[offset]) and None for offset in offsets],
            }
        taken = rounds(ways)
        for name, each in taken.items():
            part = 2 / len(LAYERS) if name.endswith("2 layers") else 1
            print(f"{name + f', {count} a call':<32} {part * size / each / 1e9:6.2f} GB/s")
        tell(f"verified / copying in memory, {count} a call", taken["copying in memory"] / taken["verified"], 0.5)
        tell(f"sampled / copying in memory, {count} a call", taken["copying in memory"] / taken["sampled"], 0.9)
        share = taken["verified, 2 layers"] / taken["verified"]
        tell(f"2 of 5 layers / 5 of 5, time, {count} a call", share, 0.45, most=True)
        if count == 1:
            tell("verified / plain Zarr", taken["plain Zarr"] / taken["verified"], 2.5)
            tell("sampled / plain Zarr", taken["plain Zarr"] / taken["sampled"], 3.5)
            tell("verified / a file a sample", taken["a file a sample"] / taken["verified"], 2)


def writing(store: LocalStore, manifest: Manifest, folder: Path) -> None:
    """Print the row on writing a shard of one layer."""
    spec = next(spec for spec in array_specs(manifest.identity, SHARDS) if spec.name.startswith("hidden/"))
    rows = np.random.default_rng(2).integers(0, 1 << 16, (SHARD_TOKENS, HIDDEN), dtype=np.uint16)

    def bare() -> None:
        path = folder / "bare"
        with suppress(FileNotFoundError):
            path.unlink()
        with open(path, "wb", buffering=0) as file:
            view = rows.data.cast("B")
            while len(view):
                view = view[file.write(view) :]
            os.fsync(file.fileno())

    def ours() -> None:
        store.delete(spec.object_key(0))
        store.put(spec.object_key(0), encode_shard(rows, spec.chunk_rows))

    taken = rounds({"write + fsync": bare, "writing a shard": ours}, WRITING_ROUNDS)
    for name, each in taken.items():
        print(f"{name:<32} {rows.nbytes / each / 1e9:6.2f} GB/s")
    tell("writing a shard / write + fsync", taken["write + fsync"] / taken["writing a shard"], 0.8)


def sizes() -> None:
    """Print the rows on bytes per token."""
    for codec, most in (("fp8", 0.53), ("int8", 0.53), ("int4", 0.28)):
        for hidden in (576, 4096):
            small, whole = (bytes_per_token(example(name, hidden).identity)[1] for name in (codec, "bf16"))
            tell(f"bytes a token, H {hidden}, {codec} / bf16", small / whole, most, most=True)


def decoding(count: int = LENGTH) -> None:
    """Print what decoding a sample costs beside copying it, by codec, on this machine's device."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    hidden_TLH = torch.randn(count, len(LAYERS), HIDDEN, generator=torch.Generator().manual_seed(0))
    ways: dict[str, Callable[[], object]] = {}
    for name in ("bf16", "fp8", "int8", "int4"):
        codec = HiddenCodec(name, {layer: tuple(range(8)) for layer in LAYERS})  # type: ignore[arg-type]
        states = codec.pack(hidden_TLH, LAYERS).to(device)
        ways[name] = lambda states=states: states.decode().sum().item()  # type: ignore[misc]
    taken = rounds(ways)
    for name, each in taken.items():
        print(f"decoding {name:<6} on {device.type:<6} {count / each / 1e3:8.0f} thousand tokens/s")


def tell(name: str, ratio: float, wanted: float, most: bool = False) -> None:
    """One ratio, with what is asked of it."""
    bound = "at most" if most else "at least"
    print(f"{name:<42} {ratio:6.3f}   {bound} {wanted}")


def main() -> None:
    """Write the arrays, then print every row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=40)
    count = parser.parse_args().samples
    torch.set_num_threads(1)
    draw = np.random.default_rng(3)
    starts = draw.integers(0, SHARD_TOKENS - LENGTH, count) + draw.integers(0, SHARDS, count) * SHARD_TOKENS
    with tempfile.TemporaryDirectory() as name:
        store, manifest = LocalStore(Path(name) / "hs.zarr"), example()
        fill(store, manifest)
        reading(store, manifest, Path(name), [int(start) for start in starts])
        writing(store, manifest, Path(name))
    sizes()
    decoding()


if __name__ == "__main__":
    main()
