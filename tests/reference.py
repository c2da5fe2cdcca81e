"""Naive references for the draft, in float64 and plain loops, and small random inputs that its tests share."""

import math
from typing import Any

import torch
from torch import Tensor

from cache.head import TargetHead
from draft.blocks import Blocks, PackedSamples, block_inputs, block_labels, block_valid
from draft.model import Draft, new_draft
from schemas.draft import ARCHITECTURES, DraftConfig
from schemas.errors import DraftError
from schemas.strict import parse

VOCAB = 41
MASK = 40


def small_config(kind: str = "dflash", window: int | None = None, **changes: Any) -> DraftConfig:
    """A draft of two layers, four heads over two key-value heads, blocks of 4; keys of `dflash_config` may be changed too."""
    own: dict[str, Any] = {"block_size": 4, "mask_token_id": MASK, "target_layer_ids": [1, 3]}
    if kind == "dflash2":
        own |= {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
    own |= {key: changes.pop(key) for key in list(changes) if key in ("block_size", *own, "causal")}
    layers = changes.get("num_hidden_layers", 2)
    data: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "dtype": "float32",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention" if window is None else "sliding_attention"] * layers,
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rope_theta": 10000.0,
        "num_target_layers": 6,
        "block_size": own["block_size"],
        "dflash_config": own,
    }
    return parse(DraftConfig, data | changes, "test", DraftError)


