"""Work that waits on others (a server), many at a time."""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")


def side_by_side(jobs: Sequence[Job], work: Callable[[Job], Result], count: int) -> Iterator[tuple[Job, Result]]:
    """`work` of every job in `count` threads, as they finish. The first fault is raised, and no further job is begun.

    Daemon threads, and not an executor's: an interrupted program must not wait for answers that take minutes.
    """
    todo: queue.SimpleQueue[Job] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[Job, Result | None, BaseException | None]] = queue.SimpleQueue()
    stopped = threading.Event()
    for job in jobs:
        todo.put(job)

    def run() -> None:
        while not stopped.is_set():
            try:
                job = todo.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((job, work(job), None))
            except BaseException as fault:
                stopped.set()
                done.put((job, None, fault))

    for _ in range(min(count, len(jobs))):
        threading.Thread(target=run, daemon=True).start()
    try:
        for _ in jobs:
            job, result, fault = done.get()
            if fault is not None:
                raise fault
            yield job, result  # type: ignore[misc]
    finally:
        stopped.set()
