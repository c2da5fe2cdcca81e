"""Fixtures that several tests share. Models are small, made on the spot or shipped; nothing touches a network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The models are tiny: a second thread costs more in waiting than it computes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from pathlib import Path

import pytest
from s3_server import S3Server, serve_s3

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def tiny_chat() -> str:
    """The shipped 2.75M-parameter chat model."""
    return str(ROOT / "demo" / "tiny-chat")


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """moto's S3 server on loopback."""
    with serve_s3() as server:
        yield server


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The same, with the environment that finds it."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return s3_server
