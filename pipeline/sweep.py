"""`dflash train --sweep`: a grid of drafts from one cache, a process and a run folder each, some at a time.

SWEEP/  NAME.yaml (its options)  NAME.log (what it said)  NAME/ (its run)      for each point NAME of the grid
"""

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cache.read import open_cache
from cache.whole import write_whole
from pipeline.sweep_table import sweep_table
from schemas.errors import OptionError, TrainFault
from schemas.options import TrainOptions
from schemas.say import Say
from schemas.yaml_text import dump_yaml
from train.optim import highest_rate
from train.resolve import DEFAULT_EPOCHS
from train.rundir import Provenance, holds_run, provenance_of, read_options, read_provenance

POLL_SECONDS = 0.1
PROGRAM = "from pipeline.cli import main; main()"


@dataclass(frozen=True)
class Task:
    """One run of a sweep."""

    name: str
    folder: Path
    options: TrainOptions

    @property
    def log(self) -> Path:
        """Where the process writes."""
        return self.folder.with_name(f"{self.name}.log")

    @property
    def config(self) -> Path:
        """The options, as --config takes them."""
        return self.folder.with_name(f"{self.name}.yaml")


def sweep(tasks: Sequence[Task], cache: str, jobs: int, say: Say) -> str:
    """Train what is not finished, `jobs` at a time, and return the table of all.

    A run that was interrupted goes on; one that fails is told of and the others go on. Raises TrainFault at the end where any
    failed, after the table of the others was noted, and OptionError for more jobs than devices.
    """
    devices = devices_for(jobs, {task.options.run.device for task in tasks})
    now = provenance_of(open_cache(cache), cache)
    waiting = [task for task in tasks if not is_finished(task, now)]
    if len(waiting) < len(tasks):
        say.note(f"{len(tasks) - len(waiting)} of {len(tasks)} runs are finished already: skipped")
    failed = _run_all(waiting, cache, devices, say)
    done = [task for task in tasks if task.name not in failed]
    table = sweep_table([(task.name, task.folder) for task in done]) if done else ""
    if failed:
        if table:
            say.note(table)
        names = ", ".join(f"{name} (exit code {code})" for name, code in failed.items())
        raise TrainFault(
            f"{len(failed)} of {len(tasks)} runs failed: {names}; their .log files say why, and the same command tries them again"
        )
    return table


def devices_for(jobs: int, asked: set[str]) -> list[str | None]:
    """The device of each job: CUDA devices in turn where "auto" finds some; None leaves it to the options."""
    if jobs < 1:
        raise OptionError(f"--jobs {jobs}: give at least 1")
    count = torch.cuda.device_count() if asked == {"auto"} and torch.cuda.is_available() else 0
    if not count:
        return [None] * jobs
    if jobs > count:
        raise OptionError(f"--jobs {jobs}, but there are {count} CUDA devices: give at most {count}, or a --device")
    return [f"cuda:{number}" for number in range(jobs)]


def is_finished(task: Task, now: Provenance) -> bool:
    """Whether a run has ended that was asked for just so: this cache, this length, and every option that was given."""
    if not holds_run(task.folder):
        return False
    held, stored = read_provenance(task.folder), read_options(task.folder)
    if held.draft is None or (held.identity, held.index_sha256) != (now.identity, now.index_sha256):
        return False
    asked = task.options
    length = (asked.run.steps, asked.run.epochs)
    if (stored.run.steps, stored.run.epochs) != (length if any(length) else (None, DEFAULT_EPOCHS)):
        return False
    before = stored.model_dump()
    asked = asked.model_copy(update={"optim": asked.optim.model_copy(update={"lr": highest_rate(asked.optim)})})
    return all(
        value in ("auto", before[group][name]) or (name == "layers" and value is None)
        for group, fields in asked.model_dump(exclude={"log"}).items()
        for name, value in fields.items()
        if name not in ("steps", "epochs", "device", "log_every", "checkpoint_every", "keep")
    )


def _run_all(tasks: Sequence[Task], cache: str, devices: Sequence[str | None], say: Say) -> dict[str, int]:
    """Run the tasks, one on each device at a time; the exit codes of those that failed, by name."""
    waiting, free = deque(tasks), deque(devices)
    running: dict[str, tuple[subprocess.Popen[bytes], Task, str | None]] = {}
    failed: dict[str, int] = {}
    done = 0
    try:
        while waiting or running:
            while waiting and free:
                task, device = waiting.popleft(), free.popleft()
                running[task.name] = (_start(task, cache, device, len(devices)), task, device)
                say.note(
                    f"{task.name}: {'going on' if holds_run(task.folder) else 'begun'}{f' on {device}' if device else ''}"
                )
            for name, (process, task, device) in list(running.items()):
                code = process.poll()
                if code is None:
                    continue
                del running[name]
                free.append(device)
                done += 1
                if code:
                    failed[name] = code
                    say.warn(f"{name} failed, exit code {code}: {_last_line(task.log)}")
                say.progress("runs", done, len(tasks), failed=len(failed))
            time.sleep(POLL_SECONDS)
    finally:
        for process, _, _ in running.values():
            process.terminate()
        for process, _, _ in running.values():
            process.wait()
    return failed


def _start(task: Task, cache: str, device: str | None, jobs: int) -> "subprocess.Popen[bytes]":
    text = dump_yaml(task.options.model_dump(mode="json"))
    write_whole(task.config, [text.encode()])
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        "train",
        "--cache",
        cache,
        "--config",
        str(task.config),
        "--out",
        str(task.folder),
    ]
    command += ["--device", device] if device else []
    command += ["--resume"] if holds_run(task.folder) else []
    environment = dict(os.environ)
    if jobs > 1 and device is None:
        # Each process would otherwise take all cores, and all wait for each other.
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    with open(task.log, "ab") as log:
        # In a session of its own: Ctrl-C reaches the sweep alone, which asks its runs to save and stop.
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines()
    return lines[-1] if lines else "it said nothing"
