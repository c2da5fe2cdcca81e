"""What the tests of `capture --append` share: three files of rows, and the options of a command that takes some of them."""

from pathlib import Path
from typing import Any

from capture_fixtures import capture_options, shipped_rows, write_jsonl

from schemas.options import CaptureOptions

ROWS, MORE, LAST = 14, 12, 5


def command(target: str, data: list[str], out: Path, **options: Any) -> CaptureOptions:
    """Capture these files with small shards."""
    return capture_options(target, data[0], out, **{"layers": (0, 2), **options}).model_copy(
        update={"data": tuple(data)}
    )


def three_files(folder: Path) -> list[str]:
    """Three files; the second repeats two rows of the first, the third one of each."""
    rows = shipped_rows(ROWS + MORE + LAST)
    first, more, last = rows[:ROWS], rows[ROWS : ROWS + MORE], rows[-LAST:]
    parts = [first, [first[3], *more, first[0]], [*last, more[2], first[5]]]
    return [write_jsonl(folder / f"{name}.jsonl", part) for name, part in zip("abc", parts, strict=True)]
