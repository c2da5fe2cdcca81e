"""A whole step of training against a straightforward one, as a ratio in the same run.

    python benchmarks/step.py [--data FILE] [--rounds 3] [--steps 3] [--samples 4]

A dflash2 draft of 2 layers, blocks of 16, hidden size 576, vocabulary 49,152, float32, AdamW; samples as long as FILE's (in the
tokens of demo/tiny-chat), at most 64 anchors each. The straightforward step has rows padded to the longest, a
dense mask over the context and all blocks, and the logits of all slots.
"""

import argparse
import tempfile
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from objective import BLOCK, HIDDEN, LAYERS, MASK, alternately, config, full_loss, head
from torch import Tensor
from torch.nn import functional as F

from capture.planning import plan_capture
from capture.settings import scan_data, settle
from draft.attention import Attend, Layout, Pair
from draft.blocks import Blocks, PackedSamples, block_labels, block_predecessors, block_valid, make_blocks
from draft.model import Draft, new_draft
from schemas.options import CaptureOptions, LossOptions, OptimOptions
from schemas.say import Silent
from train.batch import Batch, Draw, draw_blocks
from train.loss import Slots
from train.objective import slot_weights, states
from train.optim import make_optimizers
from train.step import Learner, run_step
from train.stream import MicroBatch, StreamState

ANCHORS, GAMMA = 64, 7.0


@dataclass(frozen=True)
class Padded:
    """The samples of a batch as rows of equal length, `ANCHORS` blocks a row; what is filled up weighs nothing."""

    samples: PackedSamples
    blocks: Blocks
    weight_NB: Tensor
    mask_R1QJ: Tensor


def batches_of(path: str | None, count: int, size: int) -> list[Batch]:
    """Batches of whole samples in random order, with random states and the file's tokens."""
    with tempfile.TemporaryDirectory() as folder:
        options = CaptureOptions(
            target="demo/tiny-chat", out=f"{folder}/hs.zarr", data=() if path is None else (path,), max_length=1024
        )
        settings = settle(options, Silent())
        _, plan, _ = plan_capture(settings, scan_data(options, Silent()), Silent())
        table = pa.concat_tables(plan)
    order = np.random.default_rng(0).permutation(len(table))
    draw, generator = Draw(BLOCK, ANCHORS, 0, None), torch.Generator().manual_seed(0)
    batches = []
    for index in range(count):
        rows = tuple(int(row) for row in order[index * size : (index + 1) * size])
        ids = [torch.tensor(table["input_ids"][row].as_py()) for row in rows]
        masks = [torch.tensor(table["loss_mask"][row].as_py(), dtype=torch.bool) for row in rows]
        lengths = tuple(len(part) for part in ids)
        hidden_TLH = torch.randn(sum(lengths), len(LAYERS), HIDDEN, generator=generator)
        samples = PackedSamples(torch.cat(ids), torch.cat(masks), hidden_TLH, lengths)
        micro = MicroBatch(0, rows, StreamState(), False)
        batches.append(Batch(micro, samples, *draw_blocks(samples, micro, draw)))
    return batches


def pad(batch: Batch) -> Padded:
    """Rows padded to the longest sample, and the mask [row, 1, slots, context + slots] of what each slot sees."""
    samples, blocks = batch.samples, batch.blocks
    longest, rows = max(samples.lengths), len(samples.lengths)
    ids, mask = torch.zeros(rows, longest, dtype=torch.int64), torch.zeros(rows, longest, dtype=torch.bool)
    hidden = torch.zeros(rows, longest, len(LAYERS), HIDDEN)
    anchor_RN = torch.zeros(rows, ANCHORS, dtype=torch.int64)
    real_RN = torch.zeros(rows, ANCHORS, dtype=torch.bool)
    start = 0
    for row, length in enumerate(samples.lengths):
        part = slice(start, start + length)
        ids[row, :length], mask[row, :length] = samples.input_ids_T[part], samples.loss_mask_T[part]
        hidden[row, :length] = samples.hidden_TLH[part]
        own = blocks.anchor_N[blocks.sample_N == row] - start
        anchor_RN[row, : len(own)], real_RN[row, : len(own)] = own, True
        start += length
    padded = PackedSamples(ids.flatten(), mask.flatten(), hidden.flatten(0, 1), (longest,) * rows)
    order_RN = anchor_RN.argsort(stable=True, dim=1)
    anchor_RN, real_RN = anchor_RN.gather(1, order_RN), real_RN.gather(1, order_RN)
    anchor_N = (anchor_RN + torch.arange(rows)[:, None] * longest).flatten()
    all_blocks = make_blocks(padded, anchor_N, BLOCK)
    weight_NB = slot_weights(all_blocks, GAMMA) * block_valid(padded, all_blocks) * real_RN.flatten()[:, None]
    slot_Q = torch.arange(ANCHORS * BLOCK)
    own_QQ = slot_Q[:, None] // BLOCK == slot_Q // BLOCK
    context_RQS = torch.arange(longest) < anchor_RN.repeat_interleave(BLOCK, 1)[:, :, None]
    mask_RQJ = torch.cat([context_RQS, own_QQ.expand(rows, -1, -1)], 2)
    return Padded(padded, all_blocks, weight_NB, mask_RQJ[:, None])


