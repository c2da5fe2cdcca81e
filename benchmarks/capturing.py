"""Capturing against a bare forward, and against a loop that pads in file order, as ratios in the same run.

    python benchmarks/capturing.py [--target demo/tiny-chat | --target wide] [--rows 400] [--turns 8] [--batch-tokens 2048]

Captured are four layers and the top 64 of the logits, encoded in bf16 and written with fsync by the loop that `dflash capture`
runs. The bare forward computes full logits over the same batches and keeps nothing. The loop in file order is our own code, but
batches the samples as they come, padded to the longest of each batch, under the same limit of places. The straightforward loop
does what one writes first, with no more places in a batch: samples as they come, all padded to the longest, hidden states and full logits
as transformers returns them, top 64 of every row, a safetensors file a batch, no fsync.
`wide` is a random model (H 1024, 6 layers, vocabulary 32,768) made on the spot. With `--turns N` 1 to N conversations in a row
are joined into one: the shipped ones are of one turn and of nearly one length, which chats are not.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import save_file

from cache.write import CacheWriter
from capture.crew import gather
from capture.forward import ShardPlan, make_batch, run_shard, shard_plan, token_arrays
from capture.planning import plan_capture
from capture.progress import Progress
from capture.settings import DEFAULT_DATA, scan_data, settle
from capture.shards import batch_places, run_shards
from schemas.manifest import Identity
from schemas.options import CaptureOptions
from schemas.ranks import ALONE
from schemas.say import Silent
from target.load import load_target

WIDE = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 64, "vocab_size": 32_768, "num_hidden_layers": 6}  # fmt: skip


def wide_target(folder: Path) -> str:
    """A random Qwen3 with the shipped tokenizer, larger than a CPU's cache."""
    import shutil

    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**WIDE, eos_token_id=2, tie_word_embeddings=True)).save_pretrained(folder)
    for path in Path("demo/tiny-chat").glob("*"):
        if path.name.startswith(("tokenizer", "chat", "generation")):
            shutil.copy(path, folder)
    return str(folder)


def joined(data: Path, turns: int, rows: int, out: Path) -> str:
    """A file of `rows` conversations, each of 1 to `turns` of those in `data`, in order."""
    draw, lines = random.Random(0), data.read_text().splitlines()
    with out.open("w") as file:
        for row in range(rows):
            count = draw.randint(1, turns)
            taken, lines = lines[:count], lines[count:]
            messages = [message for line in taken for message in json.loads(line)["messages"]]
            file.write(json.dumps({"id": f"joined-{row}", "messages": messages}) + "\n")
    return str(out)


def in_file_order(plan: ShardPlan, batch_tokens: int) -> ShardPlan:
    """The shard's samples batched as they come."""
    batch, count, longest, numbers = 0, 0, 0, []
    for length in plan.length.tolist():
        if count and (count + 1) * max(longest, length) > batch_tokens:
            batch, count, longest = batch + 1, 0, 0
        count, longest = count + 1, max(longest, length)
        numbers.append(batch)
    return replace(plan, batch=np.array(numbers, dtype=np.int64))


def run_straightforward(
    model: torch.nn.Module, plans: list[ShardPlan], identity: Identity, batch_tokens: int, path: Path
) -> None:
    """Keep the same layers and top-k from transformers' own outputs, samples as they come, padded to the longest of all."""
    widest = max(int(plan.length.max()) for plan in plans)
    sequences = [ids for plan in plans for ids in np.split(plan.input_ids, np.cumsum(plan.length)[:-1])]
    count = max(1, batch_tokens // widest)
    with torch.inference_mode():
        for first in range(0, len(sequences), count):
            ids_bm = torch.zeros(len(sequences[first : first + count]), widest, dtype=torch.int64)
            for row, ids in enumerate(sequences[first : first + count]):
                ids_bm[row, : len(ids)] = torch.from_numpy(ids.astype(np.int64))
            output = model(input_ids=ids_bm, use_cache=False, output_hidden_states=True)
            values, top_ids = torch.log_softmax(output.logits, dim=-1).topk(identity.top_k)
            kept = {f"hidden/{layer}": output.hidden_states[layer + 1].bfloat16() for layer in identity.layers}
            save_file(kept | {"topk/ids": top_ids.int(), "topk/logprobs": values.bfloat16()}, path)


def main() -> None:
    """Plan a capture; run it, the bare forward and the loop in file order in turn; print each one's best."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="demo/tiny-chat")
    parser.add_argument("--data", default=str(DEFAULT_DATA), help="conversations; by default those shipped")
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--shard-tokens", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        name = wide_target(Path(folder) / "wide") if arguments.target == "wide" else arguments.target
        data = joined(Path(arguments.data), arguments.turns, arguments.rows, Path(folder) / "joined.jsonl")
        options = CaptureOptions(
            target=name, data=(data,), out=f"{folder}/hs.zarr", dtype="float32", limit=arguments.rows, max_length=2048,
            shard_tokens=arguments.shard_tokens, batch_tokens=arguments.batch_tokens, layers=(1, 2, 3, 4),
        )  # fmt: skip
        settings = settle(options, Silent())
        manifest, shard_tables, _ = plan_capture(settings, scan_data(options, Silent()), Silent())
        table = pa.concat_tables(shard_tables)
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
            with gather(ALONE, 1) as crew:
                run_shards(target, settings.traits, writer, list(shards), crew, Progress(crew, 1, Silent()))

        def file_order() -> None:
            writer = CacheWriter.create(str(Path(folder) / str(time.monotonic_ns())), manifest, table)
            for shard, plan in zip(shards, plans, strict=True):
                ordered = in_file_order(plan, options.batch_tokens)
                writer.commit_shard(shard, run_shard(target, settings.traits, identity, ordered, lambda _: None))

        def straightforward() -> None:
            run_straightforward(target.model, plans, identity, options.batch_tokens, Path(folder) / "batch.safetensors")

        works = {"bare": bare, "captured": captured, "file order": file_order, "straightforward": straightforward}
        times = best(works, arguments.rounds)
    tokens = manifest.totals.tokens
    for work, taken in times.items():
        print(f"{work:<15} {tokens / taken:8,.0f} tokens/s")
    padded = {"captured": plans, "file order": [in_file_order(plan, options.batch_tokens) for plan in plans]}
    for work, shown in padded.items():
        print(f"padding, {work}: {1 - tokens / sum(sum(batch_places(plan)) for plan in shown):.1%}")
    filled = [int(plan.length.sum()) / identity.shard_tokens for plan in plans]
    print(f"shards filled: {np.mean(filled[:-1] or filled):.2%} (the last one {filled[-1]:.1%})")
    print(f"captured / bare forward with full logits {times['bare'] / times['captured']:.2f}")
    print(
        f"captured / the same code in file order, padded to each batch's longest {times['file order'] / times['captured']:.2f}"
    )
    print(f"captured / a straightforward loop {times['straightforward'] / times['captured']:.2f}")


def best(works: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """The least seconds of each, run in turn after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            started = time.perf_counter()
            work()
            if number:
                times[name].append(time.perf_counter() - started)
    return {name: min(taken) for name, taken in times.items()}


if __name__ == "__main__":
    main()
