"""Samples: masks of multi-turn conversations, ids that came along, cutting, the split, reasons for leaving rows out."""

import hashlib
import threading

import numpy as np
import pytest
from capture_fixtures import THINKING_TEMPLATE, copy_tokenizer, shipped_rows, talk, write_jsonl

from capture import samples as samples_module
from capture.lines import read_lines, scan_files
from capture.pieces import join_turns
from capture.samples import NOTHING_SUPERVISED, TOO_SHORT, SampleRules, samples_of, split_side
from target.chat import encode_texts, open_chat, prompt_ids
from target.load import TargetRef, resolve_target

RULES = SampleRules("tok", 2048, 256, 0.5)


@pytest.fixture(scope="session")
def chat(tiny_chat):
    return open_chat(resolve_target(tiny_chat))


def results(chat, tmp_path, rows, rules=RULES):
    (scan,) = scan_files((write_jsonl(tmp_path / "rows.jsonl", rows),), None)
    return list(samples_of(chat, read_lines(scan), rules))


def naive_mask(tokenizer, messages, finished):
    """Ids and mask piece by piece, message by message: an independent reading of the template."""
    ids, mask = [], []
    for number, message in enumerate(messages):
        own = message["role"] == "assistant"
        pieces = [(f"<|im_start|>{message['role']}\n", 0), (message["content"] + "<|im_end|>", int(own)), ("\n", 0)]
        for text, supervised in pieces:
            if number == len(messages) - 1 and text == "\n":
                continue
            if number == len(messages) - 1 and not finished:
                text = text.removesuffix("<|im_end|>")
            piece = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += piece
            mask += [supervised] * len(piece)
    return ids, mask


def test_shipped_conversations_against_a_naive_reading(chat, tmp_path):
    rows = shipped_rows(60)
    rows += [
        talk("What is it?", "It is tea.", "Sure?", "Quite sure.", finished=False),
        talk("A", "B c", "D", "E f", "G", "H i"),
    ]
    for row, result in zip(rows, results(chat, tmp_path, rows), strict=True):
        (sample,) = result.samples
        ids, mask = naive_mask(chat.tokenizer, row["messages"], row.get("finished", True))
        assert sample.input_ids.tolist() == ids
        assert sample.loss_mask.tolist() == mask
        assert sample.sample_id.endswith("-0")
        assert sample.tokens_sha256 == hashlib.sha256(np.array(ids, "<i4").tobytes() + bytes(mask)).hexdigest()


def test_templates_that_rewrite_turns_give_a_sample_per_turn(tmp_path):
    copy_tokenizer(tmp_path / "t", THINKING_TEMPLATE)
    chat = open_chat(TargetRef("t", "local-0", tmp_path / "t", str(tmp_path / "t")))
    row = talk("Hi", "<think>\nhm\n</think>\n\nHello", "And?", "That is all")
    (result,) = results(chat, tmp_path, [row])
    first, second = result.samples
    assert [sample.sample_id[-2:] for sample in result.samples] == ["-0", "-1"]
    texts = [chat.tokenizer.decode(sample.input_ids[sample.loss_mask == 1]) for sample in result.samples]
    assert texts == ["<think>\nhm\n</think>\n\nHello<|im_end|>", "That is all<|im_end|>"]
    # Before the second answer stands what the target is given then: the first answer without its reasoning.
    given = prompt_ids(chat, row["messages"][:3])
    inserted = encode_texts(chat.tokenizer, ["<think>\n\n</think>\n\n"])[0]
    assert second.input_ids[second.loss_mask == 0].tolist() == given + inserted
    assert first.split == second.split


def test_join_turns():
    assert join_turns([([1, 2], [3]), ([1, 2, 3, 4], [5, 6])]) == [(0, [1, 2, 3, 4, 5, 6], [0, 0, 1, 0, 1, 1])]
    assert join_turns([([1, 2], [3]), ([1, 9], [5])]) == [(0, [1, 2, 3], [0, 0, 1]), (1, [1, 9, 5], [0, 0, 1])]
    assert join_turns([([1], [2]), ([8], [3]), ([8, 3], [4])]) == [(0, [1, 2], [0, 1]), (1, [8, 3, 4], [0, 1, 1])]


def test_given_ids_are_taken_as_they_are(chat, tmp_path):
    own = {"input_ids": [9, 8, 7, 6], "loss_mask": [0, 0, 1, 1], "tokenizer_sha256": "tok"}
    other = {**own, "tokenizer_sha256": "another"}
    first, second = results(chat, tmp_path, [talk("Hi", "Hello", **own), talk("Hi", "Hello", **other)])
    assert first.samples[0].input_ids.tolist() == [9, 8, 7, 6]
    assert first.samples[0].loss_mask.tolist() == [0, 0, 1, 1]
    assert not first.retokenised
    assert second.retokenised
    assert second.samples[0].input_ids.tolist() == naive_mask(chat.tokenizer, talk("Hi", "Hello")["messages"], True)[0]


