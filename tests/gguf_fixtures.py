"""A tiny Llama as llama.cpp's converter writes it: one GGUF file with config, tokenizer, template and quantised weights."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers as tf
from capture_fixtures import TINY_CHAT
from gguf.quants import dequantize, quantize
from target_fixtures import FLAT, make_model
from torch import Tensor

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(path: Path, tied: bool = False, quantised: bool = True, **metadata: Any) -> tf.LlamaForCausalLM:
    """Write the file; `metadata` are further keys. Returns the model that its weights, read back by gguf alone, make."""
    config = tf.LlamaConfig(**FLAT | {"tie_word_embeddings": tied, "intermediate_size": 64})
    model = make_model(config)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    for key, value in metadata.items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"llama.{key.replace('__', '.')}", value)
    _add_tokenizer(writer)
    stored = {}
    for name, weight in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        stored[name] = _add_tensor(writer, name, weight, config, quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.load_state_dict(stored, strict=not tied)
    model.tie_weights()
    return model


def _add_tensor(writer: gguf.GGUFWriter, name: str, weight: Tensor, config: Any, quantised: bool) -> Tensor:
    base = name.removesuffix(".weight")
    if base in TOP:
        short = TOP[base]
    else:
        _, _, block, part = base.split(".", 3)
        short = f"blk.{block}.{NAMES[part]}"
    values = weight.float().numpy()
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(short.split(".")[-1])
    if heads:
        # llama.cpp rotates neighbours, transformers halves: the converter changes the order of the rows.
        values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
    kind = gguf.GGMLQuantizationType.Q8_0 if quantised and values.ndim == 2 else gguf.GGMLQuantizationType.F32
    packed = np.ascontiguousarray(quantize(np.ascontiguousarray(values), kind))
    writer.add_tensor(f"{short}.weight", packed, raw_dtype=kind)
    back = dequantize(packed, kind).reshape(values.shape)
    if heads:
        back = back.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
    return torch.from_numpy(np.ascontiguousarray(back))


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    spec = json.loads((TINY_CHAT / "tokenizer.json").read_text(encoding="utf-8"))
    ids = spec["model"]["vocab"] | {token["content"]: token["id"] for token in spec["added_tokens"]}
    special = {token["content"] for token in spec["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in spec["model"]["merges"]])
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template((TINY_CHAT / "chat_template.jinja").read_text(encoding="utf-8"))
