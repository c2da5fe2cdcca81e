"""The ids of turns: the same however their texts are cut before they are tokenised, whatever end tokens they spell."""

import gc
import json
from dataclasses import replace

import pytest
from capture_fixtures import talk, write_jsonl
from conversation_fixtures import chat_of, samples
from hypothesis import given, settings
from hypothesis import strategies as st
from template_fixtures import GPT_OSS, LLAMA31, MISTRAL, PHI4, QWEN3, SMOLLM2
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from capture.lines import read_lines, scan_files
from capture.pieces import join_steps, join_turns
from capture.samples import SampleRules, samples_of
from target import steps as module
from target.chat import Turn, encode_texts, open_chat
from target.load import TargetRef
from target.steps import encode_talks, encode_turns, whole_turns
from target.turns import split_turns

END = {PHI4: "<|im_end|>", SMOLLM2: "<|im_end|>", LLAMA31: "<|eot_id|>"}
parts = st.sampled_from(
    ["a", " b", "\n", " ", "é", "12", "END", "<|endoftext|>", "<|eom_id|>", "<|im_start|>", "<|", ""]
)
texts = st.lists(st.lists(parts, min_size=1, max_size=4).map("".join), min_size=2, max_size=8)


def naive(chat, turns):
    """Each turn by itself; behind an answer that reads the same as one text with its context, by the ids of that text."""
    return [
        (encode_texts(chat.tokenizer, [turn.context])[0], encode_texts(chat.tokenizer, [turn.answer])[0])
        for turn in turns
    ]


@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("family", [PHI4, SMOLLM2, LLAMA31])
@given(texts)
def test_contexts_and_answers_have_the_ids_that_they_have_by_themselves(family, said):
    chat = chat_of(family)
    assert chat.ends_exactly and chat.splits_anywhere
    end, turns, whole = END[family], [], ""
    for number, text in enumerate(text.replace("END", end) for text in said):
        if number % 2 == 0:
            context = whole + f"user{text}{end}\nassistant\n"
        else:
            turns.append(Turn(context, text + end, True))
            whole = context + text + end
    assert encode_turns(chat, turns) == encode_turns(replace(chat, ends_exactly=False), turns) == naive(chat, turns)


@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("family", [QWEN3, GPT_OSS, MISTRAL])
@given(texts)
def test_a_context_that_begins_as_an_earlier_one_has_the_ids_that_it_has_by_itself(family, said):
    """Whatever two contexts share: each of these is the one before it, cut anywhere, and something else."""
    chat = chat_of(family)
    turns, context = [], ""
    for number, text in enumerate(text.replace("END", family.ends[0]) for text in said):
        begun = context[: len(context) * (number % 4) // 3]
        context = f"{begun}{chat.eos_texts[0]}{text}<think>{family.specials[2]}\n{text}"
        turns.append(Turn(context, text + chat.eos_texts[0], number % 3 != 0))
        context += turns[-1].answer if number % 2 else ""
    assert encode_turns(chat, turns) == encode_turns(replace(chat, marks={}), turns) == naive(chat, turns)


def test_rewritten_turns_are_tokenised_from_where_they_differ_on(monkeypatch):
    chat, counted = chat_of(QWEN3), []
    encode = module.encode_arrays
    monkeypatch.setattr(
        module, "encode_arrays", lambda tk, texts: counted.append(sum(map(len, texts))) or encode(tk, texts)
    )
    turns = split_turns(chat, talk(*["word " * 30] * 40)["messages"])
    assert encode_turns(chat, turns) == naive(chat, turns)
    # Each question once, each answer as the target's own and as what a later one follows.
    assert sum(counted) < 2 * len(turns[-1].context)


@settings(max_examples=30, deadline=None)
@given(texts)
def test_steps_join_as_whole_turns_do(said):
    chat = chat_of(SMOLLM2)
    turns = [Turn(f"{text}\n", f"{text}<|im_end|>", True) for text in said]
    turns += split_turns(chat, talk("Hi", "Hello", "\n", "\n\nYes", "So", "Well")["messages"])
    (steps,) = encode_talks(chat, [turns])
    joined = [(number, list(ids), list(mask)) for number, ids, mask in join_steps(steps)]
    assert joined == join_turns(whole_turns(steps))


def folding_chat(folder, *added, splitter=None):
    """A tokenizer of words whose normalizer makes an end token of E, which no text spells."""
    words = {"<unk>": 0, "</s>": 1, "a": 2, "b": 3, "u": 4, "x": 5, "▁b": 6, "▁x": 7}
    model = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    model.normalizer = normalizers.Replace("E", "</s>")
    model.pre_tokenizer = splitter or pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens([AddedToken("</s>", normalized=False), *added])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}</s>{% endfor %}{# [U] #}{% if add_generation_prompt %} b {% endif %}"
    )
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 1}))
    return open_chat(TargetRef("test", "local-0", folder, str(folder)))