def lively_draft(config: DraftConfig, seed: int = 0) -> Draft:
    """A draft none of whose parts is at its neutral start: norms, convolutions and selector too."""
    draft = new_draft(config, torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return draft


def random_samples(lengths: tuple[int, ...], layers: int = 2, hidden: int = 32, seed: int = 0) -> PackedSamples:
    """Samples with random ids, states and a mask that has gaps."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    return PackedSamples(
        torch.randint(0, MASK, (total,), generator=generator),
        torch.rand(total, generator=generator) < 0.8,
        torch.randn(total, layers, hidden, generator=generator),
        lengths,
    )


def random_head(hidden: int = 32, seed: int = 5, **scales: Any) -> TargetHead:
    """An untied embedding and head."""
    generator = torch.Generator().manual_seed(seed)
    embed, head = torch.randn(2, VOCAB, hidden, generator=generator) * 0.3
    return TargetHead(embed, head, **scales)


def naive_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    return states / (states.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def naive_rotate(vector_D: Tensor, position: int, theta: float) -> Tensor:
    """Rotary embedding as multiplication of complex numbers: entry i and entry i + D/2 are one number."""
    half = vector_D.shape[0] // 2
    angles = torch.tensor(
        [position * theta ** (-2 * index / vector_D.shape[0]) for index in range(half)], dtype=torch.float64
    )
    turned = torch.complex(vector_D[:half], vector_D[half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag])


def naive_convolve(
    states_BC: Tensor, normed_BC: Tensor, weights: dict[str, Tensor], prefix: str, side: int, group: int
) -> Tensor:
    """The definition, element by element."""
    base, projection = weights[f"{prefix}.base_kernel"], weights[f"{prefix}.kernel_projection.weight"]
    taps, channels = base.shape[1:]
    groups = channels // group
    output = torch.zeros_like(states_BC)
    for t in range(states_BC.shape[0]):
        deltas = projection @ normed_BC[t]
        for tap in range(min(taps, t + 1)):
            for c in range(channels):
                delta = deltas[(side * taps + tap) * groups + c // group]
                output[t, c] += (base[side, tap, c] + delta) * states_BC[t - tap, c]
    return output


def naive_attention(
    draft: Draft, layer: int, states_BH: Tensor, context_SH: Tensor, anchor: int, weights: dict[str, Tensor]
) -> Tensor:
    """One block's attention over context positions 0..anchor-1 and itself, one query head at a time."""
    config, prefix = draft.config, f"layers.{layer}.self_attn"
    theta, width = config.rope_theta, config.head_dim
    window = config.windows[layer]
    keys_from = torch.cat([context_SH, states_BH])
    positions = [*range(anchor), *range(anchor, anchor + len(states_BH))]
    output = torch.zeros(len(states_BH), config.num_attention_heads, width, dtype=torch.float64)
    for head in range(config.num_attention_heads):
        kv = head // (config.num_attention_heads // config.num_key_value_heads)
        rows = slice(kv * width, (kv + 1) * width)
        keys = keys_from @ weights[f"{prefix}.k_proj.weight"][rows].T
        keys = naive_norm(keys, weights[f"{prefix}.k_norm.weight"], config.rms_norm_eps)
        keys = torch.stack([naive_rotate(key, position, theta) for key, position in zip(keys, positions, strict=True)])
        values = keys_from @ weights[f"{prefix}.v_proj.weight"][rows].T
        for slot in range(len(states_BH)):
            query = weights[f"{prefix}.q_proj.weight"][head * width : (head + 1) * width] @ states_BH[slot]
            query = naive_norm(query, weights[f"{prefix}.q_norm.weight"], config.rms_norm_eps)
            scores = keys @ naive_rotate(query, anchor + slot, theta) / math.sqrt(width)
            seen = torch.tensor([window is None or anchor + slot - position < window for position in positions])
            output[slot, head] = scores.masked_fill(~seen, -torch.inf).softmax(0) @ values
    return output.flatten(1) @ weights[f"{prefix}.o_proj.weight"].T


def naive_forward(draft: Draft, samples: PackedSamples, embeds_NBH: Tensor, blocks: Blocks) -> Tensor:
    """States [N, B, H] of every block, each computed alone from its own sample's rows before its anchor."""
    weights = {key: value.double() for key, value in draft.state_dict(keep_vars=True).items()}
    config, own = draft.config, draft.config.dflash_config
    starts = [sum(samples.lengths[:index]) for index in range(len(samples.lengths))]
    output = []
    for index, packed in enumerate(blocks.anchor_N.tolist()):
        start = max(start for start in starts if start <= packed)
        context = samples.hidden_TLH[start:packed].double().flatten(1) @ weights["fc.weight"].T
        context = naive_norm(context, weights["hidden_norm.weight"], config.rms_norm_eps)
        states = embeds_NBH[index].double()
        for layer in range(config.num_hidden_layers):
            for norm, sublayer, convolution in (
                ("input_layernorm", "attention", "attention_conv"),
                ("post_attention_layernorm", "mlp", "mlp_conv"),
            ):
                normed = naive_norm(states, weights[f"layers.{layer}.{norm}.weight"], config.rms_norm_eps)
                inner = normed
                place = f"layers.{layer}.{convolution}"
                if own.conv_group_size is not None:
                    inner = naive_convolve(inner, normed, weights, place, 0, own.conv_group_size)
                if sublayer == "attention":
                    inner = naive_attention(draft, layer, inner, context, packed - start, weights)
                else:
                    mlp = f"layers.{layer}.mlp"
                    gate = torch.nn.functional.silu(inner @ weights[f"{mlp}.gate_proj.weight"].T)
                    inner = (gate * (inner @ weights[f"{mlp}.up_proj.weight"].T)) @ weights[f"{mlp}.down_proj.weight"].T
                if own.conv_group_size is not None:
                    inner = naive_convolve(inner, normed, weights, place, 1, own.conv_group_size)
                states = states + inner
        output.append(naive_norm(states, weights["norm.weight"], config.rms_norm_eps))
    return torch.stack(output)


def full_objective(
    draft: Draft, head: TargetHead, samples: PackedSamples, blocks: Blocks, gamma: float
) -> dict[str, Tensor]:
    """The sums of the losses from the logits of every slot at once, slot by slot in loops, with autograd's own gradients."""
    states = draft(samples.hidden_TLH, samples.lengths, head.embed(block_inputs(samples, blocks, MASK)), blocks)
    logits, valid = head.logits(states), block_valid(samples, blocks)
    labels, selector = block_labels(samples, blocks), draft.candidate_selector
    sums = {name: torch.zeros(()) for name in ("base_loss", "base_weight", "selector_loss", "selector_weight")}
    for n, k in valid.nonzero().tolist():
        weight, label = math.exp(-(k - int(blocks.prefix_N[n])) / gamma), labels[n, k]
        sums["base_loss"] = sums["base_loss"] - weight * logits[n, k].log_softmax(0)[label]
        sums["base_weight"] = sums["base_weight"] + weight
        if selector is None:
            continue
        candidates = logits[n, k].argsort(descending=True)[: selector.top_k]
        if label in candidates:
            left = selector.predecessor_codebook[labels[n, k - 1]] * selector.hidden_projection(states[n, k])
            scores = logits[n, k][candidates] + selector.successor_codebook[candidates] @ left
            sums["selector_loss"] = sums["selector_loss"] - weight * scores.log_softmax(0)[candidates == label][0]
            sums["selector_weight"] = sums["selector_weight"] + weight
    return sums if selector is not None else {name: sums[name] for name in ("base_loss", "base_weight")}


def assert_near(found: Tensor, expected: Tensor, bound: float = 1e-5) -> None:
    """max |a - b| <= bound * max |b|."""
    assert found.shape == expected.shape
    error, scale = (found.double() - expected.double()).abs().max().item(), expected.abs().max().item()
    assert error <= bound * scale, f"differs by {error:.3g}, allowed {bound * scale:.3g}"
