"""Capturing against a bare forward of the same target over the same batches with full logits, as a ratio in the same run.

    python benchmarks/capturing.py [--target demo/tiny-chat] [--rows 400]

Capturing includes hidden states of three layers, the top 64 of the logits, encoding, and writing with fsync.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch

from cache.write import CacheWriter
from capture.forward import make_batch, run_shard, shard_plan, token_arrays
from capture.planning import plan_capture
from capture.settings import scan_data, settle
from schemas.options import CaptureOptions
from schemas.say import Silent
from target.load import load_target


def main() -> None:
    """Plan a capture, run it and the bare forward alternately three times, print the best ratio of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="demo/tiny-chat")
    parser.add_argument("--rows", type=int, default=400)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options = CaptureOptions(
            target=arguments.target, out=f"{folder}/hs.zarr", dtype="float32", codec="bf16", layers=(1, 2, 4),
            limit=arguments.rows, max_length=512, shard_tokens=16_384, batch_tokens=2048,
        )  # fmt: skip
        settings = settle(options, Silent())
        manifest, table, _ = plan_capture(settings, scan_data(options, Silent()), Silent())
        target = load_target(settings.ref, "float32", "cpu")
        identity, shards = manifest.identity, range(manifest.totals.shards)
        plans = [shard_plan(table, shard, identity.shard_tokens) for shard in shards]

        def bare() -> None:
            with torch.inference_mode():
                for plan in plans:
                    ids = token_arrays(plan, identity.shard_tokens)["tokens/input_ids"]
                    for number in range(int(plan.batch.max()) + 1):
                        batch = make_batch(plan, number, ids)
                        target.model(input_ids=torch.from_numpy(batch.ids_bm), use_cache=False)

        def captured() -> None:
            writer = CacheWriter.create(str(Path(folder) / str(time.monotonic_ns())), manifest, table)
            for shard, plan in zip(shards, plans, strict=True):
                writer.commit_shard(shard, run_shard(target, settings.traits, identity, plan, lambda _: None))

        times: dict[str, list[float]] = {"bare": [], "captured": []}
        bare()
        for _ in range(3):
            for name, work in (("bare", bare), ("captured", captured)):
                started = time.perf_counter()
                work()
                times[name].append(time.perf_counter() - started)
    tokens = manifest.totals.tokens
    for name, taken in times.items():
        print(f"{name:<10} {tokens / min(taken):8,.0f} tokens/s")
    print(f"captured / bare forward with full logits {min(times['bare']) / min(times['captured']):.2f}")


if __name__ == "__main__":
    main()
