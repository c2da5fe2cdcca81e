"""Where a cache's objects lie. Every object appears whole or not at all."""

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from cache.mapped import MappedFile, MappedFiles
from cache.spans import Run, Span, read_run
from cache.whole import fsync_folder, write_whole
from cache.workspace import TEMPORARY, is_leftover, workspace_name
from schemas.errors import CacheError, OptionError
from schemas.records import ObjectRecord

OBJECT_STORES = ("s3", "gs", "az")


def check_place(path: str) -> None:
    """OptionError where nothing can be written at the `--out` path: it lies below a file, or its folder refuses."""
    if "://" in path:
        raise OptionError(f"--out {path}: only a cache can lie in an object store: give a local path")
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


class Store(Protocol):
    """The objects of one cache, under keys: relative paths with `/`. All of them raise DflashError where the place refuses."""

    def where(self, key: str = "") -> str:
        """What to call the cache, or one of its objects, in messages."""

    def vacant(self) -> bool:
        """Whether a cache may begin here: nothing is there but unfinished objects.

        Raises CacheError where it holds something that is no cache, OptionError where nothing can be written.
        """

    def free_bytes(self) -> int | None:
        """How many bytes still fit, or None where nothing bounds them."""

    def put(self, key: str, parts: Iterable[bytes | memoryview]) -> ObjectRecord:
        """Write an object whole, of its parts in order; a reader sees the old one or the new one."""

    def put_new(self, key: str, parts: Iterable[bytes | memoryview]) -> bool:
        """`put` where there is no such object; False where there is one, which stays as it is. Of two at once, one gets True."""

    def get(self, key: str) -> bytes | None:
        """An object's bytes, or None where there is none."""

    def get_each(self, keys: Sequence[str]) -> Iterator[bytes | None]:
        """`get` of each key, in order."""

    def read(self, spans: Sequence[Span]) -> Iterator[memoryview]:
        """The bytes of each span, in order; fewer where the object ends sooner. Raises OSError where one cannot be opened."""

    def fill(self, runs: Sequence[Run]) -> Iterator[int]:
        """Read each run into its memory when the iterator reaches it; gives how many bytes there were. Raises OSError as `read`."""

    def mapped_file(self, key: str) -> MappedFile | None:
        """An object of which what lies in memory already can be borrowed; None where all has to be read."""

    def size(self, key: str) -> int | None:
        """An object's size, or None where there is none: a look-up, not a read."""

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Every object whose key begins with `prefix` (whole names, such as "shards"), with its size."""

    def local(self, keys: Sequence[str]) -> AbstractContextManager[Path]:
        """A local folder in which these objects lie as files, as far as they are there."""

    def zarr_store(self) -> Any:
        """The same place as zarr-python sees it."""

    def delete(self, key: str) -> None:
        """Remove an object if it is there."""

    def remove(self) -> None:
        """Remove all that is there; whoever looks meanwhile never takes what is left for a cache."""

    def clean_workspaces(self) -> None:
        """Remove what this process, and dead ones of this host, left unfinished."""


def open_store(path: str) -> Store:
    """The store at a path: a local folder, or `s3://`, `gs://` or `az://` BUCKET/PATH.

    Raises OptionError for another scheme, a bucket that is not there or credentials that are not valid, StoreFault where an object
    store does not answer.
    """
    if (scheme := re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", path)) is None:
        return LocalStore(Path(path))
    if scheme[1] not in OBJECT_STORES:
        known = ", ".join(f"{name}://" for name in OBJECT_STORES)
        raise OptionError(f"{path}: {scheme[1]}:// is no place for a cache: give a local folder, or one of {known}")
    from cache.objects import ObjectStore  # only where needed: it brings a network library

    return ObjectStore.open(path)


@dataclass(frozen=True)
class LocalStore:
    """A cache in a local folder."""

    root: Path
    mapped: MappedFiles = field(default_factory=MappedFiles, compare=False, repr=False)

    def where(self, key: str = "") -> str:
        """The path."""
        return f"{self.root}/{key}" if key else str(self.root)

    def vacant(self) -> bool:
        """See `Store.vacant`. Only a folder with a zarr.json is a cache."""
        folder = self.root
        if not os.path.exists(folder) or (folder.is_dir() and not any(folder.iterdir())):
            check_place(str(folder))
            return True
        if not folder.is_dir():
            raise CacheError(f"--out {folder} is a file: give a new folder, or one that a capture began")
        if (folder / "zarr.json").exists():
            return False
        names = sorted(entry.name for entry in folder.iterdir())
        if all(name.startswith(TEMPORARY) for name in names):
            return True
        raise CacheError(f"--out {folder} holds something else ({names[0]!r}): give a new or empty folder")

    def free_bytes(self) -> int:
        """Free bytes of the disk that the folder is, or will be, on."""
        folder = self.root.absolute()
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free

    def put(self, key: str, parts: Iterable[bytes | memoryview]) -> ObjectRecord:
        """Write an object whole. Unfinished ones lie in a folder that names this host and process."""
        return write_whole(self.root / key, parts, self._unfinished(key))

    def put_new(self, key: str, parts: Iterable[bytes | memoryview]) -> bool:
        """See `Store.put_new`."""
        try:
            write_whole(self.root / key, parts, self._unfinished(key), new=True)
        except FileExistsError:
            return False
        return True

    def _unfinished(self, key: str) -> Path:
        return self.root / workspace_name() / key.replace("/", "-")

    def get(self, key: str) -> bytes | None:
        """An object's bytes, or None where there is none."""
        try:
            return (self.root / key).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def get_each(self, keys: Sequence[str]) -> Iterator[bytes | None]:
        """`get` of each key, in order."""
        return map(self.get, keys)

    def read(self, spans: Sequence[Span]) -> Iterator[memoryview]:
        """See `Store.read`. A file is opened once for spans of it that follow each other."""
        for key, group in groupby(spans, key=lambda span: span.key):
            file = os.open(self.root / key, os.O_RDONLY)
            try:
                for span in group:
                    offset = span.offset if span.offset >= 0 else os.fstat(file).st_size + span.offset
                    yield memoryview(os.pread(file, span.size, offset) if offset >= 0 else b"")
            finally:
                os.close(file)

    def fill(self, runs: Sequence[Run]) -> Iterator[int]:
        """See `Store.fill`. A file is opened once for runs of it that follow each other."""
        for key, group in groupby(runs, key=lambda run: run.key):
            file = os.open(self.root / key, os.O_RDONLY)
            try:
                for run in group:
                    yield read_run(file, run)
            finally:
                os.close(file)

    def mapped_file(self, key: str) -> MappedFile | None:
        """See `Store.mapped_file`."""
        return self.mapped.file(f"{self.root}/{key}")

    def size(self, key: str) -> int | None:
        """An object's size, or None where there is none: a look-up, not a read."""
        try:
            return (self.root / key).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Every file below `prefix`, with its size."""
        found = {}
        for folder, _, names in os.walk(self.root / prefix):
            for name in names:
                path = Path(folder) / name
                with suppress(FileNotFoundError):
                    found[path.relative_to(self.root).as_posix()] = path.stat().st_size
        return found

    def local(self, keys: Sequence[str]) -> AbstractContextManager[Path]:  # noqa: ARG002
        """The folder itself."""
        return nullcontext(self.root)

    def zarr_store(self) -> str:
        """The folder."""
        return str(self.root)

    def delete(self, key: str) -> None:
        """Remove an object if it is there."""
        (self.root / key).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove what is in the folder, which stays: it may be a link, a mount or where the user stands.

        All is moved among this process's unfinished objects first, zarr.json last: until then it is a cache, though a damaged
        one, and after that nothing. Whoever comes after a kill goes on from either.
        """
        self.clean_workspaces()
        gone = self.root / workspace_name() / "removed"
        gone.mkdir(parents=True, exist_ok=True)
        for entry in sorted(self.root.iterdir(), key=lambda entry: entry.name == "zarr.json"):
            if not entry.name.startswith(TEMPORARY):
                entry.rename(gone / entry.name)
        fsync_folder(self.root)
        shutil.rmtree(gone)

    def clean_workspaces(self) -> None:
        """Remove this process's unfinished objects, and those of processes of this host that no longer live."""
        for folder in self.root.glob(f"{TEMPORARY}*"):
            if is_leftover(folder.name):
                shutil.rmtree(folder, ignore_errors=True)
