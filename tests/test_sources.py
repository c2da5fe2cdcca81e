"""`data.sources`: names that fit, samples as often as asked, the same whatever else is there, and a training on a part."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from train_fixtures import Heard, options, stable_lines, train_cache

from cache.read import open_cache
from schemas.errors import OptionError
from schemas.manifest import Source
from schemas.options import TrainOptions
from schemas.say import Silent
from schemas.strict import parse
from train.run import train
from train.setup import prepare
from train.sources import source_weights
from train.stream import Order, StreamState, repeats, stream, turns_of

FILES = ("data/gsm8k.jsonl", "data/chat.jsonl", "more/chat.jsonl")


def held(*paths: str) -> list[Source]:
    return [Source(path=path, sha256="a" * 64, rows=1, kept=1, skipped={}) for path in paths]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return train_cache(tmp_path_factory.mktemp("sources") / "hs.zarr", sources=("a.jsonl", "b.jsonl"))


@pytest.mark.parametrize(
    ("asked", "weights"),
    [
        ({"gsm8k.jsonl": 2.0}, {0: 2.0}),
        ({"gsm8k": 2.0, "1": 0.5}, {0: 2.0, 1: 0.5}),
        ({"more/chat.jsonl": 1.0}, {2: 1.0}),
        (None, None),
    ],
)
def test_a_source_is_named_by_path_file_or_number(asked: Any, weights: Any) -> None:
    assert source_weights(asked, held(*FILES)) == weights


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"wiki": 1.0}, r"no source 'wiki': choose among 0 \(data/gsm8k.jsonl\), 1 \(data/chat.jsonl\), 2 \(more/"),
        ({"3": 1.0}, "no source '3'"),
        ({"chat.jsonl": 1.0}, "'chat.jsonl' fits 2 sources: give the number or path"),
        ({"gsm8k": 1.0, "0": 2.0}, r"names source 0 \(data/gsm8k.jsonl\) twice"),
        ({}, "names none"),
    ],
)
def test_a_name_that_fits_none_or_several_is_refused(asked: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        source_weights(asked, held(*FILES))


def test_sources_are_weights_or_a_list() -> None:
    def read(value: Any) -> Any:
        return parse(TrainOptions, {"data": {"sources": value}}, "train", OptionError).data.sources

    assert read({"a.jsonl": 2, "b.jsonl": 0.5}) == {"a.jsonl": 2.0, "b.jsonl": 0.5}
    assert read({0: 2}) == {"0": 2.0} and read(["a", 1]) == {"a": 1.0, "1": 1.0}
    for wrong, message in ({"a": 0}, "greater than 0"), ({"a": "often"}, "valid number"), (["a", "a"], "twice"):
        with pytest.raises(OptionError, match=f"data.sources.*{message}"):
            read(wrong)


def weighted(weight_S: list[float], seed: int = 0, batch_tokens: int = 5) -> Order:
    size = len(weight_S)
    return Order(
        np.arange(size), np.ones(size, np.int64), np.arange(size) // 3, seed, 2, batch_tokens, np.array(weight_S)
    )


@given(st.lists(st.floats(0.01, 4), min_size=1, max_size=12), st.integers(0, 99), st.integers(0, 5))
def test_a_sample_runs_its_weights_whole_part_and_at_most_once_more(
    weights: list[float], seed: int, epoch: int
) -> None:
    counts = repeats(weighted(weights, seed), epoch)
    assert all(np.floor(weight) <= count <= np.ceil(weight) for weight, count in zip(weights, counts, strict=True))
    # What else there is does not matter: the same sample, the same count.
    alone = Order(np.array([len(weights) - 1]), np.ones(1), np.zeros(1), seed, 1, 5, np.array(weights[-1:]))
    assert repeats(alone, epoch).tolist() == counts[-1:].tolist()


def test_weights_are_expected_repetitions_per_epoch() -> None:
    order = weighted([2.0, 0.25, 1.5])
    counts = np.mean([repeats(order, epoch) for epoch in range(2000)], 0)
    assert counts[0] == 2 and counts[1:] == pytest.approx([0.25, 1.5], abs=0.05)


def test_the_stream_repeats_samples_and_numbers_their_turns() -> None:
    order = weighted([2.0, 1.0, 3.0, 0.5], batch_tokens=2)
    seen: list[tuple[int, int]] = []
    for micro in stream(order, StreamState(4)):
        assert len(micro.turns) == len(micro.rows)
        seen += zip(micro.rows, micro.turns, strict=True)
        if micro.last:
            break
    counts = Counter(row for row, _ in seen)
    assert counts[0] == 2 and counts[1] == 1 and counts[2] == 3 and counts[3] <= 1
    assert set(seen) == {(row, turn) for row, count in counts.items() for turn in range(count)}
    assert turns_of(np.array([7, 3, 7, 7, 3])).tolist() == [0, 0, 1, 2, 1]


def test_training_takes_the_samples_of_a_source_alone_and_evaluates_on_them(cache: str, tmp_path: Path) -> None:
    job = prepare(
        options(data={"sources": {"b.jsonl": 1.0}}, run={"eval_every": 2, "eval_share": 99}),
        cache,
        str(tmp_path / "r"),
        False,
        Silent(),
    )
    index = open_cache(cache).index
    train_rows = [
        r for r, s in enumerate(index["split"].to_pylist()) if s == "train" and index["source"][r].as_py() == 1
    ]
    assert job.order.row_S.tolist() == train_rows
    assert job.held_out.rows and all(index["source"][row].as_py() == 1 for row in job.held_out.rows)


def test_a_weighted_run_resumes_bit_for_bit(cache: str, tmp_path: Path) -> None:
    chosen = options(data={"sources": {"a.jsonl": 1.5, "1": 0.5}})
    train(chosen, cache, str(tmp_path / "whole"), False, Silent())
    heard = Heard({7: lambda: (_ for _ in ()).throw(KeyboardInterrupt)})
    with pytest.raises(KeyboardInterrupt):
        train(chosen, cache, str(tmp_path / "r"), False, heard)
    train(chosen, cache, str(tmp_path / "r"), True, Silent())
    assert stable_lines(tmp_path / "r") == stable_lines(tmp_path / "whole")


def test_weights_that_leave_no_sample_are_refused(cache: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"data.sources leaves 0.008 of 8 samples an epoch"):
        train(options(data={"sources": {"a.jsonl": 0.001}}), cache, str(tmp_path / "r"), False, Silent())
