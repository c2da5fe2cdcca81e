"""The measurements of a run, kept beside it: RUN/evaluation/cache.json and RUN/evaluation/decoded.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cache.store import write_whole
from schemas.draft import draft_folder
from schemas.errors import DraftError

FOLDER = "evaluation"
CACHE, DECODED = "cache.json", "decoded.json"


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a result, whole or not at all."""
    write_whole(path, [json.dumps(data, indent=1).encode() + b"\n"])


def keep_result(draft: str, name: str, data: Mapping[str, Any]) -> None:
    """Keep a measurement in its run's folder, for `dflash compare`; a draft's folder on its own is left as it is."""
    if draft_folder(draft) == Path(draft) / "draft":
        write_json(Path(draft) / FOLDER / name, data)


def read_result(run: str, name: str) -> dict[str, Any] | None:
    """A kept measurement, or None where it was not made."""
    path = Path(run) / FOLDER / name
    if not path.is_file():
        return None
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as fault:
        raise DraftError(f"{path} is not JSON ({fault}): measure again with `dflash evaluate`") from None
    return data
