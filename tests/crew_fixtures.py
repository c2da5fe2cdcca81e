"""What the tests of captures by several processes share: the process that forks them, and the options of a capture."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from capture_fixtures import ROOT, capture_options

from schemas.options import CaptureOptions

ROWS = 40


class Driver:
    """tests/crew_driver.py at work."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "crew_driver.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def run(
        self, world: int, options: CaptureOptions, kill: tuple[int, ...] = (), after: float = 0.0
    ) -> tuple[list[int], float]:
        step = {"world": world, "options": options.model_dump(mode="json"), "kill": kill, "after": after}
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(step) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        return answer["codes"], answer["seconds"]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def options_for(target: str, data: str, out: Path, **options: Any) -> CaptureOptions:
    return capture_options(target, data, out, layers=(0, 2), **options)
