"""How long a checkpoint keeps a step waiting, as ratios to a step in the same run: written before the step goes on, and beside it.

    python benchmarks/checkpointing.py [--steps 12]

A dflash2 draft of two layers at SmolLM2's sizes (H 576, V 49152), blocks of 16, AdamW, 512 packed tokens, 64 blocks, on the CPU.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from cache.head import TargetHead
from draft.blocks import Blocks, PackedSamples, anchors_of, make_blocks
from draft.model import new_draft
from schemas.draft import DraftConfig
from schemas.errors import DraftError
from schemas.options import LossOptions, OptimOptions
from schemas.strict import parse
from train.batch import Batch
from train.checkpoint import Checkpoint, TrainState, save_checkpoint
from train.optim import make_optimizers
from train.step import Learner, run_step
from train.stream import MicroBatch, StreamState
from train.writer import CheckpointWriter

HIDDEN, VOCAB, LAYERS, BLOCK, TOKENS, ANCHORS = 576, 49_152, 2, 16, 512, 64
CONFIG = {
    "architectures": ["DFlash2DraftModel"], "dtype": "float32", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 1536,
    "num_hidden_layers": LAYERS, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192, "tie_word_embeddings": True, "layer_types": ["full_attention"] * LAYERS, "max_window_layers": LAYERS,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}, "rope_theta": 1e5, "num_target_layers": 30, "block_size": BLOCK,
    "dflash_config": {"block_size": BLOCK, "mask_token_id": 0, "target_layer_ids": [1, 10, 19, 28], "conv_kernel_size": 2,
                      "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16},
}  # fmt: skip


def learner_and_batch() -> tuple[Learner, Batch]:
    """A random draft and one micro-batch for it."""
    draw = torch.Generator().manual_seed(0)
    draft = new_draft(parse(DraftConfig, CONFIG, "benchmark", DraftError), draw)
    embed = torch.randn(VOCAB, HIDDEN, generator=draw) * 0.02
    optimizers = make_optimizers(dict(draft.named_parameters()), OptimOptions(name="adamw"))
    learner = Learner(
        draft, TargetHead(embed, embed), optimizers, LossOptions(), 1.0, 0, torch.device("cpu"), torch.float32
    )
    ids = torch.randint(1, VOCAB, (TOKENS,), generator=draw)
    samples = PackedSamples(ids, torch.ones(TOKENS).bool(), torch.randn(TOKENS, 4, HIDDEN, generator=draw), (TOKENS,))
    blocks: Blocks = make_blocks(samples, anchors_of(samples, BLOCK)[:: TOKENS // ANCHORS].contiguous(), BLOCK)
    return learner, Batch(MicroBatch(0, (0,), StreamState(), False), samples, blocks, 0)


def main() -> None:
    """Time steps alone, steps with a checkpoint before each, and steps with one beside each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    count = parser.parse_args().steps
    learner, batch = learner_and_batch()

    def step() -> None:
        run_step(learner, [batch], 1e-4)

    def checkpoint(number: int) -> Checkpoint:
        return Checkpoint(learner.draft.state_dict(), learner.optimizers.state(), TrainState(step=number))

    def seconds(each: "list[float]") -> float:
        return statistics.median(each)

    def timed(work: "list[object]") -> float:
        started = time.perf_counter()
        for part in work:
            part()  # type: ignore[operator]
        return time.perf_counter() - started

    step()
    alone = seconds([timed([step]) for _ in range(count)])
    with tempfile.TemporaryDirectory(dir=".") as place:
        folder = Path(place)
        before = seconds([timed([lambda n=n: save_checkpoint(folder, checkpoint(n), 1), step]) for n in range(count)])
        with CheckpointWriter(folder / "beside", 1) as writer:
            handing, beside = [], []
            for number in range(count):
                writer.wait()
                handing.append(timed([lambda n=number: writer.save(checkpoint(n))]))
                beside.append(timed([step]))
        size = sum(path.stat().st_size for path in folder.rglob("*.safetensors")) / 2
    print(f"a step {alone:.3f} s; a checkpoint {size / 1e6:,.0f} MB")
    print(f"stall, written before the step goes on: {(before - alone) / alone:.2f} steps")
    print(f"stall, written beside the steps:        {(seconds(handing) + seconds(beside) - alone) / alone:.2f} steps")
    print(f"of which until training goes on:        {seconds(handing) / alone:.3f} steps")


if __name__ == "__main__":
    main()
