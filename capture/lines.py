"""Rows of data files as bytes: numbered, hashed, and refused with file and line where they are no JSON object."""

import codecs
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from capture.containers import Container, container_of, expand, parquet_row_count, read_rows
from schemas.errors import DataError

BAD_LINE = "bad line"


class BadRow(DataError):
    """One row that cannot be used; `reason` is what it is counted under where it is left out.

    `stops` false: a sound row with nothing to learn from, which is left out and counted without being asked.
    """

    def __init__(self, message: str, reason: str = BAD_LINE, stops: bool = True) -> None:
        super().__init__(message)
        self.reason = reason
        self.stops = stops


@dataclass(frozen=True)
class Line:
    """A row's bytes: a line of JSONL without its ending, or the compact JSON of another container's row.

    `row` counts rows from 0; `number`, by which messages name it, lines from 1, in other containers rows from 1.
    """

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
    """A file as found: the hash of all its bytes, how many rows are taken, and its name in messages and manifest.

    A data set of the `datasets` package has no file: its hash is that of its rows' compact JSON, a line each.
    """

    path: str
    shown: str
    sha256: str
    rows: int
    container: Container = "lines"


def scan_files(paths: tuple[str, ...], limit: int | None) -> list[Scan]:
    """Hash the files, those of a folder in order, and count the rows to take, `limit` in all.

    Raises DataError for a file that is absent, empty or given twice.
    """
    scans: list[Scan] = []
    left = limit
    for path in expand(paths):
        if any(Path(path).resolve() == Path(scan.path).resolve() for scan in scans):
            raise DataError(f"{path}: the file is given twice; name each data file once")
        container = container_of(path)
        sha256, rows = _measure(path, container)
        if not rows:
            raise DataError(f"{path}:1: the file is empty; it must hold one JSON object per line")
        taken = rows if left is None else min(rows, left)
        left = None if left is None else left - taken
        scans.append(Scan(path, path, sha256, taken, container))
    return scans


def _measure(path: str, container: Container) -> tuple[str, int]:
    # The hash of all bytes and the number of rows.
    digest, rows = hashlib.sha256(), 0
    if container == "dataset":
        for row in read_rows(path, container):
            digest.update(row + b"\n")
            rows += 1
        return digest.hexdigest(), rows
    with _opened(path) as file:
        if container == "lines":
            for data in file:
                digest.update(data)
                rows += bool(data.strip())
            return digest.hexdigest(), rows
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if container == "parquet":
        return sha256, parquet_row_count(path)
    return sha256, sum(1 for _ in read_rows(path, container))


def read_lines(scan: Scan) -> Iterator[Line]:
    """The rows of a scanned file that are taken, in order. Blank lines are no rows."""
    if scan.container != "lines":
        rows = islice(read_rows(scan.path, scan.container), scan.rows)
        yield from (Line(scan.shown, row + 1, row, data) for row, data in enumerate(rows))
        return
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
        raise DataError(
            f"{path}: no such file; give a JSONL, JSON or Parquet file of conversations, or a folder of them"
        ) from None
    except IsADirectoryError:
        raise DataError(f"{path}: is a folder; give a JSONL file") from None
    except OSError as fault:
        raise DataError(f"{path}: cannot be read ({fault.strerror}); give a readable file") from None


def parse_object(line: Line) -> dict[str, Any]:
    """The row as a JSON object. Raises BadRow."""
    if line.data.startswith(codecs.BOM_UTF8):
        raise BadRow(f"{line.where}: begins with a byte order mark; save the file as UTF-8 without one")
    try:
        row = json.loads(line.data.decode("utf-8"))
    except UnicodeDecodeError as fault:
        raise BadRow(f"{line.where}: not UTF-8 (byte {fault.start}); save the file as UTF-8") from None
    except (ValueError, RecursionError) as fault:
        what = str(fault).splitlines()[0] if isinstance(fault, ValueError) else "nested too deeply"
        raise BadRow(f"{line.where}: not valid JSON ({what}); each line must be one JSON object") from None
    if not isinstance(row, dict):
        raise BadRow(
            f'{line.where}: a row must be a JSON object, not {type(row).__name__}; write {{"messages": [...]}}'
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
            f"{line.where}: {half!a} is half of a surrogate pair, which is no character; repair the text"
        ) from None
