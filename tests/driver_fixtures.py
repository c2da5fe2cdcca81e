"""The process that forks others for the tests of several: a script that reads a task a line and answers each with a line."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


class Driver:
    """A script of tests/ at work."""

    def __init__(self, script: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / script)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def ask(self, task: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
