"""Answers of the target to a batch of prompts, greedy or sampled, with a key-value cache.

Shape suffixes: b sequences of a batch, m its longest prompt, S tokens so far, H hidden size, V vocabulary, N new tokens.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import DynamicCache

from schemas.errors import CaptureFault
from target.head import HeadTraits, logits_of
from target.load import Target
from target.prefill import cache_argument

# Answered rows are dropped from the batch, at the price of a copy of the cache, once they are this share of it.
DROP_SHARE = 0.25


# Which token comes next: (logits [b, V], rows of the batch [b], number of the new token) -> ids [b].
Choose = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn: at `temperature`, among the likeliest tokens that hold `top_p` of the probability."""

    temperature: float
    top_p: float
    seed: int

    def seed_of(self, row: int, turn: int) -> int:
        """The seed of one answer, 31 bits: a function of the seed, the prompt's row and its turn alone."""
        return int(np.random.SeedSequence([self.seed, row, turn]).generate_state(1)[0]) >> 1


def greedy_answers(
    target: Target, traits: HeadTraits, prompts: Sequence[Sequence[int]], max_new_tokens: int, eos: Collection[int]
) -> list[list[int]]:
    """The most likely next tokens after each prompt, through the first id of `eos`, at most `max_new_tokens`.

    Every answer is the one the prompt would get alone, to the rounding of the data type: in float32 the same ids.
    Raises CaptureFault where the logits are not finite.
    """
    return _answers(target, traits, prompts, max_new_tokens, eos, lambda logits_bV, _rows, _step: logits_bV.argmax(-1))


def sampled_answers(
    target: Target,
    traits: HeadTraits,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos: Collection[int],
    sampling: Sampling,
    places: Sequence[tuple[int, int]],
) -> list[list[int]]:
    """Drawn next tokens; `places` are each prompt's (row, turn).

    Each answer has random numbers of its own, one a token, so it is the same in any batch, to the rounding of the data
    type. Raises CaptureFault where the logits are not finite.
    """
    draws = [np.random.default_rng(sampling.seed_of(*place)).random(max_new_tokens) for place in places]
    draws_bN = torch.tensor(np.array(draws))

    def choose(logits_bV: torch.Tensor, rows_b: torch.Tensor, step: int) -> torch.Tensor:
        return draw(logits_bV, draws_bN.to(rows_b.device)[rows_b, step], sampling)

    return _answers(target, traits, prompts, max_new_tokens, eos, choose)


def draw(logits_bV: torch.Tensor, uniform_b: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The token at which the cumulative probability, likeliest token first, passes a uniform number's share of top_p's.

    Kept are the likeliest tokens up to and including the one that brings their probability to `top_p`.
    """
    # Logits that are not finite are reported by the caller; here they must not raise.
    scaled_bV = torch.nan_to_num(logits_bV.double()) / sampling.temperature
    probs_bV, ids_bV = scaled_bV.softmax(-1).sort(stable=True, dim=-1, descending=True)
    sums_bV = probs_bV.cumsum(-1)
    kept_bV = sums_bV - probs_bV < sampling.top_p
    mass_b = (probs_bV * kept_bV).sum(-1)
    place_b = (sums_bV <= (uniform_b * mass_b)[:, None]).sum(-1).clamp(max=kept_bV.sum(-1) - 1)
    next_b: torch.Tensor = ids_bV.gather(-1, place_b[:, None])[:, 0]
    return next_b


@torch.inference_mode()
def _answers(
    target: Target,
    traits: HeadTraits,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos: Collection[int],
    choose: Choose,
) -> list[list[int]]:
    """The chosen tokens after each prompt.

    Prompts are padded on the left and masked, with positions counted from each one's first token.
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
    cache, name = DynamicCache(config=target.config), cache_argument(target.decoder)
    for step in range(max_new_tokens):
        output = target.decoder(
            input_ids=step_ids, attention_mask=mask_bS, position_ids=positions, use_cache=True, **{name: cache}
        )
        logits_bV = logits_of(output.last_hidden_state[:, -1], target, traits)
        best_b = logits_bV.amax(dim=-1)
        next_b = choose(logits_bV, rows_b, step)
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
