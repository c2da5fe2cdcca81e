"""A cache in an object store: S3 and what speaks it, Google Cloud Storage, Azure. Requests are obstore's.

An object appears whole or not at all without a rename: a put is one request, or a multi-part upload of which nothing shows until
it is completed. A fault in the middle aborts the upload. A killed process cannot; what it had sent stays invisible, and since
nobody can tell a dead worker's upload from a living one's, the bucket's own lifecycle rule is what removes it.
"""

import errno
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from cache.checksum import crc32c
from cache.object_faults import behind_the_end, endpoint_of, explained, no_bucket
from cache.spans import Run, Span
from cache.workspace import TEMPORARY
from schemas.errors import CacheError, DflashError, OptionError, StoreFault
from schemas.records import ObjectRecord

CLIENTS: dict[str, Any] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
# Requests of one read that are under way at a time; each holds a chunk in memory.
IN_FLIGHT = 16
# A part of a multi-part upload, of which four are in memory: S3 takes 10,000 parts, so objects up to 160 GiB.
PART_BYTES = 16 << 20
PARTS_IN_FLIGHT = 4
# The first contact gives up within seconds, since then a name is wrong; later a store that is busy is waited for.
FIRST = ({"connect_timeout": "3s", "timeout": "10s"}, 2, 8)
LATER = ({"connect_timeout": "5s", "timeout": "300s", "read_timeout": "60s"}, 10, 60)
# Stands in a place whose cache is being removed: what is left there is nobody's.
REMOVING = f"{TEMPORARY}removing"

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class ObjectStore:
    """A cache under a prefix of a bucket (see `cache.store.Store`)."""

    url: str
    client: Any
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(IN_FLIGHT), compare=False, repr=False)

    @classmethod
    def open(cls, url: str) -> "ObjectStore":
        """The store at `s3://bucket/prefix`, by the environment's credentials and endpoint.

        Asks it once: raises OptionError where there is no such bucket or no valid credentials, StoreFault where it does not answer.
        """
        scheme, rest = url.split("://", 1)
        bucket, _, prefix = rest.rstrip("/").partition("/")
        if not bucket:
            raise OptionError(f"{url}: no bucket is named: give {scheme}://BUCKET/PATH")
        endpoint = endpoint_of(scheme, url)
        cls(url.rstrip("/"), _client(scheme, bucket, prefix, endpoint, url, *FIRST)).get("zarr.json")
        return cls(url.rstrip("/"), _client(scheme, bucket, prefix, endpoint, url, *LATER))

    def where(self, key: str = "") -> str:
        """The address."""
        return f"{self.url}/{key}" if key else self.url

    def vacant(self) -> bool:
        """See `Store.vacant`."""
        if self.size("zarr.json") is not None:
            return False
        if self.size(REMOVING) is not None:
            return True
        with self._told():
            page = next(iter(obstore.list(self.client, chunk_size=1)), ())
        if page:
            name = page[0]["path"]
            raise CacheError(f"--out {self.url} holds something else ({name!r}): give a new or empty place")
        return True

    def free_bytes(self) -> None:
        """Nothing bounds a bucket."""

    def put(self, key: str, parts: Iterable[bytes | memoryview]) -> ObjectRecord:
        """Write an object whole and see that all of it arrived."""
        size, checksum = 0, 0

        def counted() -> Iterator[memoryview]:
            nonlocal size, checksum
            for part in parts:
                view = memoryview(part).cast("B")
                size, checksum = size + len(view), crc32c(view, checksum)
                yield view

        stream, head = counted(), []
        for view in stream:
            head.append(view)
            if size > PART_BYTES:
                break
        with self._told():
            if size <= PART_BYTES:
                obstore.put(self.client, key, b"".join(head), use_multipart=False)
            else:
                whole = chain(head, stream)
                obstore.put(self.client, key, whole, chunk_size=PART_BYTES, max_concurrency=PARTS_IN_FLIGHT)
        if (arrived := self.size(key)) != size:
            self.delete(key)
            raise StoreFault(
                f"{self.where(key)}: {size} bytes were sent, {arrived} arrived: run the same command again"
            )
        return ObjectRecord(bytes=size, crc32c=f"{checksum:08x}")

    def put_new(self, key: str, parts: Iterable[bytes | memoryview]) -> bool:
        """See `Store.put_new`. It is one request (S3: up to 5 GiB), since uploads in parts know no such condition."""
        try:
            with self._told():
                obstore.put(self.client, key, b"".join(parts), mode="create", use_multipart=False)
        except (FileExistsError, AlreadyExistsError):
            return False
        return True

    def get(self, key: str) -> bytes | None:
        """An object's bytes, or None where there is none."""
        try:
            with self._told():
                return bytes(obstore.get(self.client, key).bytes())
        except FileNotFoundError:
            return None

    def get_each(self, keys: Sequence[str]) -> Iterator[bytes | None]:
        """`get` of each key, in order, many under way at a time."""
        return self._each(self.get, keys)

    def read(self, spans: Sequence[Span]) -> Iterator[memoryview]:
        """See `Store.read`; many are under way at a time."""
        return self._each(self._span, spans)

    def fill(self, runs: Sequence[Run]) -> Iterator[int]:
        """See `Store.fill`; many are under way at a time."""
        answers = self._each(self._span, [Span(run.key, run.offset, run.size) for run in runs])
        for run, data in zip(runs, answers, strict=True):
            place = 0
            for piece in run.into:
                part = data[place : place + len(piece)]
                piece[: len(part)] = part
                place += len(part)
            yield place

    def mapped_file(self, key: str) -> None:
        """Nothing of it is in memory."""

    def size(self, key: str) -> int | None:
        """An object's size, or None where there is none."""
        try:
            with self._told():
                return int(obstore.head(self.client, key)["size"])
        except FileNotFoundError:
            return None

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Every object below `prefix`, with its size: a request for every 1,000 of them."""
        with self._told():
            pages = obstore.list(self.client, prefix or None, chunk_size=1000)
            return {item["path"]: item["size"] for page in pages for item in page}

    @contextmanager
    def local(self, keys: Sequence[str]) -> Iterator[Path]:
        """A temporary folder into which these objects are fetched; it goes with the context. DflashError where it has no room."""
        with self._room():
            temporary = tempfile.TemporaryDirectory(prefix="dflash-")
        with temporary as name:
            for key in keys:
                if (size := self.size(key)) is None:
                    continue
                spans = [Span(key, start, min(PART_BYTES, size - start)) for start in range(0, size, PART_BYTES)]
                path = Path(name) / key
                with self._room():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with open(path, "wb") as file:
                        file.writelines(self.read(spans))
            yield Path(name)

    def zarr_store(self) -> Any:
        """Through the same client."""
        from zarr.storage import ObjectStore as ZarrStore

        return ZarrStore(self.client, read_only=True)

    def delete(self, key: str) -> None:
        """Remove an object if it is there."""
        self._delete([key])

    def remove(self) -> None:
        """Remove all; zarr.json, which makes a cache of it, before the rest, under a mark that says so should this be killed."""
        self.put(REMOVING, [b""])
        self.delete("zarr.json")
        self._delete([key for key in self.sizes() if key != REMOVING])
        self.delete(REMOVING)

    def clean_workspaces(self) -> None:
        """Go on with a removal that was killed. Unfinished uploads are the bucket's to remove."""
        if self.size(REMOVING) is None:
            return
        if self.size("zarr.json") is None:
            self.remove()
        else:
            self.delete(REMOVING)

    def _span(self, span: Span) -> memoryview:
        key, offset, size = span
        if offset < 0 and isinstance(self.client, AzureStore):  # has no ranges from the end
            offset += self.size(key) or 0
        if size == 0 or offset < -size:
            raise AssertionError(f"{span} is empty, or does not reach to the object's end")
        try:
            if offset >= 0:
                return memoryview(obstore.get_range(self.client, key, start=offset, length=size))
            return memoryview(obstore.get(self.client, key, options={"range": {"suffix": -offset}}).bytes())
        except FileNotFoundError as fault:
            if no_bucket(fault):
                raise explained(self.url, fault) from None
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.where(key)) from None
        except BaseError as fault:
            if behind_the_end(fault):
                return memoryview(b"")
            raise explained(self.url, fault) from None

    def _delete(self, keys: Sequence[str]) -> None:
        with self._told():
            try:
                obstore.delete(self.client, keys)
            except FileNotFoundError as fault:  # what Google and Azure say of an object that is not there
                if no_bucket(fault):
                    raise

    def _each(self, work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        waiting: deque[Future[Result]] = deque()
        try:
            for item in items:
                waiting.append(self.pool.submit(work, item))
                if len(waiting) == IN_FLIGHT:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    @contextmanager
    def _room(self) -> Iterator[None]:
        # What the disk here refuses is no fault of the cache.
        try:
            yield
        except OSError as fault:
            if str(fault.filename or "").startswith(self.url):  # an object that is gone
                raise
            raise DflashError(
                f"cannot keep files of {self.url} in {tempfile.tempdir or 'a temporary folder'}: {fault.strerror or fault}: free "
                "some space there, or let TMPDIR name another folder, then run the same command again"
            ) from None

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as fault:
            if no_bucket(fault):
                raise explained(self.url, fault) from None
            raise
        except AlreadyExistsError:
            raise
        except BaseError as fault:
            raise explained(self.url, fault) from None


def _client(
    scheme: str,
    bucket: str,
    prefix: str,
    endpoint: str | None,
    url: str,
    options: dict[str, str],
    retries: int,
    seconds: int,
) -> Any:
    retry = {"max_retries": retries, "retry_timeout": timedelta(seconds=seconds)}
    named = {} if endpoint is None else {"endpoint": endpoint}
    http = {"allow_http": True} if endpoint is not None and endpoint.startswith("http://") else {}
    try:
        return CLIENTS[scheme](bucket, prefix=prefix, client_options=options | http, retry_config=retry, **named)
    except BaseError as fault:
        raise explained(url, fault) from None
