"""Sampled answers: the draw against a naive loop, and a seed of its own for every answer."""

import json

import pytest
import torch
from capture_fixtures import ROOT, Recorder
from hypothesis import given, settings
from hypothesis import strategies as st

from capture import regenerate as module
from capture.generate import Sampling, draw
from capture.regenerate import regenerate
from schemas.errors import DataError
from schemas.options import RegenerateOptions

PROMPTS = ROOT / "demo" / "prompts.jsonl"


def naive_draw(logits: list[float], uniform: float, temperature: float, top_p: float) -> int:
    peak = max(logits)
    weights = [torch.tensor((x - peak) / temperature, dtype=torch.float64).exp().item() for x in logits]
    order = sorted(range(len(logits)), key=lambda i: -weights[i])
    total, kept, held = sum(weights), [], 0.0
    for i in order:
        kept.append(i)
        held += weights[i] / total
        if held >= top_p:
            break
    passed, mark = 0.0, uniform * held
    for i in kept:
        passed += weights[i] / total
        if passed > mark:
            return i
    return kept[-1]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(-40, 40), min_size=2, max_size=12, unique=True),
    st.floats(0, 0.9999),
    st.sampled_from([0.3, 1.0, 2.0]),
    st.sampled_from([0.1, 0.55, 0.93, 1.0]),
)
def test_the_draw_is_the_naive_one(tenths, uniform, temperature, top_p):
    logits = [x / 10 for x in tenths]
    drawn = draw(
        torch.tensor([logits, logits[::-1]], dtype=torch.float64),
        torch.tensor([uniform, uniform], dtype=torch.float64),
        Sampling(temperature, top_p, 0),
    ).tolist()
    wanted = naive_draw(logits, uniform, temperature, top_p)
    assert drawn == [wanted, len(logits) - 1 - wanted]


def test_draws_fall_as_the_probabilities():
    logits = torch.log(torch.tensor([0.5, 0.25, 0.125, 0.125])).repeat(4000, 1)
    uniform = (torch.arange(4000) + 0.5) / 4000
    counts = torch.bincount(draw(logits, uniform.double(), Sampling(1.0, 1.0, 0)), minlength=4)
    assert counts.tolist() == [2000, 1000, 500, 500]
    counts = torch.bincount(draw(logits, uniform.double(), Sampling(1.0, 0.7, 0)), minlength=4)
    assert [round(count / 4000, 2) for count in counts.tolist()] == [0.67, 0.33, 0, 0]


def options(tiny_chat, out, **changes):
    small = {"max_new_tokens": 16, "dtype": "float32", "device": "cpu", "limit": 10, "temperature": 0.9, "top_p": 0.9}
    return RegenerateOptions(target=tiny_chat, prompts=str(PROMPTS), out=str(out), **{**small, **changes})


def answers(path):
    return [row["input_ids"] for row in map(json.loads, path.read_text().splitlines())]


def test_an_answer_depends_on_seed_row_and_turn_alone(tiny_chat, tmp_path):
    ways = {"whole": {}, "alone": {"batch_tokens": 1}, "other": {"seed": 1}, "greedy": {"temperature": 0.0}}
    found = {}
    for name, changes in ways.items():
        out = tmp_path / f"{name}.jsonl"
        regenerate(options(tiny_chat, out, **changes), Recorder())
        found[name] = answers(out)
    assert found["whole"] == found["alone"]
    assert found["whole"] != found["other"]
    assert found["whole"] != found["greedy"]
    with pytest.raises(DataError, match=r"was made with temperature 0\.9, this command asks for None"):
        regenerate(options(tiny_chat, tmp_path / "whole.jsonl", temperature=0.0), Recorder())
    with pytest.raises(DataError, match="was made with seed 0, this command asks for 3"):
        regenerate(options(tiny_chat, tmp_path / "whole.jsonl", seed=3), Recorder())
    regenerate(options(tiny_chat, tmp_path / "narrow.jsonl", top_p=1e-9), Recorder())
    assert answers(tmp_path / "narrow.jsonl") == found["greedy"], "only the likeliest token is left"


class StoppedError(Exception):
    pass


def test_a_sampled_run_goes_on_as_if_never_stopped(tiny_chat, tmp_path, monkeypatch):
    regenerate(options(tiny_chat, tmp_path / "whole.jsonl", batch_tokens=200), Recorder())
    out, add, added = tmp_path / "stopped.jsonl", module.add_batch, []

    def stop(*args):
        if added:
            raise StoppedError
        added.append(args)
        add(*args)

    with monkeypatch.context() as patch:
        patch.setattr(module, "add_batch", stop)
        with pytest.raises(StoppedError):
            regenerate(options(tiny_chat, out, batch_tokens=200), Recorder())
    regenerate(options(tiny_chat, out, batch_tokens=200), Recorder())
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
