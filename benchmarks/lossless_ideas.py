"""What a cache would save without losing anything more: integers of int8 and int4 coded by their frequency, ids of the top k in less.

    python benchmarks/lossless_ideas.py --cache work/demo/hs.zarr

Sizes are of about 16,000 tokens of random samples. CPU time is that of getting a chunk's bytes out of what is stored, checksum
included, in multiples of copying and checking the plain chunk, which is all that reading int8 and int4 takes before the training
device decodes them.

T rows of tokens, H hidden, K top-k, V vocabulary.
"""

import argparse
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numcodecs.shuffle import Shuffle
from numcodecs.zstd import compress, decompress
from numpy.typing import NDArray
from torch import Tensor

from cache.calibrate import widest_channels
from cache.checksum import crc32c
from cache.quantise import quantise, unpack_nibbles
from cache.read import Cache, open_cache
from schemas.manifest import Codec

TOKENS, CHUNK_BYTES, ROUNDS = 16_384, 1 << 20, 5
Bytes = NDArray[np.uint8]


# --- Integers coded by their frequency -------------------------------------------------------------------------------------


def entropy(values: NDArray[np.int8]) -> float:
    """Bits a value when each is coded by its frequency alone: no code of single values is shorter (Shannon)."""
    counts = np.unique(values, return_counts=True)[1]
    share = counts / counts.sum()
    return float(-(share * np.log2(share)).sum())


def entropy_by_channel(values_TH: NDArray[np.int8]) -> float:
    """The same with frequencies of its own for every channel, the mean over channels; the tables themselves not counted."""
    return float(np.mean([entropy(values_TH[:, channel]) for channel in range(values_TH.shape[1])]))


