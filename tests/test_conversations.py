"""Reading JSONL rows: hashes, limits, blank lines, both kinds of rows. test_hostile_data.py has malformed ones."""

import hashlib
import json
import re

import pytest
from capture_fixtures import talk, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

from capture.conversations import Given, parse_conversation
from capture.lines import BadRow, Line, read_lines, scan_files
from capture.prompts import parse_prompt, read_prompts


def test_lines_hashes_and_limits(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"x": 1}\r\n\n  \n{"x": 2}\n{"x": 3}')
    second = write_jsonl(tmp_path / "b.jsonl", [1, 2])
    (scan,) = scan_files((str(path),), None)
    assert (scan.rows, scan.sha256) == (3, hashlib.sha256(path.read_bytes()).hexdigest())
    lines = list(read_lines(scan))
    assert [(line.number, line.row, line.data) for line in lines] == [
        (1, 0, b'{"x": 1}'),
        (4, 1, b'{"x": 2}'),
        (5, 2, b'{"x": 3}'),
    ]
    assert lines[1].where == f"{path}:4"
    assert lines[1].sha256 == hashlib.sha256(b'{"x": 2}').hexdigest()
    assert [scan.rows for scan in scan_files((str(path), second), 4)] == [3, 1]
    limited = scan_files((str(path), second), 2)
    assert [scan.rows for scan in limited] == [2, 0]
    assert limited[0].sha256 == scan.sha256, "the file is the same file, however much of it is taken"
    assert [len(list(read_lines(scan))) for scan in limited] == [2, 0]


def parse_one(tmp_path, row):
    (scan,) = scan_files((write_jsonl(tmp_path / "one.jsonl", [row]),), None)
    return parse_conversation(next(read_lines(scan)))


def test_conversation_rows(tmp_path):
    conversation = parse_one(tmp_path, talk("Hi", "Hello", id=7, license="own"))
    assert (conversation.row_id, conversation.finished, conversation.given) == ("7", True, None)
    assert conversation.first_user == "Hi"
    own = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "tokenizer_sha256": "ab", "finished": False}
    conversation = parse_one(tmp_path, talk("Hi", "Hello", **own))
    assert (conversation.finished, conversation.given) == (False, Given([1, 2, 3], [0, 1, 1], "ab"))
    assert parse_one(tmp_path, {"messages": [{"role": "assistant", "content": "x"}]}).first_user is None


def test_prompt_rows(tmp_path):
    rows = [
        {"prompt": "one", "id": "p"},
        {"turns": ["a", "b"]},
        {"messages": [{"role": "system", "content": "s"}, *talk("u", "dropped", "v")["messages"]]},
    ]
    (scan,) = scan_files((write_jsonl(tmp_path / "prompts.jsonl", rows),), None)
    first, second, third = read_prompts(scan)
    assert (first.row_id, first.opening, first.turns) == ("p", [], ["one"])
    assert (second.row_id, second.turns) == (None, ["a", "b"])
    assert (third.opening, third.turns) == ([{"role": "system", "content": "s"}], ["u", "v"])
    assert third.first_messages() == [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert first.sample_id == hashlib.sha256(json.dumps(rows[0]).encode()).hexdigest()[:16] + "-0"


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)
keys = ("messages", "turns", "prompt", "id", "finished", "tools", "input_ids", "loss_mask", "tokenizer_sha256")


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(keys), anything, max_size=5) | anything, st.booleans())
def test_any_row_is_read_or_refused(row, valid_messages):
    if valid_messages and isinstance(row, dict):
        row["messages"] = talk("a", "b")["messages"]
    line = Line("f.jsonl", 4, 3, json.dumps(row).encode())
    for parse in (parse_conversation, parse_prompt):
        refusal = ""
        try:
            assert parse(line).line is line
        except BadRow as fault:
            refusal = str(fault)
        assert not refusal or re.fullmatch(r"f\.jsonl:4: .+", refusal)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_refused(data):
    with pytest.raises(BadRow, match=r"^f\.jsonl:4: "):
        parse_conversation(Line("f.jsonl", 4, 3, data))