class DenseDraft(Draft):
    """The same draft with torch's own attention over a dense mask."""

    mask_R1QJ: Tensor

    def _attend(self, layout: Layout, window: int | None) -> Attend:  # noqa: ARG002
        rows = len(layout.tokens)

        def attend(query: Tensor, own: Pair, context: Pair) -> Tensor:
            def heads_first(part: Tensor) -> Tensor:
                return part.reshape(rows, -1, *part.shape[-2:]).transpose(1, 2)

            key, value = (torch.cat([heads_first(rows_of), heads_first(slots)], 2)
                          for rows_of, slots in zip(context, own, strict=True))  # fmt: skip
            output = F.scaled_dot_product_attention(
                heads_first(query), key, value, attn_mask=self.mask_R1QJ, enable_gqa=True
            )
            return output.transpose(1, 2).reshape(*query.shape[:2], -1)

        return attend


def learner_of(kind: type[Draft]) -> Learner:
    """A draft of one kind or the other with the same weights, and its optimizer."""
    draft = kind(config())
    draft.load_state_dict(new_draft(config(), torch.Generator().manual_seed(0)).state_dict())
    optimizers = make_optimizers(dict(draft.named_parameters()), OptimOptions(name="adamw"))
    return Learner(
        draft, head(), optimizers, LossOptions(gamma=GAMMA), 1.0, MASK, torch.device("cpu"), torch.float32
    )  # fmt: skip


def straightforward_step(learner: Learner, padded: Padded) -> float:
    """One update, from the logits of all slots; returns the gradient's norm."""
    draft = learner.draft
    assert isinstance(draft, DenseDraft) and draft.candidate_selector is not None
    draft.mask_R1QJ = padded.mask_R1QJ
    hidden_NBH = states(draft, learner.head, padded.samples, padded.blocks, MASK)
    labels, predecessors = (
        part(padded.samples, padded.blocks).flatten() for part in (block_labels, block_predecessors)
    )
    slots = Slots(hidden_NBH.flatten(0, 1), labels, padded.weight_NB.flatten(), predecessors)
    full_loss(slots.hidden_RH, slots, learner.head, draft.candidate_selector).backward()
    norm = learner.optimizers.gradient_norm()
    learner.optimizers.clip(learner.clip, norm)
    learner.optimizers.step(6e-4)
    learner.optimizers.zero_grad()
    return norm.item()


def compare_steps(path: str | None, rounds: int, count: int, size: int) -> None:
    """The same batches through both, alternately."""
    batches = batches_of(path, count, size)
    rows = [pad(batch) for batch in batches]
    ours, theirs = learner_of(Draft), learner_of(DenseDraft)
    first = run_step(ours, batches[:1], 6e-4)["grad_norm"], straightforward_step(theirs, rows[0])
    assert abs(first[0] - first[1]) <= 1e-3 * first[1], f"the two steps differ: gradient norms {first}"
    lengths = [length for batch in batches for length in batch.samples.lengths]
    slots = [int(block_valid(batch.samples, batch.blocks).sum()) for batch in batches]
    print(f"{size} samples a step, {np.mean(lengths):.0f} tokens on average, {max(lengths)} at most; "
          f"{np.mean(slots):.0f} of {size * ANCHORS * BLOCK} slots supervised")  # fmt: skip
    works = {
        "packed, sliced": lambda: [run_step(ours, [batch], 6e-4) for batch in batches],
        "straightforward": lambda: [straightforward_step(theirs, row) for row in rows],
    }
    taken = alternately(works, rounds)
    print(f"step / straightforward   {taken['packed, sliced'] / taken['straightforward']:8.2f}")


def main() -> None:
    """Print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="JSONL of conversations (default: those shipped with the project)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--samples", type=int, default=4, help="samples a step")
    arguments = parser.parse_args()
    compare_steps(arguments.data, arguments.rounds, arguments.steps, arguments.samples)


if __name__ == "__main__":
    main()
