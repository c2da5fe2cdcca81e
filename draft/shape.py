"""The draft's config from the target's: what a draft repeats of its target, and what it never takes over."""

from collections.abc import Mapping, Sequence
from typing import Any

from schemas.draft import ARCHITECTURES, FIXED_ROPE_TYPES, DraftConfig
from schemas.errors import DraftError, OptionError
from schemas.manifest import Identity
from schemas.options import DraftOptions
from schemas.strict import parse

# What a rotary type needs beside its theta. Partial and multi-axis rotary are the target's alone: a draft rotates whole heads on one axis.
ROPE_KEYS = (
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "low_freq_factor",
    "high_freq_factor",
)
# Kimi Linear knows positions by its linear attention alone; its checkpoints' configs name this theta, transformers' class none.
UNUSED_THETAS = {"kimi_linear": 10000.0}


def draft_config(
    target_config: Mapping[str, Any], identity: Identity, layers: Sequence[int], options: DraftOptions
) -> DraftConfig:
    """The config of a draft for a cache's target.

    `target_config` is the target's config.json, `layers` the captured layers to condition on. From the target come the sizes that
    `options` leave open, the rotary theta and scaling, the norm's epsilon, the activation, the vocabulary and the scales around
    its embedding and head. Raises OptionError for options or layers that do not fit, DraftError for a target whose rotary
    embedding a draft cannot repeat or whose config lacks a size.
    """
    text = text_config(target_config)
    rope = rope_parameters(text)
    heads = options.num_attention_heads or _needed(text, "num_attention_heads")
    data = {
        "architectures": [_architecture(options)],
        "vocab_size": identity.target.vocab_size,
        "hidden_size": identity.target.hidden_size,
        "intermediate_size": options.intermediate_size or _needed(text, "intermediate_size"),
        "num_hidden_layers": options.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": options.num_key_value_heads or text.get("num_key_value_heads") or heads,
        "head_dim": options.head_dim
        or text.get("head_dim")
        or identity.target.hidden_size // _needed(text, "num_attention_heads"),
        "hidden_act": text.get("hidden_act") or text.get("hidden_activation") or "silu",
        "rms_norm_eps": text.get("rms_norm_eps", 1e-6),
        "max_position_embeddings": _needed(text, "max_position_embeddings"),
        **{key: text.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
        "tie_word_embeddings": identity.target.tied,
        "layer_types": ["full_attention" if options.sliding_window is None else "sliding_attention"]
        * options.num_layers,
        "use_sliding_window": options.sliding_window is not None,
        "sliding_window": options.sliding_window,
        "max_window_layers": options.num_layers if options.sliding_window is None else 0,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None
        if rope["rope_type"] == "default"
        else {k: v for k, v in rope.items() if k != "rope_theta"},
        "num_target_layers": identity.target.num_hidden_layers,
        "block_size": options.block_size,
        "dflash_config": _own_part(identity, layers, options),
    }
    return parse(DraftConfig, data, "draft options", OptionError)


def text_config(target_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The decoder's part of a target's config.json, with what transformers takes for the keys that it leaves out.

    A wrapper's text_config may hold next to nothing (Gemma 3); a model may name a key in its own way (Kimi Linear:
    model_max_length). A plain text model's file is otherwise complete, so what is missing there stays missing.
    """
    from transformers import CONFIG_MAPPING

    nested = target_config.get("text_config")
    given = {name: value for name, value in (nested or target_config).items() if value is not None}
    if given.get("model_type") not in CONFIG_MAPPING:
        return given
    known = CONFIG_MAPPING[given["model_type"]].from_dict(dict(given))
    names = {*known.attribute_map, *(known.to_dict() if nested else ())}
    return {name: getattr(known, name, None) for name in names} | given


def _architecture(options: DraftOptions) -> str:
    if options.kind not in ARCHITECTURES:
        raise OptionError(f"draft kind {options.kind!r} is not in this version; choose {' or '.join(ARCHITECTURES)}")
    return ARCHITECTURES[options.kind]


def _needed(text: Mapping[str, Any], key: str) -> Any:
    if text.get(key) is None:
        own = f"set draft.{key}, or " if key in DraftOptions.model_fields else ""
        raise DraftError(f"the target's config has no {key}: {own}choose another target")
    return text[key]


def _own_part(identity: Identity, layers: Sequence[int], options: DraftOptions) -> dict[str, Any]:
    target = identity.target
    if last := [layer for layer in layers if layer >= target.num_hidden_layers - 1]:
        raise OptionError(
            f"layer {last[0]} is the target's last: engines disagree on whether its output is normed, so no draft trains on it; "
            f"choose among 0..{target.num_hidden_layers - 2}"
        )
    own: dict[str, Any] = {
        "block_size": options.block_size,
        "mask_token_id": identity.mask_token_id,
        "target_layer_ids": sorted(layers),
    }
    if options.kind == "dflash2":
        for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            own[name] = getattr(options, name)
    if target.logit_scale != 1.0:
        own["output_multiplier"] = target.logit_scale
    if target.logit_softcap is not None:
        own["final_logit_softcapping"] = target.logit_softcap
    if target.embedding_scale != 1.0:
        own["input_embedding_scale"] = target.embedding_scale
    return own


def rope_parameters(text: Mapping[str, Any]) -> dict[str, Any]:
    """The draft's `rope_parameters`: type, theta and scaling of the target's full-attention layers, whole heads on one axis.

    Nested `rope_parameters` come first, then top-level `rope_theta` and `rope_scaling`. Raises DraftError for a type whose
    frequencies change with the sequence's length, and for a target without rotary embedding, unless its published configs name
    a theta all the same.
    """
    found: dict[str, Any] = dict(text.get("rope_scaling") or {}) | dict(text.get("rope_parameters") or {})
    if "full_attention" in found:
        found = dict(found["full_attention"])
    theta = found.get("rope_theta", text.get("rope_theta", UNUSED_THETAS.get(str(text.get("model_type")))))
    if theta is None:
        raise DraftError("the target's config has no rope_theta: a draft needs a target with rotary position embedding")
    rope_type = found.get("rope_type") or found.get("type") or "default"
    rope_type = "default" if rope_type == "mrope" else rope_type
    if rope_type not in FIXED_ROPE_TYPES:
        raise DraftError(
            f"the target's rotary embedding is of type {rope_type!r}, whose frequencies a draft cannot repeat; "
            f"it can {', '.join(FIXED_ROPE_TYPES)}: choose another target"
        )
    kept = {key: found[key] for key in ROPE_KEYS if found.get(key) is not None}
    original = text.get("original_max_position_embeddings") or text.get("max_position_embeddings")
    if rope_type in ("yarn", "llama3") and original is not None:
        kept.setdefault("original_max_position_embeddings", original)
    return {"rope_type": rope_type, "rope_theta": float(theta), **({} if rope_type == "default" else kept)}
