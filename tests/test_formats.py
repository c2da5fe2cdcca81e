"""Every format and container of data: one conversation gives the same tokens whichever way it is written down."""

import hashlib
import json
import sys
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from capture_fixtures import Recorder, capture_options, random_target, shipped_rows, talk, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st
from template_fixtures import LLAMA31, MISTRAL, PHI4, QWEN3, family_chat

from capture.containers import compact, container_of
from capture.lines import BadRow, Line, read_lines, scan_files
from capture.run import capture, dry_run
from capture.samples import SampleRules, samples_of
from schemas.errors import CacheError, DataError
from target.chat import encode_texts, open_chat, render
from target.load import resolve_target
from target.tokens import tokenizer_sha256

RULES = SampleRules("tok", 2048, 256, 0.5)
TEXTS = ("What is tea?", "A drink.", "Hot?", "Mostly.")
ROLES = ("human", "gpt", "human", "gpt")


@pytest.fixture(scope="session")
def chat(tiny_chat):
    return open_chat(resolve_target(tiny_chat))


def result_of(chat, row, **rules):
    line = Line("f.jsonl", 1, 0, json.dumps(row).encode())
    (result,) = samples_of(chat, [line], SampleRules("tok", 1 << 20, 4096, 0.5, **rules))
    return result


def tokens(chat, row, **rules):
    found = result_of(chat, row, **rules).samples
    return [(sample.input_ids.tolist(), sample.loss_mask.tolist(), sample.split) for sample in found]


