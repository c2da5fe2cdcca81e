"""Tiny random targets of many kinds, each made from its transformers config class, with the shipped tokenizer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from capture_fixtures import copy_tokenizer
from torch import nn

LAYERS = 4
FLAT: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "bos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
LATENT = {key: value for key, value in FLAT.items() if key not in ("head_dim", "num_key_value_heads")} | {
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
}
HYBRID = ["linear_attention", "full_attention"] * 2
SLIDING = ["sliding_attention", "full_attention"] * 2
LINEAR = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
DEEPSEEK = LATENT | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
QWEN_EYES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
KIMI_EYES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def _qwen35(**own: Any) -> tf.Qwen3_5TextConfig:
    return tf.Qwen3_5TextConfig(**FLAT | LINEAR | own, layer_types=HYBRID)


def _deepseek(**own: Any) -> tf.DeepseekV3Config:
    return tf.DeepseekV3Config(**DEEPSEEK | own, first_k_dense_replace=1, rope_parameters=YARN)


# A kind's name to its config. The wrappers' own tie_word_embeddings differs from the text model's where that is allowed.
KINDS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: tf.Qwen3Config(**FLAT),
    "qwen3-tied": lambda: tf.Qwen3Config(**FLAT | {"tie_word_embeddings": True}),
    "qwen3-moe": lambda: tf.Qwen3MoeConfig(**FLAT, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "qwen3.5": _qwen35,
    "qwen3.5-wrapped": lambda: tf.Qwen3_5Config(
        text_config=_qwen35(tie_word_embeddings=True).to_dict(), vision_config=QWEN_EYES, tie_word_embeddings=False
    ),
    "llama": lambda: tf.LlamaConfig(**FLAT),
    "gemma3": lambda: tf.Gemma3TextConfig(
        **FLAT | {"tie_word_embeddings": True},
        sliding_window=8,
        layer_types=SLIDING,
        final_logit_softcapping=3.0,
        query_pre_attn_scalar=16,
    ),
    "gpt-oss": lambda: tf.GptOssConfig(
        **FLAT, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, layer_types=SLIDING, rope_parameters=YARN
    ),
    "granite": lambda: tf.GraniteConfig(**FLAT, logits_scaling=4.0, embedding_multiplier=6.0, residual_multiplier=0.5),
    "deepseek-v3": _deepseek,
    "kimi-linear": lambda: tf.KimiLinearConfig(
        **LATENT | {"q_lora_rank": None, "num_local_experts": 4},
        linear_head_dim=8,
        linear_num_heads=2,
        layer_types=HYBRID,
    ),
    "kimi-k2.5": lambda: tf.Kimi_K25Config(
        text_config=_deepseek(tie_word_embeddings=True).to_dict(),
        vision_config=KIMI_EYES,
        projection_hidden_size=16,
        tie_word_embeddings=False,
    ),
}


def make_model(config: Any, seed: int = 0) -> Any:
    """A random model of this config, whole (a wrapper with its vision part), whose layers all change their input visibly."""
    torch.manual_seed(seed)
    wrapped = getattr(config, "text_config", None) is not None
    auto = tf.AutoModelForImageTextToText if wrapped else tf.AutoModelForCausalLM
    model = auto.from_config(config).float().eval()
    with torch.no_grad():
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                if parameter.ndim >= 2 and not isinstance(module, nn.Embedding):
                    parameter.mul_(8)
                elif parameter.ndim == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        if (
            hasattr(model, "lm_head")
            and model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
        ):
            model.get_input_embeddings().weight.mul_(1 / 8)
    return model


def make_target(kind: str, folder: Path, **save: Any) -> str:
    """A target of this kind in `folder`. Returns its path."""
    make_model(KINDS[kind]()).save_pretrained(folder, **save)
    copy_tokenizer(folder)
    return str(folder)
