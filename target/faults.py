"""What a library raises over a target's files, as one line of ours."""

from collections.abc import Iterator
from contextlib import contextmanager

from schemas.errors import TargetError, UserError


@contextmanager
def reported(name: str, what: str, advice: str) -> Iterator[None]:
    """Anything raised within becomes TargetError: target `name`: cannot `what` (its first line); `advice`.

    Unreadable files raise whatever json, safetensors, tokenizers or torch raise; to the user it is one kind of fault.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as fault:
        raise TargetError(f"target {name!r}: cannot {what} ({first_line(fault)}); {advice}") from None


def first_line(fault: Exception) -> str:
    """The kind of an exception and the first line of its message, cut to a readable length."""
    lines = str(fault).strip().splitlines() or [""]
    return f"{type(fault).__name__}: {lines[0][:200]}"