def test_an_end_token_that_no_text_spells_does_not_cut_an_answer(tmp_path):
    chat = folding_chat(tmp_path)
    assert chat.ends_exactly and chat.splits_anywhere
    first = Turn("u </s> b ", "a E x </s>", True)
    turns = [first, Turn(first.context + first.answer + " u </s> b ", "x </s>", True)]
    assert encode_turns(chat, turns) == naive(chat, turns)
    assert encode_turns(chat, turns)[0][1] == [2, 1, 5, 1]
    # Nor a context: its second end token is the normalizer's.
    turns = [Turn("u E </s> a ", "x </s>", True), Turn("u E </s> b ", "x </s>", True)]
    assert encode_turns(chat, turns) == naive(chat, turns)
    assert encode_turns(chat, turns)[1][0] == [4, 1, 1, 3]


@pytest.mark.parametrize("other", ["</s>\n", "x</s>", "x</", "q</", "s></s>x"])
def test_end_tokens_that_another_token_may_swallow_cut_nothing(tmp_path, other):
    assert not folding_chat(tmp_path, AddedToken(other, normalized=False)).marks


@pytest.mark.parametrize("how", ["normalized", "lstrip", "rstrip", "single_word"])
def test_marks_stand_alone_whatever_is_beside_them(tmp_path, how):
    chat = folding_chat(tmp_path, AddedToken("[U]", **{"normalized": False, how: True}))
    assert chat.marks == ({} if how == "single_word" else {"</s>": 1})
    assert chat.ends_exactly == bool(chat.marks)


def test_where_a_text_s_beginning_is_another_s_middle_there_are_no_marks(tmp_path):
    beginning = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    assert not folding_chat(tmp_path, splitter=beginning).marks


def test_the_tokens_that_a_template_writes_are_marks(tmp_path):
    assert folding_chat(tmp_path, AddedToken("[U]", normalized=False)).marks == {"</s>": 1, "[U]": 8}
    assert chat_of(GPT_OSS).marks.keys() == set(GPT_OSS.specials)
    assert not chat_of(QWEN3, fast=False).marks


def test_a_row_that_goes_on_with_the_row_before_it_stands_by_itself(tmp_path):
    chat = chat_of(SMOLLM2)
    messages = talk("Hi", "Hello", "More?", "Yes", "And?", "No")["messages"]
    rows = [{"messages": messages[:count]} for count in (2, 4, 6)]
    (scan,) = scan_files((write_jsonl(tmp_path / "rows.jsonl", rows),), None)
    found = [r.samples for r in samples_of(chat, read_lines(scan), SampleRules("sha", 1 << 20, 4096, 0.5))]
    for row, own in zip(rows, found, strict=True):
        assert [s.tokens_sha256 for s in own] == [s.tokens_sha256 for s in samples(chat, row)]


def test_the_garbage_collector_is_left_as_it_was(tmp_path):
    chat = chat_of(SMOLLM2)
    (scan,) = scan_files((write_jsonl(tmp_path / "rows.jsonl", [talk("Hi", "Hello")] * 3),), None)
    reading = samples_of(chat, read_lines(scan), SampleRules("sha", 1 << 20, 4096, 0.5))
    next(reading)
    assert gc.get_freeze_count()
    reading.close()
    assert not gc.get_freeze_count() and gc.isenabled()
