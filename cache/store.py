"""Where a cache's objects lie. Every object appears whole or not at all: temporary name, fsync, rename, fsync of the folder."""

import os
import shutil
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cache.checksum import crc32c
from schemas.errors import DflashError, OptionError
from schemas.records import ObjectRecord

TEMPORARY = ".tmp-"


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable; a rename is only as durable as its folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_place(path: str) -> None:
    """OptionError where nothing can be written at the `--out` path: it lies below a file, or its folder refuses."""
    place = Path(path).absolute()
    try:
        while not place.exists():
            place = place.parent
    except OSError as fault:
        raise OptionError(f"--out {path}: {fault.strerror}: give another --out") from None
    if place != Path(path).absolute() and not place.is_dir():
        raise OptionError(f"--out {path}: {place} is a file, not a folder: give another --out")
    if not os.access(place, os.W_OK):
        raise OptionError(f"--out {path}: {place} cannot be written: change its permissions, or give another --out")


def write_whole(path: Path, parts: Iterable[bytes | memoryview], temporary: Path | None = None) -> ObjectRecord:
    """Write `parts`, in order, as the file `path`; a reader sees the old file or the new one.

    `temporary` is the name to write under (same file system), by default one beside the file. Returns its size and CRC-32C.
    Raises DflashError where the disk is full or refuses.
    """
    temporary = temporary or path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    size, checksum = 0, 0
    try:
        for folder in (path.parent, temporary.parent):
            folder.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb", buffering=0) as file:
            for part in parts:
                view = memoryview(part).cast("B")
                checksum = crc32c(view, checksum)
                size += len(view)
                while len(view):
                    view = view[file.write(view) or 0 :]
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except OSError as fault:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise DflashError(
            f"cannot write {path}: {fault.strerror or fault}: free some space or mend it, then run the same command again"
        ) from fault
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)
    return ObjectRecord(bytes=size, crc32c=f"{checksum:08x}")


@dataclass(frozen=True)
class LocalStore:
    """A cache in a local folder. Keys are relative paths with `/`."""

    root: Path

    def path(self, key: str) -> Path:
        """Where an object lies."""
        return self.root / key

    def put(self, key: str, parts: Iterable[bytes | memoryview]) -> ObjectRecord:
        """Write an object whole. Unfinished ones lie in a folder that names this host and process."""
        temporary = self.root / _workspace(os.getpid()) / key.replace("/", "-")
        return write_whole(self.path(key), parts, temporary)

    def get(self, key: str) -> bytes | None:
        """An object's bytes, or None where there is none."""
        try:
            return self.path(key).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def size(self, key: str) -> int | None:
        """An object's size, or None where there is none: a look-up, not a read."""
        try:
            return self.path(key).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def delete(self, key: str) -> None:
        """Remove an object if it is there."""
        self.path(key).unlink(missing_ok=True)

    def clean_workspaces(self) -> None:
        """Remove this process's unfinished objects, and those of processes of this host that no longer live."""
        for folder in self.root.glob(f"{_workspace('*')}"):
            pid = folder.name.rsplit("-", 1)[1]
            if pid == str(os.getpid()) or not _alive(int(pid)):
                shutil.rmtree(folder, ignore_errors=True)


def _workspace(pid: int | str) -> str:
    return f"{TEMPORARY}{socket.gethostname()}-{pid}"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
