"""The unfinished answers of `dflash regenerate`: FILE.partial, a line per batch: a kill loses one batch at most."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from schemas.errors import DataError

Answers = dict[tuple[int, int], list[int]]


def partial_path(out: Path) -> Path:
    """Where the answers of an unfinished run lie."""
    return out.with_name(f"{out.name}.partial")


def open_journal(path: Path, settings: Mapping[str, object]) -> Answers:
    """The answers so far, (row, turn) -> ids; none where there is no journal yet. Nothing is begun here.

    A last line that a kill tore is cut off. Raises DataError for a journal of other settings, naming the first that
    differs and both values.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as fault:
        raise DataError(f"{path} cannot be read ({fault.strerror}): remove it, or give another --out") from None
    whole = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
    if not whole and data[:1] in (b"", b"{"):
        return {}
    try:
        held, *batches = (json.loads(line) for line in whole)
        answers = {
            (row, batch["turn"]): ids
            for batch in batches
            for row, ids in zip(batch["rows"], batch["answers"], strict=True)
        }
    except (ValueError, TypeError, KeyError):
        raise DataError(f"{path} is no unfinished run of regenerate: remove it, or give another --out") from None
    for name, asked in settings.items():
        if not isinstance(held, dict) or held.get(name) != asked:
            value = held.get(name) if isinstance(held, dict) else None
            raise DataError(
                f"{path} was begun with {name} {value!r}, this command asks for {asked!r}: use the same, remove the "
                "file, or give another --out"
            )
    with path.open("rb+") as file:
        file.truncate(sum(len(line) for line in whole))
    return answers


def begin_journal(path: Path, settings: Mapping[str, object]) -> None:
    """Write a journal without answers, over one that has none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        _append(file, settings)


def add_batch(path: Path, turn: int, rows: Sequence[int], answers: Sequence[Sequence[int]]) -> None:
    """Append a batch's answers, durably, as one line."""
    with path.open("ab") as file:
        _append(file, {"turn": turn, "rows": list(rows), "answers": [list(ids) for ids in answers]})


def _append(file: BinaryIO, record: Mapping[str, object]) -> None:
    data = json.dumps(record, separators=(",", ":")).encode() + b"\n"
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
