"""SIGTERM as a flag: the loop finishes its step and saves, rather than dying in the middle of it."""

import signal
import threading
from types import FrameType, TracebackType


class Interrupt:
    """While the block runs, SIGTERM sets `arrived` and does nothing else. Outside the main thread no signal can be caught."""

    def __init__(self) -> None:
        self.arrived = False

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.arrived = True