def test_cutting_and_reasons(chat, tmp_path):
    ids = {"input_ids": list(range(10, 20)), "tokenizer_sha256": "tok"}
    rows = [
        talk("a", "b", **ids, loss_mask=[0, 0, 0, 1, 1, 1, 1, 1, 1, 1]),
        talk("a", "b", **ids, loss_mask=[0, 0, 0, 0, 0, 0, 0, 1, 1, 1]),
        talk("a", "b", **ids, loss_mask=[0, 0, 0, 0, 0, 0, 0, 0, 0, 1]),
        talk("a", "b", **ids, loss_mask=[0, 0, 0, 0, 0, 1, 1, 1, 1, 1]),
        talk("a", "b", **ids, loss_mask=[0] * 10),
    ]
    cut, late, short, one_left, none = results(chat, tmp_path, rows, SampleRules("tok", 2048, 6, 0.5))
    (sample,) = cut.samples
    assert (sample.truncated, sample.input_ids.tolist(), sample.loss_mask.tolist()) == (
        True,
        [10, 11, 12, 13, 14, 15],
        [0, 0, 0, 1, 1, 1],
    )
    assert [result.skipped for result in (cut, late, short, one_left, none)] == [
        None,
        NOTHING_SUPERVISED,
        TOO_SHORT,
        TOO_SHORT,
        TOO_SHORT,
    ]


def test_split_is_by_the_first_user_message():
    fraction = int.from_bytes(hashlib.sha256(b"Hi").digest()[:8], "big") / 2**64
    assert split_side("Hi", [1], fraction * 1.0001) == "val"
    assert split_side("Hi", [2], fraction) == "train"
    assert split_side("Hi", [1], 0.0) == "train"
    by_ids = int.from_bytes(hashlib.sha256(np.array([5, 6], "<i4").tobytes()).digest()[:8], "big") / 2**64
    assert split_side(None, [5, 6], by_ids * 1.0001) == "val"
    assert split_side(None, [5, 6], by_ids) == "train"


def test_split_share_is_the_fraction():
    sides = [split_side(f"prompt {i}", [], 0.1) for i in range(4000)]
    assert 330 < sides.count("val") < 470


def test_bad_rows_are_counted_where_asked(chat, tmp_path):
    rows = [talk("a", "b c d"), {"messages": []}, talk("only a question"), talk("a", "x<|im_end|>y")]
    rules = SampleRules("tok", 2048, 256, 0.5, skip_bad_rows=True)
    assert [result.skipped for result in results(chat, tmp_path, rows, rules)] == [
        None,
        "bad line",
        "no assistant turn",
        "end of turn",
    ]


def test_groups_are_tokenised_side_by_side_few_at_a_time_and_in_order(chat, tmp_path, monkeypatch):
    rows = [talk(f"say {row}", f"it is {row}") for row in range(60)]
    plain = results(chat, tmp_path, rows)
    monkeypatch.setattr(samples_module, "GROUP_ROWS", 4)
    together, encode, begun, ended = threading.Barrier(2), samples_module.encode_talks, [], []

    def encode_two(*arguments):
        begun.append(len(ended))
        together.wait(60)  # broken, and so an error, if a second one does not come
        return encode(*arguments)

    monkeypatch.setattr(samples_module, "encode_talks", encode_two)
    for (scan,) in [scan_files((write_jsonl(tmp_path / "rows.jsonl", rows[:56]),), None)]:
        for place, result in enumerate(samples_of(chat, read_lines(scan), RULES)):
            ended.append(result)
            assert np.array_equal(result.samples[0].input_ids, plain[place].samples[0].input_ids)
            assert result.samples[0].source_row == place
    assert len(ended) == 56
    assert all(4 * number - done <= 3 * 4 for number, done in enumerate(begun)), "at most three groups are on their way"


def test_a_group_ends_before_it_holds_too_much_text(chat, tmp_path, monkeypatch):
    rows = [talk(f"say {row}", "long " * 200) for row in range(9)]
    plain = results(chat, tmp_path, rows)
    monkeypatch.setattr(samples_module, "GROUP_BYTES", 2500)
    sizes, encode = [], samples_module.encode_talks
    monkeypatch.setattr(
        samples_module, "encode_talks", lambda chat, talks: sizes.append(len(talks)) or encode(chat, talks)
    )
    again = results(chat, tmp_path, rows)
    assert sizes == [3, 3, 3]
    assert [r.samples[0].tokens_sha256 for r in again] == [r.samples[0].tokens_sha256 for r in plain]


def test_a_tokenizer_of_its_own_is_asked_by_one_thread_at_a_time(chat, tmp_path, monkeypatch):
    monkeypatch.setattr(samples_module, "GROUP_ROWS", 2)
    monkeypatch.setattr(samples_module, "encodes_side_by_side", lambda _: False)
    busy, encode = threading.Lock(), samples_module.encode_talks

    def alone(*arguments):
        assert busy.acquire(blocking=False)
        try:
            return encode(*arguments)
        finally:
            busy.release()

    monkeypatch.setattr(samples_module, "encode_talks", alone)
    assert len(results(chat, tmp_path, shipped_rows(30))) == 30
