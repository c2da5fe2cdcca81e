"""Fixtures that several tests share. Models are small, made on the spot or shipped; nothing touches a network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The models are tiny: a second thread costs more in waiting than it computes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def tiny_chat() -> str:
    """The shipped 2.75M-parameter chat model."""
    return str(ROOT / "demo" / "tiny-chat")
