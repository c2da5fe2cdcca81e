"""Drafts for the shipped tiny-chat, trained for a few seconds on its own greedy answers, so that what they accept varies.

A draft with random weights accepts nearly nothing, and two decoders that both accept nothing agree without proving anything.
"""

import json
from functools import cache
from pathlib import Path

import torch

from cache.head import TargetHead
from draft.blocks import PackedSamples, anchors_of, make_blocks
from draft.decode import decode_plain
from draft.model import Draft, new_draft
from schemas.draft import ARCHITECTURES, DraftConfig
from schemas.errors import DraftError
from schemas.options import LossOptions
from schemas.strict import parse
from target.layers import tap_layers
from target.load import Target, load_target, resolve_target
from train.objective import objective, total_loss

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "demo" / "tiny-chat"
LAYERS = (1, 2, 4)
EOS = (2,)
MASK, BLOCK = 3, 8
PROMPTS, NEW_TOKENS, STEPS = 10, 40, 28


@cache
def tiny_target() -> Target:
    """tiny-chat in float32 on the CPU."""
    return load_target(resolve_target(str(TINY)), "float32", "cpu")


@cache
def prompts() -> list[tuple[str, list[int]]]:
    """(id, ids) of a few of the project's prompts, as the chat template renders them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    rows = [json.loads(line) for line in (ROOT / "demo" / "prompts.jsonl").read_text().splitlines()[: PROMPTS * 7 : 7]]
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": row["turns"][0]}], tokenize=False, add_generation_prompt=True
        )
        for row in rows
    ]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return [(row["id"], each) for row, each in zip(rows, ids, strict=True)]


@cache
def answers() -> list[list[int]]:
    """The target's greedy answers to `prompts`, cut at NEW_TOKENS."""
    target = tiny_target()
    return [decode_plain(target, ids, NEW_TOKENS, EOS).tokens for _, ids in prompts()]


@cache
def answered_samples() -> tuple[list[str], PackedSamples]:
    """Ids and packed samples of prompts and answers: the states are the target's, the answers are supervised."""
    target, hidden, ids, masks = tiny_target(), [], [], []
    for (_, prompt), answer in zip(prompts(), answers(), strict=True):
        row = torch.tensor([*prompt, *answer])
        with tap_layers(target.layers, LAYERS) as states, torch.no_grad():
            target.decoder(input_ids=row[None], use_cache=False)
        hidden.append(torch.stack([states[layer][0] for layer in LAYERS], 1))
        ids.append(row)
        masks.append(torch.arange(len(row)) >= len(prompt))
    lengths = tuple(len(row) for row in ids)
    return [name for name, _ in prompts()], PackedSamples(torch.cat(ids), torch.cat(masks), torch.cat(hidden), lengths)


@cache
def tiny_head() -> TargetHead:
    """tiny-chat's embedding and (tied) head."""
    weight = tiny_target().model.get_input_embeddings().weight.detach()
    return TargetHead(weight, weight)


def tiny_draft_config(kind: str, window: int | None = None) -> DraftConfig:
    """A draft of two layers for tiny-chat, blocks of 8."""
    own = {"block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": list(LAYERS)}
    if kind == "dflash2":
        own |= {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 16, "selector_top_k": 8}
    target = json.loads((TINY / "config.json").read_text())
    kept = ("vocab_size", "hidden_size", "head_dim", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings")
    data = {key: target[key] for key in kept} | {
        "architectures": [ARCHITECTURES[kind]],
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "layer_types": ["full_attention" if window is None else "sliding_attention"] * 2,
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": 2,
        "rope_parameters": target["rope_parameters"],
        "rope_theta": target["rope_parameters"]["rope_theta"],
        "num_target_layers": target["num_hidden_layers"],
        "block_size": BLOCK,
        "dflash_config": own,
    }
    return parse(DraftConfig, data, "test", DraftError)


@cache
def trained_draft(kind: str, window: int | None = None) -> Draft:
    """A float32 draft that has learned these few answers in part."""
    draft = new_draft(tiny_draft_config(kind, window), torch.Generator().manual_seed(0))
    matrices = {
        name: parameter
        for name, parameter in draft.named_parameters()
        if name.endswith("proj.weight") or name == "fc.weight"
    }
    rest = [parameter for name, parameter in draft.named_parameters() if name not in matrices]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(list(matrices.values()), lr=1e-2, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=3e-3, weight_decay=0.0),
    ]
    _, samples = answered_samples()
    every, options = anchors_of(samples, BLOCK), LossOptions()
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        drawn = torch.randperm(len(every), generator=generator)[:64].sort().values
        sums = objective(draft, tiny_head(), samples, make_blocks(samples, every[drawn], BLOCK), options, MASK)
        draft.zero_grad()
        total_loss(sums, sums, options).backward()
        for optimizer in optimizers:
            optimizer.step()
    return draft.eval()
