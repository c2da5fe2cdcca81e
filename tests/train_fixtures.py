"""What the tests of training share: a small cache with any loss masks, options for a draft that steps in milliseconds."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from cache_fixtures import CONFIG, HIDDEN, VOCAB, identity, manifest, plan, shard_arrays
from safetensors.torch import save

from cache.write import CacheWriter
from schemas.manifest import Codec
from schemas.options import TrainOptions

WALL_CLOCK = ("train/tokens_per_s", "train/data_wait", "train/memory_gb", "val/seconds")
LAYERS = (0, 2, 3, 5)  # 5 is the last of the target's 6

TARGET_CONFIG = CONFIG


def train_cache(
    path: Path,
    shards: int = 4,
    masks: dict[int, list[int]] | None = None,
    mask_token_id: int = VOCAB - 1,
    poison: int | None = None,
    codec: Codec = "f32",
    seed: int = 0,
    split: str | None = None,
    sources: tuple[str, ...] = ("rows.jsonl",),
) -> str:
    """A complete cache of 4 samples a shard, every fourth held out.

    `masks` gives index rows another loss mask (cut or padded with zeros to the sample), `poison` a row whose hidden states of
    layer 2 turn into infinities, `split` puts all samples into one split, `sources` are dealt the samples in turn.
    """
    table = plan(shards, 64, seed=seed)
    column = table["loss_mask"].to_pylist()
    for row, mask in (masks or {}).items():
        column[row] = (mask + [0] * len(column[row]))[: len(column[row])]
    table = with_column(table, "loss_mask", column)
    if split is not None:
        table = with_column(table, "split", [split] * len(table))
    who = identity(codec, layers=LAYERS).model_copy(update={"mask_token_id": mask_token_id})
    table = with_column(table, "source", [row % len(sources) for row in range(len(table))])
    made = manifest(table, who)
    held = tuple(made.sources[0].model_copy(update={"path": source}) for source in sources)
    writer = CacheWriter.create(str(path), made.model_copy(update={"sources": held}), table)
    for shard in writer.missing_shards():
        arrays = shard_arrays(writer, shard)
        if poison is not None and table["shard"][poison].as_py() == shard:
            start = table["offset"][poison].as_py() - shard * 64
            arrays["hidden/2"][start : start + table["length"][poison].as_py()] = np.inf
        writer.commit_shard(shard, arrays)
    embed = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0))
    writer.put_file("target/head.safetensors", save({"embed_tokens.weight": embed, "norm.weight": torch.ones(HIDDEN)}))
    writer.put_file("target/config.json", json.dumps(TARGET_CONFIG).encode())
    writer.finish()
    return str(path)


def with_column(table: pa.Table, name: str, values: list[Any]) -> pa.Table:
    """The table with other values in one column."""
    field = table.schema.field(name)
    return table.set_column(table.schema.get_field_index(name), field, pa.array(values, field.type))


def options(**groups: dict[str, Any]) -> TrainOptions:
    """Options of a tiny draft, with any group's fields replaced: options(run={"steps": 5})."""
    small: dict[str, dict[str, Any]] = {
        "draft": {
            "kind": "dflash2",
            "num_layers": 1,
            "block_size": 4,
            "selector_rank": 4,
            "selector_top_k": 4,
            "conv_group_size": 4,
        },
        "data": {"batch_tokens": 60, "anchors": 6},
        "optim": {"name": "adamw", "lr": 1e-2},
        "run": {"device": "cpu", "steps": 14, "log_every": 4, "checkpoint_every": 3, "keep": 20, "eval_every": 0},
    }
    merged = {name: small.get(name, {}) | groups.get(name, {}) for name in small.keys() | groups.keys()}
    return TrainOptions.model_validate(merged)


def stable_lines(run: Path) -> list[dict[str, float]]:
    """metrics.jsonl without the figures of the wall clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in WALL_CLOCK} for line in lines]


def fingerprint(folder: Path) -> dict[str, str]:
    """The sha256 of every file below a folder, by relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def tensor_files(run: Path) -> dict[str, str]:
    """The sha256 of every file of tensors of a run: weights and optimizer of all checkpoints, and the draft."""
    return {name: digest for name, digest in fingerprint(run).items() if name.endswith(".safetensors")}


class Heard:
    """A listener that keeps what it hears; `at` maps a step to a function to call when that step's progress arrives."""

    def __init__(self, at: dict[int, Any] | None = None) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self.steps: list[float] = []
        self.at = at or {}

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def progress(self, label: str, done: float, total: float, **figures: float | str) -> None:  # noqa: ARG002
        self.steps.append(done)
        self.at.get(int(done), lambda: None)()
