"""The table a sweep ends with: each run's draft, and what its held-out evaluation while training found."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.compare import compare, compare_text, count_parameters
from pipeline.results import CACHE, read_result
from train.checkpoint import checkpoint_name
from train.metrics import read_lines
from train.rundir import DRAFT, read_provenance

HEADER = ("run", "params", "draft of", "walk", "uniform", "val loss", "train loss", "tokens/s")


def sweep_table(runs: Sequence[tuple[str, Path]]) -> str:
    """A line a run, of the checkpoint that its draft/ holds; beneath it `dflash compare`'s table, where all were evaluated."""
    rows = [HEADER, *(_row(name, folder) for name, folder in runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = ["   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if all(read_result(str(folder), CACHE) is not None for _, folder in runs):
        lines += ["", compare_text(compare([str(folder) for _, folder in runs]))]
    return "\n".join(lines)


def _row(name: str, folder: Path) -> tuple[str, ...]:
    exported = read_provenance(folder).draft
    assert exported is not None, "a run of the table has ended"
    lines = read_lines(folder)
    # The draft's own evaluation; where the last checkpoint was not evaluated, none is its own.
    evaluated = [line for line in lines if "val/loss" in line and checkpoint_name(line["step"]) == exported.checkpoint]
    trained = [line for line in lines if "train/lr" in line]
    held_out, training = (evaluated or [{}])[-1], (trained or [{}])[-1]
    return (
        name,
        f"{count_parameters(folder / DRAFT / 'model.safetensors'):,}",
        exported.checkpoint,
        *(_figure(held_out.get(f"val/{key}")) for key in ("walk", "uniform", "loss")),
        _figure(training.get("train/loss")),
        "-" if "train/tokens_per_s" not in training else f"{training['train/tokens_per_s']:,.0f}",
    )


def _figure(value: Any) -> str:
    return "-" if value is None else f"{value:.3f}"
