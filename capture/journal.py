"""The unfinished answers of `dflash regenerate`: FILE.partial, a line per batch: a kill loses one batch at most."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from schemas.errors import DataError


@dataclass(frozen=True)
class Answer:
    """An answer's ids, its end token included where it has one.

    A server's answer brings more (None in process, where the ids say it): whether it ended by itself, its message, whether
    its ids are those of its text tokenised again, and the ids before it where the server's template set them.
    """

    ids: list[int]
    finished: bool | None = None
    message: dict[str, Any] | None = None
    retokenised: bool = False
    context: list[int] | None = None

    def details(self) -> dict[str, Any] | None:
        """What the ids do not say, for the journal."""
        if self.message is None:
            return None
        return {
            "finished": self.finished,
            "message": self.message,
            "retokenised": self.retokenised,
            "context": self.context,
        }


Answers = dict[tuple[int, int], Answer]


def partial_path(out: Path) -> Path:
    """Where the answers of an unfinished run lie."""
    return out.with_name(f"{out.name}.partial")


def open_journal(path: Path, settings: Mapping[str, object]) -> Answers:
    """The answers so far, (row, turn) -> answer; none where there is no journal yet. Nothing is begun here.

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
            (row, batch["turn"]): Answer(ids, **(details or {}))
            for batch in batches
            for row, ids, details in zip(
                batch["rows"], batch["answers"], batch.get("details", [None] * len(batch["rows"])), strict=True
            )
        }
    except (ValueError, TypeError, KeyError, AttributeError):
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


def add_batch(path: Path, turn: int, rows: Sequence[int], answers: Sequence[Answer]) -> None:
    """Append a batch's answers, durably, as one line."""
    details = [answer.details() for answer in answers]
    record = {"turn": turn, "rows": list(rows), "answers": [answer.ids for answer in answers]}
    with path.open("ab") as file:
        _append(file, record | ({"details": details} if any(details) else {}))


def _append(file: BinaryIO, record: Mapping[str, object]) -> None:
    data = json.dumps(record, separators=(",", ":")).encode() + b"\n"
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
