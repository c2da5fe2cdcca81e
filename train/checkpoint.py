"""Checkpoints: all that a run needs to go on exactly where it was, in safetensors and JSON. Whole or not at all.

checkpoints/step-000500/  model.safetensors (float32 master weights)  optimizer.safetensors  state.json
"""

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from cache.whole import fsync_folder
from cache.workspace import TEMPORARY
from schemas.errors import DraftError, TrainFault
from schemas.strict import Strict, describe

MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
_NAME = re.compile(r"step-(\d{6,})")


class Best(Strict):
    """The evaluation with the best walk acceptance so far: after which step, and what it was."""

    step: int = Field(ge=0)
    walk: float


class TrainState(Strict):
    """state.json: steps done, the place in the stream, and the sums gathered since the last line of metrics.jsonl.

    `metrics` are the newest figures of training and of evaluation. `best` is the best evaluation so far, `stale` how many there were
    since, both on the held-out samples that `held_out` stands for.
    """

    step: int = Field(0, ge=0)
    epoch: int = Field(0, ge=0)
    position: int = Field(0, ge=0)
    sums: dict[str, float] = Field(default_factory=dict)
    metrics: dict[str, Any] = Field(default_factory=dict)
    best: Best | None = None
    stale: int = Field(0, ge=0)
    held_out: str = ""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory."""

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    state: TrainState


def checkpoint_name(step: int) -> str:
    """step-000500."""
    return f"step-{step:06d}"


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """The complete checkpoints in a run's `checkpoints/`, by step, ascending. What a killed write left is not among them."""
    if not folder.is_dir():
        return {}
    found = {int(match[1]): entry for entry in folder.iterdir() if (match := _NAME.fullmatch(entry.name))}
    return dict(sorted(found.items()))


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write a checkpoint into `folder` and remove all but the `keep` newest and the best; TrainFault where the disk refuses.

    At any moment the folder holds the checkpoints it held before or those after: files are made durable under a temporary name,
    then the name appears.
    """
    folder.mkdir(parents=True, exist_ok=True)
    clean_temporaries(folder)
    final = folder / checkpoint_name(checkpoint.state.step)
    temporary = folder / f"{TEMPORARY}{final.name}"
    temporary.mkdir()
    try:
        save_file(_plain(checkpoint.model), temporary / MODEL)
        save_file(_plain(checkpoint.optimizer), temporary / OPTIMIZER)
        (temporary / STATE).write_text(checkpoint.state.model_dump_json(indent=1) + "\n")
        for name in (MODEL, OPTIMIZER, STATE):
            _fsync(temporary / name)
        fsync_folder(temporary)
        os.rename(temporary, final)
        fsync_folder(folder)
    except (OSError, SafetensorError) as fault:
        shutil.rmtree(temporary, ignore_errors=True)
        raise TrainFault(f"cannot write {final}: {fault}: free some space, then go on with --resume") from fault
    best = checkpoint.state.best
    for step, old in list(list_checkpoints(folder).items())[:-keep]:
        if best is None or step != best.step:
            remove_checkpoint(old)
    return final


def load_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint from disk, on the CPU. Raises DraftError where a file is missing or unreadable."""
    try:
        state = TrainState.model_validate_json((path / STATE).read_bytes())
        return Checkpoint(load_file(path / MODEL), load_file(path / OPTIMIZER), state)
    except ValidationError as fault:
        raise DraftError(f"{path / STATE}: {describe(fault)}: resume from another checkpoint") from None
    except (OSError, SafetensorError) as fault:
        raise DraftError(f"{path} cannot be read ({fault}): resume from another checkpoint") from None


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint so that a kill in between leaves no half of it under its name."""
    doomed = path.with_name(f"{TEMPORARY}{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def clean_temporaries(folder: Path) -> None:
    """Remove what killed writes left behind."""
    for entry in folder.glob(f"{TEMPORARY}*"):
        shutil.rmtree(entry)


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def _fsync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
