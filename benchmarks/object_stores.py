"""obstore against s3fs on the same S3 server (moto's, on loopback), as ratios of wall time and of the client's own CPU time.

    pip install s3fs; PYTHONPATH=tests python benchmarks/object_stores.py [--rounds 5]

1 MiB ranges at random places of a 64 MiB object, one after the other and all at once, and a streamed put of 64 MiB in parts of
16 MiB. The two take turns. The server is Python and bounds the wall time of both; the client's CPU time is what a faster server
would leave.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import obstore
import s3fs
from obstore.store import S3Store
from s3_server import BUCKET, serve_s3

MIB = 1 << 20
SIZE, PART, COUNT, CONCURRENT = 64 * MIB, 16 * MIB, 24, 8

Work = Callable[[np.ndarray], object]


def parts(data: memoryview) -> Iterator[memoryview | bytes]:
    """What a shard's encoder yields: chunks of 1 MiB, each with a checksum."""
    for start in range(0, len(data), MIB):
        yield data[start : start + MIB]
        yield b"1234"


def obstore_ways(endpoint: str, data: memoryview) -> dict[str, Work]:
    """The three ways through obstore; the pool's threads wait without the interpreter's lock."""
    store = S3Store(BUCKET, endpoint=endpoint, client_options={"allow_http": True})
    pool = ThreadPoolExecutor(CONCURRENT)

    def read(start: int) -> object:
        return obstore.get_range(store, "object", start=int(start), length=MIB)

    return {
        "ranges one by one": lambda starts: [read(start) for start in starts],
        "ranges at once": lambda starts: list(pool.map(read, starts)),
        "streamed put": lambda _: obstore.put(store, "put", parts(data), chunk_size=PART, max_concurrency=4),
    }


def s3fs_ways(endpoint: str, data: memoryview) -> dict[str, Work]:
    """The same through s3fs."""
    files = s3fs.S3FileSystem(endpoint_url=endpoint, use_listings_cache=False)
    path = f"{BUCKET}/object"

    def put(_: np.ndarray) -> None:
        with files.open(f"{BUCKET}/put", "wb", block_size=PART) as file:
            for part in parts(data):
                file.write(part)

    return {
        "ranges one by one": lambda starts: [files.cat_file(path, start=int(s), end=int(s) + MIB) for s in starts],
        "ranges at once": lambda starts: files.cat_ranges(
            [path] * len(starts), starts.tolist(), (starts + MIB).tolist(), batch_size=CONCURRENT
        ),
        "streamed put": put,
    }


def main() -> None:
    """Print the best wall and CPU seconds of each way, and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    draw = np.random.default_rng(0)
    data = memoryview(draw.bytes(SIZE))
    with serve_s3() as server:
        os.environ.update(server.environment)
        clients = {"obstore": obstore_ways(server.endpoint, data), "s3fs": s3fs_ways(server.endpoint, data)}
        obstore.put(S3Store(BUCKET, endpoint=server.endpoint, client_options={"allow_http": True}), "object", data)
        best: dict[tuple[str, str], tuple[float, float]] = {}
        for _ in range(rounds):
            starts = draw.integers(0, SIZE - MIB, COUNT)
            for way in clients["obstore"]:
                for name, works in clients.items():
                    wall, cpu = time.perf_counter(), time.process_time()
                    works[way](starts)
                    taken = time.perf_counter() - wall, time.process_time() - cpu
                    held = best.get((way, name), taken)
                    best[way, name] = min(held[0], taken[0]), min(held[1], taken[1])
    for way in clients["obstore"]:
        (ours_wall, ours_cpu), (theirs_wall, theirs_cpu) = best[way, "obstore"], best[way, "s3fs"]
        print(
            f"{way:<18} obstore {ours_wall:.3f} s, {ours_cpu:.3f} s CPU   s3fs {theirs_wall:.3f} s, {theirs_cpu:.3f} s CPU"
        )
        print(f"{'':<18} s3fs / obstore {theirs_wall / ours_wall:.2f} wall, {theirs_cpu / ours_cpu:.2f} CPU")


if __name__ == "__main__":
    main()
