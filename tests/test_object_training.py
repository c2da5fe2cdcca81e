"""Training, evaluating and decoding from a cache in an object store: the same as from one on a disk."""

import json
from pathlib import Path

import obstore
import pytest
from capture_fixtures import Recorder, capture_options, random_target, shipped_rows, write_jsonl
from s3_server import S3Server, folder_contents
from train_fixtures import Heard, stable_lines, tensor_files, train_cache
from train_fixtures import options as train_options

from capture.run import capture
from pipeline.evaluate import evaluate
from schemas.errors import CacheDamaged
from schemas.options import EvaluateOptions
from schemas.say import Silent
from train.run import train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("object-training")


@pytest.fixture(scope="module")
def target(folder: Path) -> str:
    return random_target(folder / "tiny")


@pytest.fixture(scope="module")
def data(folder: Path) -> str:
    return write_jsonl(folder / "rows.jsonl", shipped_rows(16))


@pytest.fixture(scope="module")
def local(folder: Path, target: str, data: str) -> dict[str, bytes]:
    """Every object of the same capture on a disk."""
    capture(capture_options(target, data, folder / "local", layers=(0, 2)), Recorder())
    return folder_contents(folder / "local")


@pytest.fixture(scope="module")
def trained_local(folder: Path) -> tuple[str, Path]:
    """A cache on a disk, and a run on it with checkpoints and evaluations."""
    path = train_cache(folder / "train")
    train(train_options(run={"steps": 6, "eval_every": 3}), path, str(folder / "run"), False, Silent())
    return path, folder / "run"


def test_training_and_evaluation_are_those_of_a_local_cache(
    s3: S3Server, folder: Path, trained_local: tuple[str, Path]
):
    path, run = trained_local
    url, remote = s3.upload(Path(path), "train/hs.zarr"), folder / "remote-run"
    train(train_options(run={"steps": 6, "eval_every": 3}), url, str(remote), False, Silent())
    assert tensor_files(remote) == tensor_files(run)
    assert stable_lines(remote) == stable_lines(run)
    assert json.loads((remote / "provenance.json").read_text())["cache"] == url
    figures = [
        evaluate(EvaluateOptions(draft=str(where), cache=cached, lengths=True), None, Heard())
        for where, cached in ((run, path), (remote, url))
    ]
    for each in figures:
        del each["draft"], each["cache"]
    assert figures[0] == figures[1]


def test_a_cache_that_is_damaged_is_refused_by_training(s3, folder, trained_local):
    url = s3.upload(Path(trained_local[0]), "train-damaged/hs.zarr")
    obstore.delete(s3.store("train-damaged/hs.zarr"), "hidden/2/c/1/0")
    with pytest.raises(CacheDamaged, match=f"{url}/hidden/2/c/1/0 is missing"):
        train(train_options(), url, str(folder / "refused"), False, Silent())
    assert not (folder / "refused").exists()


def test_decoding_with_the_prompts_of_a_remote_cache(s3, folder, target, local):
    """evaluate --target --cache: prompts and codec come from the cache, the tokenizer from the target."""
    url, run = s3.upload(folder / "local", "decoded/hs.zarr"), folder / "decoded-run"
    options = train_options(run={"steps": 2}, data={"batch_tokens": 600})
    train(options, url, str(run), False, Silent())
    figures = [
        evaluate(
            EvaluateOptions(draft=str(run), cache=cache, target=target, max_new_tokens=6, limit=2, lengths=True),
            None,
            Heard(),
        )
        for cache in (url, str(folder / "local"))
    ]
    for each in figures:
        for name in ("cache", "speedup", "seconds"):
            del each[name]
    assert figures[0] == figures[1]
    assert figures[0]["lossless"]["prompts"] == 2