def sharegpt(messages):
    names = {"user": "human", "assistant": "gpt", "system": "system", "tool": "tool"}
    return {"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in messages]}


short_texts = st.lists(
    st.text(st.characters(codec="utf-8", exclude_characters="<"), min_size=1, max_size=12), min_size=2, max_size=6
)


@settings(max_examples=40, deadline=None)
@given(short_texts, st.booleans())
def test_both_schemas_give_the_same_tokens(chat, texts, system):
    messages = [{"role": "system", "content": "Be brief."}] * system + talk(*texts[: len(texts) // 2 * 2])["messages"]
    assert tokens(chat, {"messages": messages}) == tokens(chat, sharegpt(messages))


def test_every_way_to_write_a_conversation(chat):
    messages = talk(*TEXTS)["messages"]
    wanted = tokens(chat, {"messages": messages})
    (ids, mask, _) = wanted[0]
    parts = [
        {"role": m["role"], "content": [{"type": "text", "text": t} for t in (m["content"][:3], m["content"][3:])]}
        for m in messages
    ]
    ways = [
        sharegpt(messages),
        {"conversations": messages},
        {"messages": parts},
        {"messages": json.dumps(messages)},
        {"messages": [{**m, "name": None, "tool_calls": None} for m in messages]},
        {"prompt": messages[:3], "completion": messages[3:]},
    ]
    for row in ways[:-1]:
        assert tokens(chat, row) == wanted, row
    assert tokens(chat, ways[-1]) == wanted
    one = talk(*TEXTS[:2])["messages"]
    for row in ({"prompt": TEXTS[0], "response": TEXTS[1]}, {"prompt": TEXTS[0], "completion": TEXTS[1]}):
        assert tokens(chat, row) == tokens(chat, {"messages": one})
    system = [{"role": "system", "content": "Be brief."}, *one]
    for row in (
        {"prompt": TEXTS[0], "response": TEXTS[1], "system": "Be brief."},
        {**sharegpt(one), "system": "Be brief."},
    ):
        assert tokens(chat, row) == tokens(chat, {"messages": system})
    for row in (
        {"input_ids": ids, "loss_mask": mask},
        {"input_ids": ids, "loss_mask": mask, "tokenizer_sha256": "tok"},
    ):
        assert [sample[:2] for sample in tokens(chat, row)] == [(ids, mask)]
    assert result_of(chat, {"input_ids": ids, "loss_mask": mask}).unnamed
    ((given_ids, given_mask, _),) = tokens(chat, {"input_ids": [5, 6, 7, 8], "prompt_length": 1})
    assert (given_ids, given_mask) == ([5, 6, 7, 8], [0, 1, 1, 1])


def test_a_rendered_text_is_read_by_the_templates_marks(chat, tmp_path):
    chats = [chat] + [family_chat(family, tmp_path / str(i)) for i, family in enumerate((LLAMA31, PHI4, MISTRAL))]
    for target in chats:
        messages = talk(*TEXTS)["messages"]
        wanted = [sample[:2] for sample in tokens(target, {"messages": messages})]
        text = render(target, messages, False).rstrip("\n")
        assert [sample[:2] for sample in tokens(target, {"text": text})] == wanted
        bos = target.tokenizer.bos_token
        if bos and text.startswith(bos) and target.tokenizer("x")["input_ids"][0] == target.tokenizer.bos_token_id:
            assert [sample[:2] for sample in tokens(target, {"text": text.removeprefix(bos)})] == wanted
    thinking = family_chat(QWEN3, tmp_path / "qwen3")
    text = render(thinking, talk("Hi", "Hello")["messages"], False).rstrip("\n")
    assert [s[:2] for s in tokens(thinking, {"text": text})] == [s[:2] for s in tokens(thinking, talk("Hi", "Hello"))]
    assert not result_of(chat, {"text": text}).plain


def test_a_plain_text_is_supervised_but_for_its_first_token(chat):
    text = "The kettle sings, and the tea is ready."
    result = result_of(chat, {"text": text})
    (sample,) = result.samples
    assert result.plain
    assert sample.input_ids.tolist() == encode_texts(chat.tokenizer, [text])[0]
    assert sample.loss_mask.tolist() == [0] + [1] * (len(sample.input_ids) - 1)
    sides = [tokens(chat, {"text": f"The {word} sings."})[0][2] for word in "abcdefghijkl"]
    assert set(sides) == {"train", "val"}, "texts that begin alike do not all fall to one side"


def test_the_format_asked_for_overrides_the_columns(chat):
    row = {**talk(*TEXTS[:2]), "text": "plain text, as it is", "input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}
    assert result_of(chat, row, format="text").plain
    assert tokens(chat, row, format="tokens")[0][:2] == ([5, 6, 7], [0, 1, 1])
    with pytest.raises(BadRow, match=r"input_ids without tokenizer_sha256 .* --format tokens"):
        result_of(chat, row)
    with pytest.raises(BadRow, match=r"no `conversations`, which --format sharegpt asks for"):
        result_of(chat, row, format="sharegpt")


def tool_rows():
    call = {"id": "1", "type": "function", "function": {"name": "get", "arguments": '{"city": "Rome"}'}}
    spoken = [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    return [
        {
            "id": "a",
            "messages": [*spoken, {"role": "tool", "content": "sunny"}, {"role": "assistant", "content": "Sunny."}],
        },
        {"id": "b", **talk(*TEXTS)},
    ]


def test_every_container_gives_the_same_samples(tmp_path, monkeypatch):
    chat = family_chat(QWEN3, tmp_path / "target")
    rows = [*tool_rows(), *(({"id": f"c{i}", **talk(f"Say {i}.", f"It is {i}.")}) for i in range(5))]
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "a.jsonl", rows)
    write_jsonl(tmp_path / "data" / "b.json", rows)  # one object a line under the name .json
    (tmp_path / "data" / "c.json").write_text(json.dumps(rows, indent=1))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data" / "d.parquet", row_group_size=2)
    (tmp_path / "data" / "README.md").write_text("not data")
    (tmp_path / "one.json").write_text(json.dumps(rows[1], indent=1))
    scans = scan_files((str(tmp_path / "data"),), None)
    assert [(scan.shown[-9:], scan.rows) for scan in scans] == [
        ("a/a.jsonl", 7),
        ("ta/b.json", 7),
        ("ta/c.json", 7),
        ("d.parquet", 7),
    ]
    assert [scan.container for scan in scans] == ["lines", "lines", "json", "parquet"]
    for scan in scans:
        data = (tmp_path / "data" / scan.shown.rpartition("/")[2]).read_bytes()
        assert scan.sha256 == hashlib.sha256(data).hexdigest()

    def told(scan):
        return [
            (sample.row_id, sample.input_ids.tolist(), sample.loss_mask.tolist(), sample.source_row, sample.split)
            for result in samples_of(chat, read_lines(scan), SampleRules("t", 1 << 20, 4096, 0.5))
            for sample in result.samples
        ]

    wanted = told(scans[0])
    assert len(wanted) >= 8
    for scan in scans[1:]:
        assert told(scan) == wanted, scan.shown
    (one,) = scan_files((str(tmp_path / "one.json"),), None)
    assert (one.container, told(one)[0][1:3]) == ("json", wanted[2][1:3])
    lines = [list(read_lines(scan)) for scan in scans]
    assert lines[0][1].sha256 == hashlib.sha256(json.dumps(rows[1]).encode()).hexdigest(), "JSONL: the line's bytes"
    assert lines[2][1].sha256 == hashlib.sha256(compact(rows[1])).hexdigest(), "else: the row's compact JSON"
    assert (lines[2][1].where, lines[3][1].where) == (f"{scans[2].shown}:2", f"{scans[3].shown}:2")
    assert [len(list(read_lines(scan))) for scan in scan_files((str(tmp_path / "data"),), 9)] == [7, 2, 0, 0]


def test_data_sets_of_the_datasets_package(tmp_path, monkeypatch):
    rows = [{"id": "a", **talk(*TEXTS)}, {"id": "b", **talk("Hi", "Hello there."), "tools": None}]
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "state.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    for name in (str(folder), "somebody/chats"):
        assert container_of(name) == "dataset"
        with pytest.raises(DataError, match=r"needs the extra `datasets`: pip install 'dflash-pipeline\[datasets\]'"):
            scan_files((name,), None)
    asked = []

    def load(name):
        asked.append(name)
        if name == "somebody/broken":
            raise RuntimeError("no such data set\nat all")
        return rows if name == str(folder) else {"train": rows, "test": rows[:1]}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_from_disk=load, load_dataset=load))
    scans = [scan_files((name,), None)[0] for name in (str(folder), "somebody/chats", "somebody/chats:test")]
    assert [scan.rows for scan in scans] == [2, 2, 1]
    assert scans[0].sha256 == scans[1].sha256 != scans[2].sha256
    assert set(asked) == {str(folder), "somebody/chats"}
    assert [line.where for line in read_lines(scans[1])] == ["somebody/chats:1", "somebody/chats:2"]
    with pytest.raises(DataError, match="no split 'dev'; give one of its own as NAME:SPLIT: train, test"):
        scan_files(("somebody/chats:dev",), None)
    with pytest.raises(
        DataError, match=r"somebody/broken: `datasets` does not give it \(RuntimeError: no such data set\)"
    ):
        scan_files(("somebody/broken",), None)


def test_data_that_does_not_say_who_wrote_it_is_warned_of(tiny_chat, tmp_path):
    own = {
        "input_ids": [9, 8, 7, 6],
        "loss_mask": [0, 0, 1, 1],
        "tokenizer_sha256": tokenizer_sha256(resolve_target(tiny_chat)),
        "target": "tiny-chat",
    }
    rows = [
        talk("Hi", "Hello there.", **own),
        talk("Hi", "And hello to you."),
        talk("Ho", "Good day.", target="another"),
    ]
    for count, warned in ((3, "2 of 3 rows do not say that tiny-chat wrote their answers"), (1, None)):
        say = Recorder()
        dry_run(capture_options(tiny_chat, write_jsonl(tmp_path / "rows.jsonl", rows[:count]), tmp_path / "hs"), say)
        found = [warning for warning in say.warnings if "wrote their answers" in warning]
        assert [warning.startswith(warned) for warning in found] == ([True] if warned else [])


def test_going_on_with_rows_read_otherwise_is_refused(tmp_path):
    target = random_target(tmp_path / "tiny")
    data = write_jsonl(tmp_path / "rows.jsonl", shipped_rows(6))
    options = capture_options(target, data, tmp_path / "hs", layers=(1,))
    manifest = capture(options, Recorder())
    assert (manifest.record["format"], manifest.record["reasoning"]) == ("auto", "keep")
    for name, value in (("reasoning", "mask"), ("format", "messages")):
        with pytest.raises(CacheError, match=f"was captured with {name} '.*', this command asks for '{value}'"):
            capture(options.model_copy(update={name: value}), Recorder())
    say = Recorder()
    capture(options, say)
    assert "nothing to do" in say.notes[-1]


def test_the_table_of_reasons_is_in_the_manifest(tmp_path):
    target = random_target(tmp_path / "tiny")
    data = write_jsonl(
        tmp_path / "rows.jsonl", [*shipped_rows(3), talk("no answer"), talk("none either"), talk("x", " ")]
    )
    manifest = capture(capture_options(target, data, tmp_path / "hs", layers=(1,)), Recorder())
    (source,) = manifest.sources
    assert (source.rows, source.kept, source.skipped) == (6, 3, {"empty content": 1, "no assistant turn": 2})
    first = manifest.record["first_skipped"]
    assert f"no assistant turn: {data}:4: " in first and f"empty content: {data}:6: " in first
