"""The measurements of a run, kept beside it: RUN/evaluation/cache.json and RUN/evaluation/decoded.json."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cache.checksum import crc32c
from cache.whole import write_whole
from schemas.draft import draft_folder
from schemas.errors import DraftError, OptionError

FOLDER = "evaluation"
CACHE, DECODED = "cache.json", "decoded.json"
# Which weights were measured: a run may be made longer afterwards.
WEIGHTS = "weights_crc32c"


def check_json(path: Path) -> None:
    """OptionError where no file can be written at `path`: better said before what may take hours."""
    if path.is_dir():
        raise OptionError(f"{path} is a folder: give the name of a file for the JSON")
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise OptionError(f"--json {path}: {folder} is no folder that can be written to: give another file")


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a result, whole or not at all. Raises OptionError where it cannot lie there."""
    check_json(path)
    write_whole(path, [json.dumps(data, indent=1).encode() + b"\n"])


def keep_result(draft: str, name: str, data: Mapping[str, Any]) -> None:
    """Keep a measurement in its run's folder, for `dflash compare`; a draft's folder on its own is left as it is."""
    folder = draft_folder(draft)
    if folder == Path(draft) / "draft":
        write_json(Path(draft) / FOLDER / name, {WEIGHTS: _weights_checksum(folder), **data})


def read_result(run: str, name: str) -> dict[str, Any] | None:
    """A kept measurement, or None where it was not made. Raises DraftError where it is malformed or of other weights."""
    path = Path(run) / FOLDER / name
    if not path.is_file():
        return None
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as fault:
        raise DraftError(f"{path} is not JSON ({fault}): measure again with `dflash evaluate`") from None
    measured, held = data.get(WEIGHTS), _weights_checksum(draft_folder(run))
    if measured != held:
        raise DraftError(
            f"{path} measured weights with {WEIGHTS} {measured}, the draft now has {held}: measure again with `dflash evaluate`"
        )
    return data


def _weights_checksum(folder: Path) -> str:
    checksum = 0
    with open(folder / "model.safetensors", "rb") as file:
        while part := file.read(1 << 24):
            checksum = crc32c(part, checksum)
    return f"{checksum:08x}"
