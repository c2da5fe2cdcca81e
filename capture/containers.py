"""What holds rows besides JSONL: a JSON file, a Parquet file, a data set of the `datasets` package. All become JSON bytes.

A row's bytes there are its JSON without spaces, so that its hash is that of its content. Keys keep their order: a template
writes a tool call's arguments in it.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.errors import DataError

Container = Literal["lines", "json", "parquet", "dataset"]
LINE_SUFFIXES = (".jsonl", ".ndjson")
SUFFIXES = (*LINE_SUFFIXES, ".json", ".parquet")
# What `datasets.Dataset.save_to_disk` leaves in its folder.
SAVED_DATASET = ("state.json", "dataset_dict.json")
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:\w[\w.-]*)?")
PARQUET_BATCH = 1024


def container_of(path: str) -> Container:
    """How the rows of a file, folder or name are held. A .json file of one object per line is JSONL."""
    place = Path(path)
    if place.is_dir() or _is_hub_name(path):
        return "dataset"
    if place.suffix == ".parquet":
        return "parquet"
    return "json" if place.suffix == ".json" and not _begins_with_an_object_line(place) else "lines"


def expand(paths: tuple[str, ...]) -> list[str]:
    """The paths, a folder of data files replaced by its files in order. Raises DataError for a folder without any."""
    found = []
    for path in paths:
        folder = Path(path)
        if not folder.is_dir() or any((folder / name).is_file() for name in SAVED_DATASET):
            found.append(path)
            continue
        files = sorted(file for file in folder.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        if not files:
            raise DataError(f"{path}: the folder holds no {', '.join(SUFFIXES)} file; give a folder of data files")
        found += [str(file) for file in files]
    return found


def _is_hub_name(path: str) -> bool:
    return not Path(path).exists() and Path(path).suffix not in SUFFIXES and HUB_NAME.fullmatch(path) is not None


def _begins_with_an_object_line(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            first = next((line for line in file if line.strip()), b"")
        return isinstance(json.loads(first), dict)
    except (OSError, ValueError, RecursionError):
        return False


def compact(row: Any) -> bytes:
    """The row as JSON without spaces, in UTF-8; what JSON has not (dates, bytes) as its text."""
    try:
        return json.dumps(row, separators=(",", ":"), ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        # Half a surrogate pair, which is refused where the row is read.
        return json.dumps(row, separators=(",", ":"), default=str).encode()


def read_rows(path: str, container: Container) -> Iterator[bytes]:
    """Every row's compact JSON. Raises DataError where the container cannot be read."""
    reader = {"json": _json_rows, "parquet": _parquet_rows, "dataset": _dataset_rows}[container]
    return map(compact, reader(path))


def _json_rows(path: str) -> Iterator[Any]:
    data = Path(path).read_bytes()
    if data.startswith(b"\xef\xbb\xbf"):
        raise DataError(f"{path}:1: begins with a byte order mark; save the file as UTF-8 without one")
    try:
        rows = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as fault:
        line = data.count(b"\n", 0, fault.start) + 1
        raise DataError(f"{path}:{line}: not UTF-8 (byte {fault.start} of the file); save it as UTF-8") from None
    except json.JSONDecodeError as fault:
        raise DataError(
            f"{path}:{fault.lineno}: not valid JSON ({fault.msg}); the file must be one list of objects, or give JSONL"
        ) from None
    except (ValueError, RecursionError):
        raise DataError(f"{path}:1: not valid JSON (nested too deeply); the file must be one list of objects") from None
    yield from rows if isinstance(rows, list) else [rows]


def _parquet_rows(path: str) -> Iterator[Any]:
    # A row group at a time; a struct's null fields are keys that the row does not have.
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=PARQUET_BATCH):
                yield from map(_without_nulls, batch.to_pylist())
    except (pa.ArrowException, OSError) as fault:
        what = (str(fault).splitlines() or [""])[0][:200]
        raise DataError(f"{path}: no Parquet file that can be read ({what}); write it again") from None


def parquet_row_count(path: str) -> int:
    """The rows that the file's footer names. Raises DataError."""
    try:
        return int(pq.read_metadata(path).num_rows)
    except (pa.ArrowException, OSError) as fault:
        what = (str(fault).splitlines() or [""])[0][:200]
        raise DataError(f"{path}: no Parquet file that can be read ({what}); write it again") from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _dataset_rows(path: str) -> Iterator[Any]:
    # A folder that `save_to_disk` wrote, or a data set of the Hub, as NAME or NAME:SPLIT.
    try:
        import datasets
    except ImportError:
        kind = "a folder of the `datasets` package" if Path(path).is_dir() else "not here, so a data set of the Hub"
        raise DataError(
            f"{path}: is {kind}, which needs the extra `datasets`: pip install 'dflash-pipeline[datasets]', or "
            "give a JSONL or Parquet file"
        ) from None
    name, _, split = (path, "", "") if Path(path).is_dir() else path.partition(":")
    try:
        found = datasets.load_from_disk(name) if Path(name).is_dir() else datasets.load_dataset(name)
    except Exception as fault:  # the package raises dozens of kinds, from several modules
        what = (str(fault).strip().splitlines() or [""])[0][:200]
        raise DataError(
            f"{path}: `datasets` does not give it ({type(fault).__name__}: {what}); correct the name or the connection"
        ) from None
    if isinstance(found, dict):
        wanted = split or "train"
        if wanted not in found:
            raise DataError(f"{path}: has no split {wanted!r}; give one of its own as NAME:SPLIT: {', '.join(found)}")
        found = found[wanted]
    yield from map(_without_nulls, found)
