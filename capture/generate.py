"""Greedy answers of the target to a batch of prompts, with a key-value cache.

Shape suffixes: b sequences of a batch, m its longest prompt, S tokens so far, H hidden size, V vocabulary.
"""

from collections.abc import Collection, Sequence

import torch
from transformers import DynamicCache

from schemas.errors import CaptureFault
from target.head import HeadTraits, logits_of
from target.load import Target

# Answered rows are dropped from the batch, at the price of a copy of the cache, once they are this share of it.
DROP_SHARE = 0.25


@torch.inference_mode()
def greedy_answers(
    target: Target, traits: HeadTraits, prompts: Sequence[Sequence[int]], max_new_tokens: int, eos: Collection[int]
) -> list[list[int]]:
    """The most likely next tokens after each prompt, through the first id of `eos`, at most `max_new_tokens`.

    Prompts are padded on the left and masked, with positions counted from each one's first token, so every answer is
    the one the prompt would get alone, to the rounding of the data type: in float32 the same ids. Raises CaptureFault
    where the logits are not finite.
    """
    device = target.device
    count, width = len(prompts), max(len(prompt) for prompt in prompts)
    ids_bm = torch.zeros(count, width, dtype=torch.long)
    mask_bS = torch.zeros(count, width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids_bm[row, width - len(prompt) :] = torch.tensor(prompt)
        mask_bS[row, width - len(prompt) :] = 1
    step_ids, mask_bS = ids_bm.to(device), mask_bS.to(device)
    positions = (mask_bS.cumsum(dim=1) - 1).clamp(min=0)
    eos_ids = torch.tensor(sorted(eos), device=device)
    rows_b = torch.arange(count, device=device)
    ended_b = torch.zeros(count, dtype=torch.bool, device=device)
    answers = torch.full((count, max_new_tokens), -1, dtype=torch.long, device=device)
    cache = DynamicCache(config=target.config)
    for step in range(max_new_tokens):
        output = target.decoder(
            input_ids=step_ids, attention_mask=mask_bS, position_ids=positions, cache=cache, use_cache=True
        )
        best_b, next_b = logits_of(output.last_hidden_state[:, -1], target, traits).max(dim=-1)
        answers[rows_b, step] = torch.where(ended_b, -1, next_b)
        ended_b = ended_b | torch.isin(next_b, eos_ids)
        ended, broken = torch.stack([ended_b.sum(), (~best_b.isfinite()).sum()]).tolist()
        if broken:
            raise CaptureFault(
                f"{broken} of {len(rows_b)} answers met logits that are not finite at token {step + 1}: check the "
                "target's weights, or run it "
                "with --dtype float32"
            )
        if ended == len(rows_b):
            break
        positions = positions[:, -1:] + 1
        if ended >= max(1, DROP_SHARE * len(rows_b)):
            keep = (~ended_b).nonzero()[:, 0]
            cache.batch_select_indices(keep)
            rows_b, ended_b, next_b, mask_bS, positions = (
                t[keep] for t in (rows_b, ended_b, next_b, mask_bS, positions)
            )
        step_ids = next_b[:, None]
        mask_bS = torch.cat([mask_bS, mask_bS.new_ones(len(rows_b), 1)], dim=1)
    return [[token for token in answer if token >= 0] for answer in answers.tolist()]
