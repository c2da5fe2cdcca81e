"""The ids of turns: the same however their texts are cut before they are tokenised, whatever end tokens they spell."""

import gc
import json
from dataclasses import replace

import pytest
from capture_fixtures import talk, write_jsonl
from conversation_fixtures import chat_of, samples
from hypothesis import given, settings
from hypothesis import strategies as st
from template_fixtures import LLAMA31, PHI4, SMOLLM2
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from capture.lines import read_lines, scan_files
from capture.pieces import join_steps, join_turns
from capture.samples import SampleRules, samples_of
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


@settings(max_examples=30, deadline=None)
@given(texts)
def test_steps_join_as_whole_turns_do(said):
    chat = chat_of(SMOLLM2)
    turns = [Turn(f"{text}\n", f"{text}<|im_end|>", True) for text in said]
    turns += split_turns(chat, talk("Hi", "Hello", "\n", "\n\nYes", "So", "Well")["messages"])
    (steps,) = encode_talks(chat, [turns])
    joined = [(number, list(ids), list(mask)) for number, ids, mask in join_steps(steps)]
    assert joined == join_turns(whole_turns(steps))


def folding_chat(folder, *added):
    """A tokenizer of words whose normalizer makes an end token of E, which no text spells."""
    words = {"<unk>": 0, "</s>": 1, "a": 2, "b": 3, "u": 4, "x": 5}
    model = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    model.normalizer = normalizers.Replace("E", "</s>")
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens([AddedToken("</s>", normalized=False), *added])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %} b {% endif %}"
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


@pytest.mark.parametrize("other", ["</s>\n", "x</s>", "x</", "s></s>x"])
def test_end_tokens_that_another_token_may_swallow_cut_nothing(tmp_path, other):
    assert not folding_chat(tmp_path, AddedToken(other, normalized=False)).ends_exactly


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
