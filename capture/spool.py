"""Tokens between reading and the plan: in a file without a name as rows are read, taken back a shard at a time.

In memory they would need 5 bytes a token, tens of times what the index of their samples needs. The file has no name, so whatever
ends the process ends it too.
"""

import os
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from schemas.errors import DflashError

TOKEN_BYTES = 5  # an id and its mask
WRITE_BYTES = 1 << 20


def spool_folder(out: str) -> Path:
    """Where the tokens of a cache at `out` are kept: beside it, on its own disk, which is sized for it; else where temporary files are.

    A temporary folder is often a small disk in memory; TMPDIR names another. Not inside: NFS gives what is open there a name, and
    a cache that is replaced could not be emptied.
    """
    folder = Path(out).absolute()
    if "://" not in out:
        with suppress(OSError):
            while not folder.is_dir():
                folder = folder.parent
            beside = folder.parent if folder == Path(out).absolute() else folder
            for place in (beside, folder):
                if os.stat(place).st_dev == os.stat(folder).st_dev and os.access(place, os.W_OK | os.X_OK):
                    return place
    return Path(tempfile.gettempdir())


class Spool:
    """Samples' ids and masks in a file, each sample's after the other's, by token: ids first, then the mask.

    Raises DflashError where the disk is full or refuses.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = Path(tempfile.gettempdir()) if folder is None else folder
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                self._file = os.dup(file.fileno())
        except OSError as fault:
            raise self._refused(fault) from fault
        weakref.finalize(self, os.close, self._file)
        self._waiting: list[bytes] = []
        self._waiting_bytes = self._written = 0

    def add(self, input_ids: NDArray[np.int32], loss_mask: NDArray[np.uint8]) -> None:
        """Append a sample."""
        self._waiting += (input_ids.astype("<i4", copy=False).tobytes(), loss_mask.tobytes())
        self._waiting_bytes += TOKEN_BYTES * len(input_ids)
        if self._waiting_bytes >= WRITE_BYTES:
            self._flush()

    def take(self, starts: Sequence[int], lengths: Sequence[int]) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """The ids and masks of samples, one after the other: each begins after so many tokens and has so many."""
        self._flush()
        ids, masks = np.empty(sum(lengths), np.dtype("<i4")), np.empty(sum(lengths), np.uint8)
        id_bytes, place = ids.view(np.uint8), 0
        for start, length in zip(starts, lengths, strict=True):
            data = np.frombuffer(self._read(TOKEN_BYTES * start, TOKEN_BYTES * length), np.uint8)
            id_bytes[4 * place : 4 * (place + length)] = data[: 4 * length]
            masks[place : place + length] = data[4 * length :]
            place += length
        return ids.astype(np.int32, copy=False), masks

    def _flush(self) -> None:
        view = memoryview(b"".join(self._waiting))
        self._waiting, self._waiting_bytes = [], 0
        try:
            while len(view):
                done = os.pwrite(self._file, view, self._written)
                self._written += done
                view = view[done:]
        except OSError as fault:
            raise self._refused(fault) from fault

    def _read(self, offset: int, size: int) -> bytes:
        data = os.pread(self._file, size, offset)
        while len(data) < size:  # the system reads at most 2 GiB at a time
            more = os.pread(self._file, size - len(data), offset + len(data))
            assert more, "nobody else has the file"
            data += more
        return data

    def _refused(self, fault: OSError) -> DflashError:
        return DflashError(
            f"cannot keep tokens in {self.folder} until they are planned: {fault.strerror or fault}: free some space or mend it, then "
            "run the same command again"
        )
