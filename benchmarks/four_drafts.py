"""Four drafts from one capture, of capturing and training four times: blocks of 8 and 16, dflash and dflash2, by the commands users type.

    python benchmarks/four_drafts.py --target work/smollm2/model --data work/smollm2/answers.jsonl --layers 1,10,19,28 --rows 528 \
        --config demo/smollm2.yaml --set data.batch_tokens=8192 --set data.anchors=12

12 blocks in answers of 96 tokens are one for every 8, what 512 in 4,096 come to; without the last option it is one for every 5.

Each draft trains for `--epochs` passes. The share depends on that: with C seconds of capturing and T of training a draft it is
(C + 4 T) / (4 C + 4 T), a half where a draft trains half as long as the capture ran.
"""

import argparse
import subprocess
import sys
import tempfile
import time

BLOCKS, KINDS = (8, 16), ("dflash", "dflash2")


def seconds(*words: str) -> float:
    """How long a command takes, the start of Python and torch included."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "pipeline", *words], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    """Capture once, train four times, print the seconds and the share."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="demo/tiny-chat")
    parser.add_argument("--data", default="work/demo/answers.jsonl")
    parser.add_argument("--layers", default="1,2,4")
    parser.add_argument("--config", default="demo/tiny.yaml")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], help="a training option, such as data.batch_tokens=8192")
    options = parser.parse_args()
    more = [word for each in options.set for word in ("--set", each)]
    with tempfile.TemporaryDirectory() as folder:
        cache = f"{folder}/hs.zarr"
        captured = seconds(
            *("capture", "--target", options.target, "--data", options.data, "--layers", options.layers),
            *("--dtype", "float32", "--max-length", "512", "--limit", str(options.rows), "--out", cache),
        )
        print(f"capture {captured:.0f} s", flush=True)
        trained = []
        for kind in KINDS:
            for block in BLOCKS:
                trained.append(
                    seconds(
                        *("train", "--cache", cache, "--draft", kind, "--config", options.config),
                        *("--set", f"draft.block_size={block}", "--epochs", str(options.epochs), *more),
                        *("--out", f"{folder}/{kind}-{block}"),
                    )
                )
                print(f"train {kind}, block {block}, {options.epochs} epochs: {trained[-1]:.0f} s", flush=True)
    count, total = len(trained), sum(trained)
    print(
        f"{count} drafts from one capture / capture and train each {(captured + total) / (count * captured + total):.2f}"
    )


if __name__ == "__main__":
    main()
