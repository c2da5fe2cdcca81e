"""What a library raises over a target's files, as one line of ours."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from schemas.errors import DflashError, TargetError, UserError

# Whether Python says it or one of the libraries in Rust.
NO_SPACE = os.strerror(errno.ENOSPC)


@contextmanager
def reported(name: str, what: str, advice: str) -> Iterator[None]:
    """Anything raised within becomes TargetError: target `name`: cannot `what` (its first line); `advice`.

    Unreadable files raise whatever json, safetensors, tokenizers or torch raise; to the user it is one kind of fault. A full disk,
    which is none of the target's, is a DflashError.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as fault:
        if NO_SPACE in str(fault):
            room = "free some space (TMPDIR names the folder of temporary files), then run the same command again"
            raise DflashError(f"target {name!r}: cannot {what} ({first_line(fault)}): {room}") from None
        raise TargetError(f"target {name!r}: cannot {what} ({first_line(fault)}); {advice}") from None


def first_line(fault: Exception) -> str:
    """The kind of an exception and the first line of its message, cut to a readable length."""
    lines = str(fault).strip().splitlines() or [""]
    return f"{type(fault).__name__}: {lines[0][:200]}"
