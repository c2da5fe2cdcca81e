"""What a capture's worker needs beyond the target, in shards, for little data and for eight times as much.

    python benchmarks/capture_memory.py [--rows 100] [--hidden 512]

A worker is a fresh process that goes on with a planned capture: what it adds to its memory after the target is loaded, at its
peak, over the bytes of one shard. Two shards are meant to be there: one that is filled, one that is written.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from cache.write import CacheWriter
from capture.crew import gather
from capture.planning import plan_capture
from capture.progress import Progress
from capture.settings import scan_data, settle
from capture.shards import run_shards
from schemas.arrays import bytes_per_token
from schemas.options import CaptureOptions
from schemas.ranks import ALONE
from schemas.say import Silent
from target.load import load_target

SHARD_TOKENS, BATCH_TOKENS = 8192, 512


def peak() -> int:
    """The most memory this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def work(options: CaptureOptions) -> None:
    """Go on with a planned capture; print the peak before the first shard and at the end."""
    settings = settle(options, Silent())
    target = load_target(settings.ref, "float32", "cpu")
    writer = CacheWriter.resume(options.out)
    assert writer is not None
    with torch.inference_mode():
        target.model(input_ids=torch.ones(1, BATCH_TOKENS, dtype=torch.long), use_cache=False)
    before = peak()
    with gather(ALONE, 1) as crew:
        run_shards(target, settings.traits, writer, writer.missing_shards(), crew, Progress(crew, 1, Silent()))
    print(json.dumps({"before": before, "after": peak()}))


def main() -> None:
    """Plan both captures here, run each in a worker, print what it needed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(CaptureOptions.model_validate_json(arguments.worker))
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "target"
        config = Qwen3Config(
            hidden_size=arguments.hidden, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8,
            num_key_value_heads=4, head_dim=64, vocab_size=2048, eos_token_id=2, tie_word_embeddings=True,
        )  # fmt: skip
        Qwen3ForCausalLM(config).save_pretrained(target)
        for path in Path("demo/tiny-chat").glob("*"):
            if path.name.startswith(("tokenizer", "chat", "generation")):
                shutil.copy(path, target)
        for rows in (arguments.rows, 8 * arguments.rows):
            options = CaptureOptions(
                target=str(target), out=f"{folder}/{rows}", dtype="float32", codec="f32", layers=tuple(range(8)),
                limit=rows, max_length=512, shard_tokens=SHARD_TOKENS, batch_tokens=BATCH_TOKENS,
            )  # fmt: skip
            settings = settle(options, Silent())
            manifest, plan, _ = plan_capture(settings, scan_data(options, Silent()), Silent())
            CacheWriter.create(options.out, manifest, plan)
            shard = bytes_per_token(manifest.identity)[0] * SHARD_TOKENS
            command = [sys.executable, __file__, "--worker", options.model_dump_json()]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            print(
                f"{rows:>5} rows, {manifest.totals.shards:>3} shards of {shard / 1e6:.0f} MB: "
                f"{(found['after'] - found['before']) / shard:.2f} shards beyond the target"
            )
    return None


if __name__ == "__main__":
    main()
