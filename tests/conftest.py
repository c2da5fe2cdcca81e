"""Fixtures that several tests share. Models are small, made on the spot or shipped; nothing touches a network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The models are tiny: a second thread costs more in waiting than it computes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from s3_server import S3Server, serve_s3

if TYPE_CHECKING:
    from crew_fixtures import CrewDriver
    from ranks_fixtures import RankDriver

ROOT = Path(__file__).resolve().parent.parent


# A file is run by one worker: begun last, one of these would keep the others waiting.
LONG = (
    "test_pipeline",
    "test_crew",
    "test_compiled",
    "test_object_cache",
    "test_runtime",
    "test_ranks_train",
    "test_sharded_target",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, all else in its order."""
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


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


@pytest.fixture(scope="session")
def rank_driver() -> "Iterator[RankDriver]":
    """The process that forks the ranks of trainings."""
    from ranks_fixtures import RankDriver

    driver = RankDriver()
    yield driver
    driver.close()


@pytest.fixture(scope="session")
def crew_driver() -> "Iterator[CrewDriver]":
    """The process that forks the processes of captures."""
    from crew_fixtures import CrewDriver

    driver = CrewDriver()
    yield driver
    driver.close()


@pytest.fixture(scope="session")
def uneven_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Training samples of which some have no anchor."""
    from ranks_fixtures import BARREN
    from train_fixtures import train_cache

    return train_cache(tmp_path_factory.mktemp("ranks") / "hs.zarr", masks={row: [0, 1] for row in BARREN})


@pytest.fixture(scope="session")
def by_one_rank(uneven_cache: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of each kind of draft a run by one rank, four micro-batches a step."""
    from ranks_fixtures import KINDS, chosen_for

    from schemas.say import Silent
    from train.run import train

    folder = tmp_path_factory.mktemp("alone")
    for kind in KINDS:
        train(chosen_for(kind, 4), uneven_cache, str(folder / kind), False, Silent())
    return {kind: folder / kind for kind in KINDS}
