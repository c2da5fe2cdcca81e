"""Files that appear whole or not at all: temporary name, fsync, rename, fsync of the folder."""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from cache.checksum import crc32c
from cache.workspace import TEMPORARY
from schemas.errors import DflashError
from schemas.records import ObjectRecord

# A file's pages are written in blocks that begin at multiples of this: Linux then keeps them as huge pages where it can, and
# copying from such pages, mapped, is a tenth faster than from small ones.
BLOCK_BYTES = 2 << 20
# As many pieces of memory one call takes on Linux.
BLOCK_PIECES = 1024


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable; a rename is only as durable as its folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(
    path: Path, parts: Iterable[bytes | memoryview], temporary: Path | None = None, new: bool = False
) -> ObjectRecord:
    """Write `parts`, in order, as the file `path`; a reader sees the old file or the new one.

    `temporary` is the name to write under (same file system), by default one beside the file; `new` says that no such file
    may be there. Returns its size and CRC-32C. Raises DflashError where the disk is full or refuses, FileExistsError for `new`.
    """
    temporary = temporary or path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    size, checksum = 0, 0
    try:
        for folder in (path.parent, temporary.parent):
            folder.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb", buffering=0) as file:
            for block in _blocks(parts):
                for piece in block:
                    checksum = crc32c(piece, checksum)
                size += sum(map(len, block))
                _write(file.fileno(), block)
            os.fsync(file.fileno())
        _appear(temporary, path, new)
        fsync_folder(path.parent)
    except OSError as fault:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if new and isinstance(fault, FileExistsError) and path.exists():
            raise
        raise DflashError(
            f"cannot write {path}: {fault.strerror or fault}: free some space or mend it, then run the same command again"
        ) from fault
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return ObjectRecord(bytes=size, crc32c=f"{checksum:08x}")


def _blocks(parts: Iterable[bytes | memoryview]) -> Iterator[list[memoryview]]:
    # The parts in order, cut where blocks of the file end.
    block: list[memoryview] = []
    done = 0
    for part in parts:
        view = memoryview(part).cast("B")
        while len(view):
            piece = view[: BLOCK_BYTES - done % BLOCK_BYTES]
            view, done = view[len(piece) :], done + len(piece)
            block.append(piece)
            if done % BLOCK_BYTES == 0 or len(block) == BLOCK_PIECES:
                yield block
                block = []
    if block:
        yield block


def _write(file: int, pieces: list[memoryview]) -> None:
    while pieces:
        written = os.writev(file, pieces)
        while pieces and written >= len(pieces[0]):
            written -= len(pieces.pop(0))
        if written:
            pieces[0] = pieces[0][written:]


def _appear(temporary: Path, path: Path, new: bool) -> None:
    if not new:
        os.rename(temporary, path)
        return
    try:
        # Of two processes that do this at once one gets the name, which a look and a rename cannot promise.
        os.link(temporary, path)
        os.unlink(temporary)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if path.exists():
            raise FileExistsError(path) from None
        os.rename(temporary, path)
