"""Reading ahead: one background thread keeps a bounded number of items ready, in order."""

import queue
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Generic, TypeVar

import torch

Item = TypeVar("Item")


class Prefetch(Generic[Item]):
    """Iterate over `source` with at most `ahead` items read before they are asked for.

    Order is the source's. What the source raises is raised here, after the items before it. Used as a context manager, so that
    the thread has ended when the block is left. `waited` are the seconds that the consumer has spent waiting.
    """

    def __init__(self, source: Iterator[Item], ahead: int = 2) -> None:
        self.waited = 0.0
        self._source = source
        self._ready: queue.Queue[tuple[Item | None, BaseException | None]] = queue.Queue(maxsize=ahead)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read, name="prefetch", daemon=True)

    def __enter__(self) -> "Prefetch[Item]":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._thread.join()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        started = time.perf_counter()
        item, fault = self._ready.get()
        self.waited += time.perf_counter() - started
        if fault is not None:
            # The fault stays at the head of the queue: asking again must not wait for a thread that has ended.
            self._ready.put((None, fault))
            raise fault
        assert item is not None
        return item

    def _read(self) -> None:
        # A second pool of compute threads would spin beside the trainer's and slow its steps by half.
        torch.set_num_threads(1)
        try:
            for item in self._source:
                if not self._offer((item, None)):
                    return
            self._offer((None, StopIteration()))
        except BaseException as fault:  # whatever it is, it belongs to the consumer
            self._offer((None, fault))

    def _offer(self, entry: tuple[Item | None, BaseException | None]) -> bool:
        while not self._closed.is_set():
            try:
                self._ready.put(entry, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False
