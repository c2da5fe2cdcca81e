"""Small caches made by the writer itself, without a target: random states, two or three shards."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from safetensors.torch import save

from cache.plan import PLAN
from cache.write import CacheWriter
from schemas.arrays import WITH_OUTLIERS, chunk_tokens
from schemas.index import PLAN_SCHEMA
from schemas.manifest import Codec, Identity, Manifest, Source, TargetIdentity, Totals

HIDDEN, VOCAB, TOP_K = 16, 40, 4
CONFIG = {"model_type": "qwen3", "hidden_size": HIDDEN, "num_hidden_layers": 6, "vocab_size": VOCAB, "num_attention_heads": 2,
          "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 24, "rms_norm_eps": 1e-6, "hidden_act": "silu",
          "max_position_embeddings": 512, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}  # fmt: skip


def identity(codec: Codec = "f32", layers: tuple[int, ...] = (0, 2, 3), shard_tokens: int = 64) -> Identity:
    target = TargetIdentity(
        name="tiny",
        revision=None,
        architectures=("Qwen3ForCausalLM",),
        config_sha256=hashlib.sha256(json.dumps(CONFIG).encode()).hexdigest(),
        num_hidden_layers=6,
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        tied=True,
        embedding_scale=1.0,
        logit_scale=1.0,
        logit_softcap=None,
    )
    return Identity(
        target=target,
        layers=layers,
        tokenizer_sha256="a" * 64,
        chat_template_sha256="b" * 64,
        codec=codec,
        top_k=TOP_K,
        dtype="float32",
        tp=1,
        mask_token_id=VOCAB - 1,
        max_length=shard_tokens,
        val_fraction=0.25,
        seed=0,
        shard_tokens=shard_tokens,
        batch_tokens=shard_tokens,
        chunk_tokens=chunk_tokens(codec, HIDDEN, TOP_K, shard_tokens),
    )


def plan(shards: int, shard_tokens: int, per_shard: int = 4, seed: int = 0) -> pa.Table:
    """`per_shard` samples of random lengths in every shard, every fourth held out; the first two tokens are the prompt."""
    draw = np.random.default_rng(seed)
    rows = []
    for shard in range(shards):
        offset = shard * shard_tokens
        for batch in range(per_shard):
            length = int(draw.integers(6, shard_tokens // per_shard + 1))
            ids = draw.integers(0, VOCAB - 1, length).astype(np.int32)
            mask = np.array([0, 0] + [1] * (length - 2), dtype=np.uint8)
            rows.append(
                {
                    "sample_id": f"{hashlib.sha256(ids.tobytes()).hexdigest()[:16]}-0",
                    "row_id": None,
                    "offset": offset,
                    "length": length,
                    "supervised": length - 2,
                    "truncated": False,
                    "split": "val" if batch == 3 else "train",
                    "shard": shard,
                    "source": 0,
                    "source_row": len(rows),
                    "tokens_sha256": hashlib.sha256(ids.tobytes() + mask.tobytes()).hexdigest(),
                    "input_ids": ids.tolist(),
                    "loss_mask": mask.tolist(),
                    "batch": batch,
                }
            )
            offset += length
    return pa.Table.from_pylist(rows, schema=PLAN_SCHEMA)


def manifest(table: pa.Table, who: Identity) -> Manifest:
    column = {name: table[name].to_pylist() for name in ("length", "supervised", "shard", "split")}
    totals = Totals(
        samples=len(table),
        tokens=sum(column["length"]),
        supervised=sum(column["supervised"]),
        shards=max(column["shard"]) + 1,
        val_samples=column["split"].count("val"),
    )
    source = Source(path="rows.jsonl", sha256="d" * 64, rows=len(table), kept=len(table), skipped={})
    return Manifest(
        complete=False,
        identity=who,
        sources=(source,),
        totals=totals,
        mask_token_source="user",
        record={"dflash": "0.1.0"},
    )


def shard_arrays(writer: CacheWriter, shard: int) -> dict[str, np.ndarray]:
    """A shard's arrays with random states, a pure function of the shard."""
    who = writer.manifest.identity
    rows, draw = who.shard_tokens, np.random.default_rng(1000 + shard)
    arrays: dict[str, np.ndarray] = {
        "tokens/input_ids": np.zeros(rows, np.int32),
        "tokens/loss_mask": np.zeros(rows, np.uint8),
        "logits/topk_ids": draw.integers(0, VOCAB, (rows, TOP_K)).astype(np.int32),
        "logits/topk_logprobs": -np.sort(draw.random((rows, TOP_K))).astype(np.float16),
        "logits/rest_logprob": np.full(rows, -np.inf, np.float32),
    }
    for layer in who.layers:
        states = torch.from_numpy(draw.standard_normal((rows, HIDDEN)).astype(np.float32))
        for family, values in writer.codec.encode(states, layer).items():
            arrays[f"{family}/{layer}"] = values
    # A finished cache has no plan any more; that of `make_cache` is this.
    finished = writer.store.size(PLAN) is None
    table = plan(writer.manifest.totals.shards, rows) if finished else writer.plan.shard(shard)
    for row in table.filter(pc.equal(table["shard"], shard)).to_pylist():
        start = row["offset"] - shard * rows
        arrays["tokens/input_ids"][start : start + row["length"]] = row["input_ids"]
        arrays["tokens/loss_mask"][start : start + row["length"]] = row["loss_mask"]
    return arrays


def begin_cache(
    path: Path, codec: Codec = "f32", shards: int = 3, shard_tokens: int = 64, **options: object
) -> CacheWriter:
    table, who = plan(shards, shard_tokens), identity(codec, shard_tokens=shard_tokens, **options)
    return CacheWriter.create(str(path), manifest(table, who), table, channels=outliers(who))


def outliers(who: Identity) -> dict[int, tuple[int, ...]]:
    """Other channels in every layer."""
    if who.codec not in WITH_OUTLIERS:
        return {}
    return {layer: tuple(range(layer, layer + 8)) for layer in who.layers}


def make_cache(
    path: Path, codec: Codec = "f32", shards: int = 3, shard_tokens: int = 64, **options: object
) -> CacheWriter:
    """A complete cache."""
    writer = begin_cache(path, codec, shards, shard_tokens, **options)
    for shard in writer.missing_shards():
        writer.commit_shard(shard, shard_arrays(writer, shard))
    embed = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0))
    writer.put_file("target/head.safetensors", save({"embed_tokens.weight": embed, "norm.weight": torch.ones(HIDDEN)}))
    writer.put_file("target/config.json", json.dumps(CONFIG).encode())
    writer.finish()
    return writer
