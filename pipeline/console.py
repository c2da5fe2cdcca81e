"""Progress and notes on standard error: a bar on a terminal, plain lines in a log. Results go to standard output."""

import sys
import time
from types import TracebackType
from typing import TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

LINE_EVERY_SECONDS = 10.0


class Console:
    """A listener (`schemas.say.Say`) that shows what a stage tells. Use it as a context manager, so that a bar is taken down."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._rich = RichConsole(file=stream or sys.stderr, highlight=False, emoji=False)
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._line_at: dict[str, float] = {}
        self._began: dict[str, tuple[float, float]] = {}

    def __enter__(self) -> "Console":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def note(self, text: str) -> None:
        """One fact the user should know."""
        self._rich.print(text, markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Something that is probably not what the user wants."""
        self._rich.print(f"warning: {text}", markup=False, soft_wrap=True)

    def result(self, text: str) -> None:
        """What was asked for, on standard output, which a bar has taken over: so bars end here."""
        if self._bar is not None:
            self._bar.stop()
            self._bar, self._tasks = None, {}
        print(text, flush=True)

    def progress(self, label: str, done: float, total: float, **figures: float | str) -> None:
        """Move the bar of `label`, or print a line: the first, the last, and one every ten seconds between."""
        detail = "  ".join(f"{name.replace('_', ' ')} {_figure(value)}" for name, value in figures.items())
        if self._rich.is_terminal:
            self._move_bar(label, done, total, detail)
            return
        now = time.monotonic()
        begun_at, behind = self._began.setdefault(label, (now, done))
        if done >= total or now - self._line_at.get(label, -LINE_EVERY_SECONDS) >= LINE_EVERY_SECONDS:
            self._line_at[label] = now
            # From the second call on: the first may come after any amount of work.
            left = (now - begun_at) / (done - behind) * (total - done) if done > behind else 0.0
            eta = f"  eta {_duration(left)}" if left else ""
            self.note(f"{label} {done:,.0f}/{total:,.0f}" + (f"  {detail}" if detail else "") + eta)

    def _move_bar(self, label: str, done: float, total: float, detail: str) -> None:
        if self._bar is None:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[detail]}"),
            )
            self._bar = Progress(*columns, console=self._rich)
            self._bar.start()
        if label not in self._tasks:
            self._tasks[label] = self._bar.add_task(label, total=total, detail=detail)
        self._bar.update(self._tasks[label], completed=done, total=total, detail=detail)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _figure(value: float | str) -> str:
    if isinstance(value, str):
        return value
    if value and abs(value) < 0.01:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
