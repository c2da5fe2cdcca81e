"""Where a worker's unfinished objects lie: a folder named after host and process, which only the owner's successor removes.

A process id alone names nobody for long: it is used again after a restart, and every container counts from 1. So the name also
holds the process's start (ticks since the machine's boot) and its pid namespace.
"""

import os
import re
import socket
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

TEMPORARY = ".tmp-"
# What follows the host's name; a worker that knew nothing better named its process id alone.
_PROCESS = re.compile(r"(?:(?P<space>\d+)-(?P<start>\d+)-)?(?P<pid>\d+)")


def workspace_name() -> str:
    """The name of this process's workspace: `.tmp-HOST-NAMESPACE-START-PID`."""
    return _name_of(os.getpid())


@lru_cache(maxsize=4)
def _name_of(pid: int) -> str:
    return f"{TEMPORARY}{socket.gethostname()}-{_namespace()}-{_start_of(pid) or 0}-{pid}"


def is_leftover(name: str) -> bool:
    """Whether a workspace is this process's own or that of a dead process of this host and pid namespace.

    Of any other nothing can be known from here: it is not a leftover.
    """
    ours = f"{TEMPORARY}{socket.gethostname()}-"
    found = _PROCESS.fullmatch(name.removeprefix(ours)) if name.startswith(ours) else None
    if found is None or (found["space"] is not None and int(found["space"]) != _namespace()):
        return False
    pid = int(found["pid"])
    if pid == os.getpid() or not _alive(pid):
        return True
    return found["start"] is not None and _start_of(pid) not in (None, int(found["start"]))


def _namespace() -> int:
    # 0 where the system has none.
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0


def _start_of(pid: int) -> int | None:
    # None where the system does not say, or the process is gone.
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # Field 22; the second, the program's name in brackets, may hold blanks and brackets of its own.
    return int(text.rpartition(")")[2].split()[19])


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
