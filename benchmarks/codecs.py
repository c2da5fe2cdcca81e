"""What each codec costs: one capture, converted to every codec; the same training from each, decoded with the target's true states.

    python benchmarks/codecs.py --target demo/tiny-chat --data work/demo/answers.jsonl --work work/codecs

Ends with a table. What is there already is not done again, so that it can be interrupted, and run with more seeds.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from cache.read import open_cache
from schemas.arrays import bytes_per_token

CODECS = ("f32", "bf16", "bf16-zstd", "fp8", "int8", "int4")


def dflash(*words: str) -> None:
    """Run a command; its output is the reader's."""
    command = [sys.executable, "-m", "pipeline", *words]
    print("$ dflash", *words, flush=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def captured(options: argparse.Namespace, work: Path) -> dict[str, Path]:
    """The capture in each codec asked for."""
    caches = {codec: work / f"{codec}.zarr" for codec in ("f32", *options.codecs)}
    dflash(
        *("capture", "--target", options.target, "--dtype", "float32", "--codec", "f32", "--layers", options.layers),
        *("--data", options.data, "--val-fraction", options.val_fraction, "--max-length", "512"),
        *("--shard-tokens", "16384", "--batch-tokens", "2048", "--out", str(caches["f32"])),
    )
    for codec in options.codecs:
        if codec != "f32":
            dflash("convert", str(caches["f32"]), str(caches[codec]), "--codec", codec)
    return caches


def decoded(options: argparse.Namespace, caches: dict[str, Path], codec: str, seed: int) -> float:
    """Train from one codec with one seed; the decoded acceptance, the target's states as they are."""
    run = Path(options.work) / f"{codec}-{seed}"
    result = run / "decoded.json"
    if not result.exists():
        resume = ["--resume"] if (run / "checkpoints").is_dir() else []
        dflash(
            *(
                "train",
                "--cache",
                str(caches[codec]),
                "--draft",
                "dflash2",
                "--config",
                options.config,
                "--out",
                str(run),
            ),
            *("--set", f"data.seed={seed}", "--set", "draft.selector_rank=64", "--steps", str(options.steps), *resume),
        )
        dflash(
            *("evaluate", "--draft", str(run), "--cache", str(caches["f32"]), "--target", options.target),
            *("--dtype", "float32", "--max-new-tokens", str(options.max_new_tokens), "--json", str(result)),
        )
    return float(json.loads(result.read_text())["decoded"]["acceptance"])


def reading_speed(path: Path) -> float:
    """Tokens a second, read from random places in the page cache and decoded on one thread; the best of three rounds."""
    torch.set_num_threads(1)
    cache, best = open_cache(str(path)), float("inf")
    rows = np.random.default_rng(0).permutation(len(cache.index))[:400].tolist()
    spans = [(cache.index["offset"][row].as_py(), cache.index["length"][row].as_py()) for row in rows]
    for _ in range(3):
        started = time.perf_counter()
        for first in range(0, len(spans), 8):
            cache.samples(spans[first : first + 8], cache.layers)[2].decode()
        best = min(best, time.perf_counter() - started)
    return float(sum(length for _, length in spans) / best)


def main() -> None:
    """Capture, convert, train, decode, and print a row for each codec."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="demo/tiny-chat")
    parser.add_argument("--data", default="work/demo/answers.jsonl")
    parser.add_argument("--config", default="demo/tiny.yaml")
    parser.add_argument("--layers", default="1,2,4")
    parser.add_argument("--val-fraction", default="0.0425")
    parser.add_argument("--work", default="work/codecs")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--codecs", type=lambda text: text.split(","), default=["bf16", "fp8", "int8", "int4"])
    options = parser.parse_args()
    assert set(options.codecs) <= set(CODECS), f"--codecs: choose among {', '.join(CODECS)}"
    caches = captured(options, Path(options.work))
    found = {codec: [decoded(options, caches, codec, seed) for seed in options.seeds] for codec in options.codecs}
    print(
        "| codec | decoded acceptance (lowest to highest seed) | bytes of hidden states a token | read and decoded, tokens/s |"
    )
    print("| --- | --- | --- | --- |")
    for codec, values in found.items():
        size = bytes_per_token(open_cache(str(caches[codec])).manifest.identity)[1]
        spread = f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"
        print(f"| {codec} | {spread} | {size:,} | {reading_speed(caches[codec]):,.0f} |")


if __name__ == "__main__":
    main()
