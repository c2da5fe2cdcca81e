"""A real S3 server on loopback: moto's, in a process of its own, with one bucket."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import obstore
from obstore.store import S3Store

BUCKET = "caches"


@dataclass(frozen=True)
class S3Server:
    """Where it listens, and what it holds."""

    endpoint: str

    @property
    def environment(self) -> dict[str, str]:
        """What a user sets to reach it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }

    def store(self, prefix: str = "") -> S3Store:
        """The bucket, to look into behind the program's back."""
        options = {"endpoint": self.endpoint, "access_key_id": "test", "secret_access_key": "test"}
        return S3Store(BUCKET, prefix=prefix, region="us-east-1", client_options={"allow_http": True}, **options)

    def contents(self, prefix: str) -> dict[str, bytes]:
        """Every object below a prefix."""
        store = self.store(prefix)
        return {item["path"]: bytes(obstore.get(store, item["path"]).bytes()) for item in obstore.list(store).collect()}

    def upload(self, folder: Path, prefix: str) -> str:
        """Copy a local cache; returns its address."""
        store = self.store(prefix)
        for key, data in folder_contents(folder).items():
            obstore.put(store, key, data)
        return f"s3://{BUCKET}/{prefix}"

    def uploads(self) -> int:
        """How many multi-part uploads are open."""
        with urllib.request.urlopen(f"{self.endpoint}/{BUCKET}?uploads", timeout=10) as answer:
            return int(answer.read().count(b"<UploadId>"))


def folder_contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by key."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def serve_s3() -> Iterator[S3Server]:
    """The server, for as long as the context lasts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    environment = {**os.environ, "MOTO_CALL_RESET_API": "false"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    server = S3Server(f"http://127.0.0.1:{port}")
    try:
        _wait_for(server.endpoint, process)
        request = urllib.request.Request(f"{server.endpoint}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request, timeout=10).close()
        yield server
    finally:
        process.kill()
        process.wait()


def _wait_for(endpoint: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while True:
        assert process.poll() is None, "the S3 server of the tests did not start: is moto[server,s3] installed?"
        try:
            urllib.request.urlopen(f"{endpoint}/moto-api/data.json", timeout=5).close()
            return
        except (urllib.error.URLError, OSError, json.JSONDecodeError):
            assert time.monotonic() < deadline, "the S3 server of the tests does not answer"
            time.sleep(0.05)