def chunks_of(rows_TW: Bytes, turned: bool = False) -> Iterator[Bytes]:
    """The bytes of chunks of whole rows, about 1 MiB each; turned: channel by channel instead of row by row."""
    rows = max(1, CHUNK_BYTES // rows_TW.shape[1])
    for first in range(0, len(rows_TW), rows):
        chunk_TW = rows_TW[first : first + rows]
        yield np.ascontiguousarray(chunk_TW.T if turned else chunk_TW).reshape(-1)


def compressed_size(chunks: list[Bytes], level: int) -> int:
    """What zstd makes of them, each by itself."""
    return sum(len(compress(chunk, level)) for chunk in chunks)


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU time of this process for it, the least of some rounds."""
    least = float("inf")
    for _ in range(ROUNDS):
        began = time.process_time()
        work()
        least = min(least, time.process_time() - began)
    return least


def expanding_cost(chunks: list[Bytes], width: int, turned: bool) -> float:
    """CPU time of expanding chunks that zstd compressed, of copying the plain ones; checksums of what is stored in both."""
    shrunk, place = [compress(chunk, 1) for chunk in chunks], np.empty(max(map(len, chunks)), np.uint8)

    def plain() -> None:
        for chunk in chunks:
            crc32c(chunk.data)
            place[: len(chunk)] = chunk

    def expanded() -> None:
        for data in shrunk:
            crc32c(memoryview(data))
            chunk = np.frombuffer(decompress(data), np.uint8)
            place[: len(chunk)] = chunk.reshape(width, -1).T.reshape(-1) if turned else chunk

    return cpu_seconds(expanded) / cpu_seconds(plain)


def repeated(rows_TW: Bytes) -> NDArray[np.bool_]:
    """[T]: rows that are the same as an earlier one: prompts that begin alike have the same states as far as they do."""
    first = np.unique(rows_TW, axis=0, return_index=True)[1]
    return ~np.isin(np.arange(len(rows_TW)), first)


def coded_integers(cache: Cache, hidden_TLH: Tensor) -> None:
    """Print what is left of int8's and int4's integers, of their plain size; scales and wide channels are not counted.

    All but the two columns on repeats are of distinct rows: what zstd finds in the others is not their values' doing.
    """
    print(
        "| codec, layer | bound: one table; one a channel | zstd 1; 3; 3 by channel | CPU; by channel | repeats | zstd 3, with them |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    codecs: tuple[Codec, ...] = ("int8", "int4")
    for codec in codecs:
        for place, layer in enumerate(cache.layers):
            hidden_TH = hidden_TLH[:, place]
            packed_TW = quantise(hidden_TH, codec, widest_channels([hidden_TH]))["hidden"]
            all_TW = packed_TW.numpy().view(np.uint8)
            again_T = repeated(all_TW)
            values_TH = (packed_TW if codec == "int8" else unpack_nibbles(packed_TW)).numpy()[~again_T]
            rows_TW, bits = all_TW[~again_T], 8 if codec == "int8" else 4
            rows, columns = list(chunks_of(rows_TW)), list(chunks_of(rows_TW, turned=True))
            bounds = "; ".join(f"{measure(values_TH) / bits:.2f}" for measure in (entropy, entropy_by_channel))
            ways = ((rows, 1), (rows, 3), (columns, 3))
            sizes = "; ".join(f"{compressed_size(*way) / rows_TW.nbytes:.2f}" for way in ways)
            costs = expanding_cost(rows, rows_TW.shape[1], False), expanding_cost(columns, rows_TW.shape[1], True)
            with_repeats = compressed_size(list(chunks_of(all_TW)), 3) / all_TW.nbytes
            print(
                f"| {codec}, {layer} | {bounds} | {sizes} | {costs[0]:.0f}; {costs[1]:.0f} | {again_T.mean():.2f} | {with_repeats:.2f} |",
                flush=True,
            )


# --- Ids of the top k ------------------------------------------------------------------------------------------------------


def narrow(ids_TK: NDArray[np.int64]) -> NDArray[np.uint16]:
    """Ids of a vocabulary of at most 65,536 in two bytes."""
    assert ids_TK.max(initial=0) < 1 << 16, f"id {ids_TK.max()} takes more than two bytes"
    return ids_TK.astype(np.uint16)


def deltas(ids_TK: NDArray[np.int64]) -> NDArray[np.uint16]:
    """Each id less the one before it, modulo 65,536: the order, by probability, is kept."""
    return np.diff(narrow(ids_TK), axis=1, prepend=np.uint16(0))


def undeltas(deltas_TK: NDArray[np.uint16]) -> NDArray[np.int64]:
    """The ids of `deltas`."""
    return np.cumsum(deltas_TK, axis=1, dtype=np.uint16).astype(np.int64)


def sorted_deltas(ids_TK: NDArray[np.int64]) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
    """The deltas of the ids in ascending order, and the rank [T, K] of each by probability, K at most 256: the order is not lost."""
    order_TK = np.argsort(ids_TK, axis=1)
    return deltas(np.take_along_axis(ids_TK, order_TK, 1)), order_TK.astype(np.uint8)


def unsorted(deltas_TK: NDArray[np.uint16], rank_TK: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The ids of `sorted_deltas`, by probability again."""
    ids_TK = np.empty(deltas_TK.shape, np.int64)
    np.put_along_axis(ids_TK, rank_TK.astype(np.int64), undeltas(deltas_TK), 1)
    return ids_TK


def shuffled(items_TK: NDArray[np.generic]) -> Bytes:
    """The items' bytes, first bytes first."""
    return np.frombuffer(Shuffle(items_TK.itemsize).encode(np.ascontiguousarray(items_TK)), np.uint8)


def coded_ids(ids_TK: NDArray[np.int64], vocab_size: int) -> None:
    """Print what the ids take, in bytes a token, plain and compressed."""
    plain, items_TK = ids_TK.shape[1] * 4, ids_TK.astype(np.int32)
    print(f"| ids, V {vocab_size:,}, K {ids_TK.shape[1]} | bytes a token | shuffled, zstd 3 |\n| --- | --- | --- |")

    def line(name: str, size: int, *parts: NDArray[np.generic]) -> None:
        small = sum(len(compress(shuffled(part), 3)) for part in parts) / len(ids_TK)
        print(f"| {name} | {size} | {small:.0f} |", flush=True)

    line("int32, as they are", plain, items_TK)
    if vocab_size > 1 << 16:
        print("| two bytes | not possible | |")
        return
    gaps_TK, rank_TK = sorted_deltas(ids_TK)
    assert (unsorted(gaps_TK, rank_TK) == ids_TK).all() and (undeltas(deltas(ids_TK)) == ids_TK).all()
    line("uint16", plain // 2, narrow(ids_TK))
    line("uint16, deltas in order of probability", plain // 2, deltas(ids_TK))
    line("uint16, deltas in ascending order, the order by probability lost", plain // 2, gaps_TK)
    line("the same and ranks of a byte, nothing lost", plain // 2 + plain // 4, gaps_TK, rank_TK)


def main() -> None:
    """Measure both on random samples of a cache."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", default="work/demo/hs.zarr")
    cache = open_cache(parser.parse_args().cache)
    spans, total = [], 0
    for row in np.random.default_rng(0).permutation(len(cache.index)).tolist():
        span = cache.index["offset"][row].as_py(), cache.index["length"][row].as_py()
        if total + span[1] <= TOKENS:
            spans.append(span)
            total += span[1]
    torch.set_num_threads(1)
    print(f"{len(spans)} samples, {total:,} tokens\n")
    coded_integers(cache, cache.samples(spans, cache.layers)[2].decode().float())
    # Rows whose next token is not supervised may hold zeros.
    ids = [cache.topk(*span)[0][:-1][cache.tokens(*span)[1][1:]] for span in spans]
    print()
    coded_ids(torch.cat(ids).numpy(), cache.manifest.identity.target.vocab_size)


if __name__ == "__main__":
    main()
