"""`dflash preview`: what it shows, on a terminal and in a log, with the tokenizer alone."""

import re
import shutil
import signal
from itertools import pairwise

import numpy as np
import pytest
from capture_fixtures import ROOT, copy_tokenizer, talk, write_jsonl
from hypothesis import given
from hypothesis import strategies as st
from template_fixtures import LLAMA31, family_chat

from capture.samples import Sample
from pipeline.cli import main
from pipeline.preview import histogram, sample_text, spread, visible


@pytest.fixture(scope="module")
def bare_target(tmp_path_factory):
    """A target without weights."""
    folder = tmp_path_factory.mktemp("target") / "bare"
    copy_tokenizer(folder)
    shutil.copy(ROOT / "demo" / "tiny-chat" / "config.json", folder)
    return str(folder)


@pytest.fixture
def run(monkeypatch, capsys):
    """The command line, in this process: (exit code, stdout, stderr)."""

    def run(*words, **environment):
        with monkeypatch.context() as patch:
            patch.setenv("COLUMNS", "80")
            for name in ("FORCE_COLOR", "NO_COLOR"):
                patch.delenv(name, raising=False)
            for name, value in environment.items():
                patch.setenv(name, value)
            patch.setattr(signal, "signal", lambda *_: None)
            with pytest.raises(SystemExit) as ended:
                main(words)
        return ended.value.code, *capsys.readouterr()

    return run


def test_preview_needs_no_weights(bare_target, tmp_path, run):
    rows = [
        talk("Hi", "Hello there."),
        talk("Hi", "Hello there."),
        talk("And?", "So it is.", "Why?", "It just is."),
        talk("alone"),
    ]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    code, out, err = run(
        "preview",
        "--target",
        bare_target,
        "--data",
        data,
        "--layers",
        "1,2",
        "--shard-tokens",
        "8192",
        "--samples",
        "9",
    )
    assert code == 0, err
    assert "<|im_start|>assistant\n⟦Hello there.<|im_end|>⟧" in out
    assert out.count("supervised text stands in ⟦ ⟧") == 2
    assert "⟦So it is.<|im_end|>⟧" in out and "⟦It just is.<|im_end|>⟧" in out
    assert f"{data}: 4 rows, 2 kept, 1 duplicate, 1 no assistant turn" in out
    assert f"first duplicate: {data}:2" in out
    assert f"first no assistant turn: {data}:4: " in out
    assert "1, 2 of 6" in out
    assert "\x1b" not in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"]
    # The size is capture's: whole shards.
    _, dry, _ = run(
        "capture",
        "--target",
        bare_target,
        "--data",
        data,
        "--layers",
        "1,2",
        "--shard-tokens",
        "8192",
        "--dry-run",
        "--out",
        str(tmp_path / "hs"),
    )
    line = re.search(r"^  bytes .*$", out, re.M)
    assert line is not None and line[0].split() == re.search(r"^  bytes .*$", dry, re.M)[0].split()


def test_colour_on_a_terminal_and_brackets_without(bare_target, tmp_path, run):
    data = write_jsonl(tmp_path / "rows.jsonl", [talk("Hi", "Hello there.")])
    words = ("preview", "--target", bare_target, "--data", data, "--layers", "1")
    coloured = run(*words, FORCE_COLOR="1", TERM="xterm-256color")[1]
    assert re.search(r"\x1b\[[0-9;]*32m?[0-9;]*m?Hello there\.", coloured)
    assert "⟦Hello" not in coloured and "supervised text is green" in coloured
    plain = run(*words, FORCE_COLOR="1", TERM="xterm-256color", NO_COLOR="1")[1]
    assert "⟦Hello there.<|im_end|>⟧" in plain and "\x1b[32" not in plain


def test_mistakes_are_capture_s(bare_target, tmp_path, run):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"messages": [\n')
    code, out, err = run("preview", "--target", bare_target, "--data", str(bad))
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"error: {bad}:1: not valid JSON")
    code, _, err = run("preview", "--target", bare_target, "--data", str(bad), "--format", "alpaca")
    assert code == 2 and "--format: " in err


def sample_of(ids, mask):
    return Sample("0-0", None, np.array(ids, dtype=np.int32), np.array(mask, dtype=np.uint8), False, "train", 0, "")


def test_a_character_of_several_tokens_is_shown_whole(tmp_path):
    tokenizer = family_chat(LLAMA31, tmp_path).tokenizer
    ids = tokenizer("tea 🍵 time<|eot_id|>", add_special_tokens=False)["input_ids"]
    shown = sample_text(tokenizer, sample_of([0, *ids], [0] + [1] * len(ids)), False).plain
    assert shown.splitlines()[1:] == ["<|begin_of_text|>⟦tea 🍵 time<|eot_id|>⟧"]
    styled = sample_text(tokenizer, sample_of([0, *ids], [0] + [1] * len(ids)), True)
    green = [
        styled.plain[span.start : span.end]
        for span in styled.spans
        if getattr(span.style, "color", None) and span.style.color.name == "green"
    ]
    assert green == ["tea 🍵 time", "<|eot_id|>"]


def test_control_characters_cannot_reach_the_terminal():
    assert visible("a\x1b[2Jb\x00\r\tc\n") == "a\\x1b[2Jb\\x00\\x0d\tc\n"


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60))
def test_a_histogram_counts_every_value_once(values):
    lines = histogram(np.array(values))
    counts = [int(line.split()[-1].replace(",", "")) for line in lines]
    assert sum(counts) == len(values)
    edges = [
        tuple(int(n.replace(",", "")) for n in re.match(r"\s*([\d,]+) to\s+([\d,]+)", line).groups()) for line in lines
    ]
    for (first, last), count in zip(edges, counts, strict=True):
        assert count == sum(first <= value <= last for value in values)
    assert all(after[0] == before[1] + 1 for before, after in pairwise(edges))


def test_shown_samples_are_spread_over_the_data():
    assert spread(range(10), 3) == [0, 3, 6]
    assert spread(range(2), 5) == [0, 1]
    assert spread([], 2) == []
