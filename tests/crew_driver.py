"""Captures by several processes, some of which are killed; forked from one interpreter, since importing torch takes seconds.

Reads steps from standard input, one JSON object each: {"world", "kill": [ranks], "after": seconds, "options": {...}}; answers each
with a line of JSON: the exit status of every process (negative: the signal that ended it) and the seconds it took.
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from capture.run import capture  # noqa: E402
from schemas.errors import DflashError, Interrupted  # noqa: E402
from schemas.options import CaptureOptions  # noqa: E402
from schemas.ranks import Ranks  # noqa: E402
from schemas.say import Silent  # noqa: E402


def child(options: CaptureOptions, ranks: Ranks) -> None:
    try:
        capture(options, Silent(), ranks)
        code = 0
    except (DflashError, Interrupted) as fault:
        print(f"{ranks.rank}: {type(fault).__name__}: {fault}", file=sys.stderr)
        code = fault.exit_code
    os._exit(code)


def step(world: int, options: CaptureOptions, kill: list[int], after: float) -> dict[str, object]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(free.getsockname()[1]))
    begun, children = time.monotonic(), {}
    for rank in range(world):
        if (pid := os.fork()) == 0:
            os.environ["LOCAL_RANK"] = str(rank)
            child(options, Ranks(rank, world, rank, world))
        children[pid] = rank
    codes: dict[int, int] = {}
    pids = {rank: pid for pid, rank in children.items()}
    while len(codes) < world:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[children[pid]] = os.waitstatus_to_exitcode(status)
            if codes[children[pid]] < 0:
                # As a launcher does: where one is killed, it ends the others.
                [os.kill(pids[rank], signal.SIGTERM) for rank in range(world) if rank not in codes]
        if kill and time.monotonic() - begun >= after:
            [os.kill(pids[rank], signal.SIGKILL) for rank in kill if rank not in codes]
            kill = []
        time.sleep(0.002)
    return {"codes": [codes[rank] for rank in range(world)], "seconds": time.monotonic() - begun}


if __name__ == "__main__":
    for text in sys.stdin:
        task = json.loads(text)
        print(
            json.dumps(
                step(
                    task["world"],
                    CaptureOptions.model_validate_json(json.dumps(task["options"])),
                    task["kill"],
                    task["after"],
                )
            ),
            flush=True,
        )
