"""metrics.jsonl: what training measured, as sums over every micro-batch since the line before, one JSON object a line."""

import json
import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from cache.whole import write_whole
from schemas.errors import DraftError, TrainFault

FILE = "metrics.jsonl"


def add_sums(into: dict[str, float], sums: Mapping[str, float]) -> None:
    """Add sums to sums, in double precision."""
    for name, value in sums.items():
        into[name] = into.get(name, 0.0) + value


def append_line(run: Path, line: Mapping[str, Any]) -> None:
    """Append one line and make it durable: a checkpoint written after it must never outlive it. TrainFault on a full disk."""
    try:
        with open(run / FILE, "a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as fault:
        raise TrainFault(f"cannot write {run / FILE}: {fault}: free some space, then go on with --resume") from fault


def cut_back(run: Path, step: int) -> None:
    """Drop the lines after `step`, and a torn last line: a run that resumes there writes them again."""
    path = run / FILE
    if not path.exists():
        return
    whole = path.read_text().split("\n")[:-1]
    try:
        kept = [line for line in whole if json.loads(line)["step"] <= step]
    except (ValueError, KeyError, TypeError) as fault:
        raise DraftError(f"{path} has a line that is no metrics ({fault!r}): mend or remove the file") from None
    write_whole(path, ["".join(f"{line}\n" for line in kept).encode()])


def peak_memory_gb(device: torch.device) -> float:
    """The most memory held so far, in 10^9 bytes: by tensors on a CUDA device, else by the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    # Linux counts in kibibytes, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


def read_lines(run: Path) -> list[dict[str, Any]]:
    """All lines of a run's metrics."""
    path = run / FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def train_line(step: int, epoch: int, lr: float, sums: Mapping[str, float], selector_weight: float) -> dict[str, float]:
    """A line of metrics out of sums over its micro-batches: each figure is a sum over a sum. A figure without any count is left out.

    `train/loss` is the objective's value, `accuracy` a share of supervised slots, `accept_len` tokens per block including the
    verified one; `grad_norm` is the mean over steps before clipping, `data_wait` the share of the time spent waiting for data,
    `without_anchor` the number of samples that had nothing to train on.
    """
    figures = {
        "accuracy": _share(sums, "correct", "valid"),
        "accept_len": _share(sums, "accept_len", "blocks"),
        "base_loss": _share(sums, "base_loss", "base_weight"),
        "selector_loss": _share(sums, "selector_loss", "selector_weight"),
        "base_accuracy": _share(sums, "base_correct", "valid"),
        "base_accept_len": _share(sums, "base_accept_len", "blocks"),
        "candidate_recall": _share(sums, "recalled", "valid"),
        "tokens_per_s": _share(sums, "tokens", "seconds"),
        "data_wait": _share(sums, "waited", "seconds"),
        "lr": lr,
        "grad_norm": _share(sums, "grad_norm", "steps"),
        "without_anchor": sums.get("without_anchor", 0.0),
    }
    base, selector = figures["base_loss"], figures["selector_loss"]
    loss = None if base is None else base + selector_weight * (selector or 0.0)
    if "selector_weight" not in sums:
        del figures["base_loss"]
    figures = {"loss": loss, **figures}
    line: dict[str, float] = {"step": step, "epoch": epoch}
    return line | {f"train/{name}": value for name, value in figures.items() if value is not None}


def _share(sums: Mapping[str, float], part: str, whole: str) -> float | None:
    return sums[part] / sums[whole] if part in sums and sums.get(whole, 0.0) > 0 else None
