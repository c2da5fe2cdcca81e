"""SIGTERM and Ctrl-C end a command wherever they come, in a finalizer too."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from types import FrameType
from typing import Any

from schemas.errors import Interrupted

AGAIN_SECONDS = 0.01


def stop(_number: int, _frame: FrameType | None) -> None:
    """The handler of SIGTERM. Training takes the signal over while it can save; every other command keeps on disk what it has done."""
    raise Interrupted("stopped by SIGTERM: the same command goes on where it stopped")


@contextmanager
def none_lost() -> Iterator[None]:
    """Within, a signal that came while Python was freeing something is sent again: there it raises, is printed and forgotten."""
    before, sent = sys.unraisablehook, list[Timer]()

    def hook(ignored: Any) -> None:
        numbers = {Interrupted: signal.SIGTERM, KeyboardInterrupt: signal.SIGINT}
        if (number := numbers.get(ignored.exc_type)) is None:
            before(ignored)
            return
        # Not from here, where it would be ignored as well.
        again = Timer(AGAIN_SECONDS, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()
        sent.append(again)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before
        for again in sent:
            again.cancel()
