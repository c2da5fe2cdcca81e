"""What stages may tell whoever runs them: notes, warnings, progress. Only the command line turns them into text."""

from typing import Protocol


class Say(Protocol):
    """The listener of a stage. Implementations must not raise; none of these calls changes what a stage does."""

    def note(self, text: str) -> None:
        """One fact the user should know: a default that was taken, a number that was found."""

    def warn(self, text: str) -> None:
        """Something that is probably not what the user wants, though the work goes on."""

    def progress(self, label: str, done: float, total: float, **figures: float | str) -> None:
        """`done` of `total` units of the work called `label`; `figures` are named values to show beside it."""


class Silent:
    """A listener that drops everything."""

    def note(self, text: str) -> None:
        """Dropped."""

    def warn(self, text: str) -> None:
        """Dropped."""

    def progress(self, label: str, done: float, total: float, **figures: float | str) -> None:
        """Dropped."""
