"""`dflash compare`: the measurements of several runs side by side."""

import struct
from collections.abc import Sequence
from json import loads
from math import prod
from pathlib import Path
from typing import Any

from pipeline.results import CACHE, DECODED, read_result
from schemas.draft import draft_folder
from schemas.errors import DraftError

HEADER = (
    ("draft", "params", "acceptance, from the cache", "", "decoded with the target", "speed-up", "lossless"),
    ("", "", "uniform", "walk", "", "", ""),
)


def compare(runs: Sequence[str]) -> list[dict[str, Any]]:
    """One record per run, in the order given. Raises DraftError for a folder that is no run."""
    return [_record(run) for run in runs]


def compare_text(records: Sequence[dict[str, Any]]) -> str:
    """The table. A figure that was not measured is a dash."""
    names = [record["kind"] for record in records]
    if len(set(names)) < len(names):
        names = [record["run"] for record in records]
    rows = [[*line] for line in HEADER]
    for name, record in zip(names, records, strict=True):
        lossless = record["lossless"]
        rows.append(
            [
                name,
                f"{record['params']:,}",
                _number(record["uniform"]),
                _number(record["walk"]),
                _number(record["decoded"]),
                "-" if record["speedup"] is None else f"{record['speedup']:.2f}x",
                "-" if lossless is None else f"{lossless['equal']}/{lossless['prompts']} prompts",
            ]
        )
    # The third heading spans the two columns below it, so it does not widen them.
    widths = [max(len(row[column]) for row in rows[column == 2 :]) for column in range(7)]
    widths[3] = max(widths[3], len(HEADER[0][2]) - widths[2] - 3)
    lines = []
    for number, row in enumerate(rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        if number == 0:
            cells[2:4] = [row[2].ljust(widths[2] + widths[3] + 3)]
        lines.append("   ".join(cells).rstrip())
    return "\n".join(lines)


def _record(run: str) -> dict[str, Any]:
    folder = draft_folder(run)
    if folder == Path(run):
        raise DraftError(f"{run} is a draft, not a run: give the run's folder, which holds its evaluation")
    try:
        architecture = loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
        parameters = count_parameters(folder / "model.safetensors")
    except (OSError, ValueError, KeyError, IndexError, TypeError, struct.error) as fault:
        raise DraftError(f"{folder} holds no readable draft ({fault}): train it again, or give another run") from None
    cached, decoded = read_result(run, CACHE), read_result(run, DECODED)
    return {
        "run": run,
        "kind": {"DFlashDraftModel": "dflash", "DFlash2DraftModel": "dflash2"}.get(architecture, architecture),
        "params": parameters,
        "uniform": cached and cached["uniform"]["acceptance"],
        "walk": cached and cached["walk"]["acceptance"],
        "decoded": decoded and decoded["decoded"]["acceptance"],
        "speedup": decoded and decoded["speedup"],
        "lossless": decoded and decoded["lossless"],
    }


def count_parameters(path: Path) -> int:
    """How many numbers a safetensors file holds, from its header alone (8 bytes of length, then JSON)."""
    with open(path, "rb") as file:
        header = loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    return sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
