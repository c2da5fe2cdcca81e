"""Lines of a JSONL file as bytes: numbered, hashed, and refused with file and line where they are no JSON object."""

import codecs
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.errors import DataError


class BadRow(DataError):
    """One row that cannot be used; `reason` is what it is counted under where bad rows are skipped."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Line:
    """A row's bytes without the line ending; `number` counts all lines from 1, `row` non-blank lines from 0."""

    path: str
    number: int
    row: int
    data: bytes

    @property
    def where(self) -> str:
        """How messages name it."""
        return f"{self.path}:{self.number}"

    @property
    def sha256(self) -> str:
        """The hash of the row's bytes."""
        return hashlib.sha256(self.data).hexdigest()


@dataclass(frozen=True)
class Scan:
    """A file as found: the hash of all its bytes, how many rows are taken, and its name in messages and manifest."""

    path: str
    shown: str
    sha256: str
    rows: int


def scan_files(paths: tuple[str, ...], limit: int | None) -> list[Scan]:
    """Hash the files and count the rows to take, `limit` in all.

    Raises DataError for a file that is absent, empty or given twice.
    """
    scans: list[Scan] = []
    left = limit
    for path in paths:
        if any(Path(path).resolve() == Path(scan.path).resolve() for scan in scans):
            raise DataError(f"{path}: the file is given twice; name each data file once")
        digest, rows = hashlib.sha256(), 0
        with _opened(path) as file:
            for data in file:
                digest.update(data)
                rows += bool(data.strip())
        if not rows:
            raise DataError(f"{path}:1: the file is empty; it must hold one JSON object per line")
        taken = rows if left is None else min(rows, left)
        left = None if left is None else left - taken
        scans.append(Scan(path, path, digest.hexdigest(), taken))
    return scans


def read_lines(scan: Scan) -> Iterator[Line]:
    """The rows of a scanned file that are taken, in order. Blank lines are no rows."""
    row = 0
    with _opened(scan.path) as file:
        for number, data in enumerate(file, 1):
            if row == scan.rows:
                return
            if data.strip():
                yield Line(scan.shown, number, row, data.rstrip(b"\r\n"))
                row += 1


def _opened(path: str) -> Any:
    try:
        return open(path, "rb")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; give a JSONL file of conversations") from None
    except IsADirectoryError:
        raise DataError(f"{path}: is a folder; give a JSONL file") from None
    except OSError as fault:
        raise DataError(f"{path}: cannot be read ({fault.strerror}); give a readable JSONL file") from None


def parse_object(line: Line) -> dict[str, Any]:
    """The row as a JSON object. Raises BadRow."""
    if line.data.startswith(codecs.BOM_UTF8):
        raise BadRow(f"{line.where}: begins with a byte order mark; save the file as UTF-8 without one", "not JSON")
    try:
        row = json.loads(line.data.decode("utf-8"))
    except UnicodeDecodeError as fault:
        raise BadRow(f"{line.where}: not UTF-8 (byte {fault.start}); save the file as UTF-8", "not JSON") from None
    except (ValueError, RecursionError) as fault:
        what = str(fault).splitlines()[0] if isinstance(fault, ValueError) else "nested too deeply"
        raise BadRow(f"{line.where}: not valid JSON ({what}); each line must be one JSON object", "not JSON") from None
    if not isinstance(row, dict):
        raise BadRow(
            f'{line.where}: a row must be a JSON object, not {type(row).__name__}; write {{"messages": [...]}}',
            "not JSON",
        )
    _check_text(row, line)
    return row


def _check_text(row: dict[str, Any], line: Line) -> None:
    # JSON can spell half a surrogate pair, anywhere in a row; no tokenizer can read it and no file can hold it.
    if b"\\ud" not in line.data.lower():
        return
    try:
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as fault:
        half = fault.object[fault.start : fault.end]
        raise BadRow(
            f"{line.where}: {half!a} is half of a surrogate pair, which is no character; repair the text",
            "half of a surrogate pair",
        ) from None


def check_messages(messages: Any, where: str) -> list[dict[str, Any]]:
    """OpenAI `messages`: a non-empty list of objects with a role and text content.

    Raises BadRow naming the message at fault.
    """
    if not isinstance(messages, list) or not messages:
        raise BadRow(f"{where}: messages must be a non-empty list, not {_short(messages)}", "malformed messages")
    for number, message in enumerate(messages, 1):
        at = f"{where}: message {number}"
        if not isinstance(message, dict):
            raise BadRow(f"{at} must be an object with role and content, not {_short(message)}", "malformed messages")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise BadRow(
                f'{at}: role must be a name such as "user" or "assistant", not {_short(role)}', "malformed messages"
            )
        calls = role == "assistant" and message.get("tool_calls")
        if not isinstance(content, str) and not (content is None and calls):
            raise BadRow(f"{at}: content must be a text, not {_short(content)}", "malformed messages")
    return messages


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
