"""The chat template: what the target is given, which text is its own, end tokens, MASK, hashes."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from capture_fixtures import THINKING_TEMPLATE, copy_tokenizer, talk
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from capture.pieces import join_turns
from schemas.errors import DataError, Interrupted, OptionError, TargetError
from target.chat import encode_texts, open_chat, prompt_ids
from target.load import TargetRef, resolve_target
from target.steps import encode_turns
from target.tokens import chat_template_sha256, mask_token, tokenizer_sha256
from target.turns import check_answer, split_turns

PROMPT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def chat_with(folder: Path, template: str):
    copy_tokenizer(folder, template)
    return open_chat(TargetRef("test", "local-0", folder, str(folder)))


@pytest.fixture(scope="session")
def chat(tiny_chat):
    return open_chat(resolve_target(tiny_chat))


@pytest.fixture(scope="session")
def thinking(tmp_path_factory):
    return chat_with(tmp_path_factory.mktemp("thinking"), THINKING_TEMPLATE)


def test_plain_turns_are_answer_and_end_token(chat):
    turns = split_turns(chat, talk("Hi", "Hello there.", "And you?", "Fine.")["messages"])
    assert [(turn.context, turn.answer) for turn in turns] == [
        (PROMPT, "Hello there.<|im_end|>"),
        (
            PROMPT + "Hello there.<|im_end|>\n<|im_start|>user\nAnd you?<|im_end|>\n<|im_start|>assistant\n",
            "Fine.<|im_end|>",
        ),
    ]
    assert all(turn.ended for turn in turns)


def test_unfinished_only_cuts_the_last_turn(chat):
    first, last = split_turns(chat, talk("a", "b", "c", "d \n")["messages"], finished=False)
    assert (first.answer, first.ended) == ("b<|im_end|>", True)
    assert (last.answer, last.ended) == ("d \n", False)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=12), min_size=2, max_size=6))
def test_answers_decode_to_content_and_end(chat, texts):
    texts = texts[: len(texts) // 2 * 2]
    turns = split_turns(chat, talk(*texts)["messages"])
    for turn, content, (context, answer) in zip(turns, texts[1::2], encode_turns(chat, turns), strict=True):
        assert turn.answer == content + "<|im_end|>"
        assert chat.tokenizer.decode(answer, clean_up_tokenization_spaces=False) == content + "<|im_end|>"
        assert answer[-1] == 2
        check_answer(chat, answer, turn.ended)
        assert chat.tokenizer.decode(context, clean_up_tokenization_spaces=False) == turn.context


def test_context_is_what_the_target_would_be_given(chat):
    messages = talk("one", "two", "three", "four")["messages"]
    for turn, count, (context, _) in zip(
        split_turns(chat, messages), (1, 3), encode_turns(chat, split_turns(chat, messages)), strict=True
    ):
        assert context == prompt_ids(chat, messages[:count])
        assert turn.context == chat.tokenizer.apply_chat_template(
            messages[:count], tokenize=False, add_generation_prompt=True
        )


@pytest.mark.parametrize(
    ("message", "inserted", "answer"),
    [
        ({"content": "Hello"}, "<think>\n\n</think>\n\n", "Hello<|im_end|>"),
        ({"content": "\n\nHello"}, "<think>\n\n</think>\n\n", "Hello<|im_end|>"),
        ({"content": "<think>\nhm\n</think>\n\nHello"}, "", "<think>\nhm\n</think>\n\nHello<|im_end|>"),
        ({"content": "<think>\n\n</think>\n\nHello"}, "", "<think>\n\n</think>\n\nHello<|im_end|>"),
        ({"content": "Hello", "reasoning_content": "hm"}, "", "<think>\nhm\n</think>\n\nHello<|im_end|>"),
        ({"content": "<"}, "<think>\n\n</think>\n\n", "<<|im_end|>"),
        ({"content": "<think>"}, "<think>\n\n</think>\n\n", "<think><|im_end|>"),
        ({"content": ""}, "<think>\n\n</think>\n\n", "<|im_end|>"),
        ({"content": None, "tool_calls": [{"name": "f"}]}, "<think>\n\n</think>\n\n", "<call>f</call><|im_end|>"),
        ({"content": "Now", "tool_calls": [{"name": "f"}]}, "<think>\n\n</think>\n\n", "Now<call>f</call><|im_end|>"),
    ],
)
def test_what_the_template_inserts_is_context(thinking, message, inserted, answer):
    (turn,) = split_turns(thinking, [{"role": "user", "content": "Hi"}, {"role": "assistant", **message}])
    assert turn.context == PROMPT + inserted
    assert turn.answer == answer


def test_a_space_before_the_answer_is_in_its_first_token(tmp_path):
    user, own = "[INST] {{ m.content }} [/INST]", " {{ m.content }}<|im_end|>"
    choice = f"{{% if m.role == 'user' %}}{user}{{% else %}}{own}{{% endif %}}"
    chat = chat_with(tmp_path, f"{{% for m in messages %}}{choice}{{% endfor %}}")
    messages = talk("Hi", "Hello you", "More", "Yes indeed")["messages"]
    turns = split_turns(chat, messages)
    assert [turn.answer for turn in turns] == [" Hello you<|im_end|>", " Yes indeed<|im_end|>"]
    (_, ids, _), *others = join_turns(encode_turns(chat, turns))
    assert not others, "the second turn continues the first"
    assert ids == encode_texts(chat.tokenizer, [chat.tokenizer.apply_chat_template(messages, tokenize=False)])[0]


def test_trimming_template(tmp_path):
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}<|im_end|>{% endfor %}"
    chat = chat_with(tmp_path, template + "{% if add_generation_prompt %}[assistant]{% endif %}")
    (turn,) = split_turns(chat, talk("  Hi ", "  Hello \n")["messages"])
    assert (turn.context, turn.answer) == ("[user]Hi<|im_end|>[assistant]", "Hello<|im_end|>")
    (cut,) = split_turns(chat, talk("Hi", " Hello \n")["messages"], finished=False)
    assert cut.answer == "Hello"


@pytest.mark.parametrize(
    ("template", "rule"),
    [
        (
            "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}GO{% endif %}",
            "generation prompt",
        ),
        ("{% for m in messages %}{{ m.content }};{% endfor %}", "none of the target's end tokens"),
        ("{% for m in messages %}{{ m.content | upper }}<|im_end|>{% endfor %}", "changes the answer's text"),
        ("{{ raise_exception('no roles here') }}", "no roles here"),
        ("{{ messages[9].content }}", "refuses the conversation"),
    ],
)
def test_templates_that_hide_the_answer_are_refused(tmp_path, template, rule):
    with pytest.raises(DataError, match=rule) as caught:
        split_turns(chat_with(tmp_path, template), talk("Hi", "Hello")["messages"])
    assert "\n" not in str(caught.value)


def test_an_end_token_inside_an_answer_is_refused(chat):
    turns = split_turns(chat, talk("Hi", "a<|im_end|>b")["messages"])
    ((_, answer),) = encode_turns(chat, turns)
    with pytest.raises(DataError, match="before its end"):
        check_answer(chat, answer, True)
    with pytest.raises(DataError, match="is not an end token"):
        check_answer(chat, [5, 6], True)
    check_answer(chat, [5, 6], False)


def test_prepending_tokenizers_see_the_answer_in_its_place(tmp_path):
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    bpe.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "</s>", "[A]"], show_progress=False)
    bpe.train_from_iterator(["user hello a b c x . say good morning to you"] * 9, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>", unk_token="<unk>")
    user, own = "user {{ m.content }}[A]", "{{ m.content }}</s>"
    choice = f"{{% if m.role == 'user' %}}{user}{{% else %}}{own}{{% endif %}}"
    tokenizer.chat_template = f"{{% for m in messages %}}{choice}{{% endfor %}}"
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    chat = open_chat(TargetRef("test", "local-0", tmp_path, str(tmp_path)))
    assert not chat.splits_anywhere
    ((context, answer),) = encode_turns(chat, split_turns(chat, talk("hello", "good morning")["messages"]))
    assert context + answer == encode_texts(chat.tokenizer, ["user hello[A]good morning</s>"])[0]
    apart = encode_texts(chat.tokenizer, ["good morning</s>"])[0]
    assert answer != apart, "the case this guards against: a space that is not there"


def test_hashes(chat, tiny_chat, tmp_path):
    ref = resolve_target(tiny_chat)
    assert tokenizer_sha256(ref) == hashlib.sha256((Path(tiny_chat) / "tokenizer.json").read_bytes()).hexdigest()
    template = (Path(tiny_chat) / "chat_template.jinja").read_text()
    assert chat_template_sha256(chat) == hashlib.sha256(template.encode()).hexdigest()
    (tmp_path / "vocab.json").write_text("{}")
    slow = TargetRef("slow", "local-0", tmp_path, str(tmp_path))
    first = tokenizer_sha256(slow)
    (tmp_path / "merges.txt").write_text("a b")
    assert tokenizer_sha256(slow) != first
    (tmp_path / "vocab.json").unlink()
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(TargetError, match=r"no tokenizer\.json"):
        tokenizer_sha256(slow)


def test_mask_token_order(chat, tmp_path):
    assert mask_token(chat, 2048, None, {5}) == (3, "tokenizer")
    assert mask_token(chat, 2048, 7, {5}) == (7, "user")
    copy_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["mask_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    bare = open_chat(TargetRef("test", "local-0", tmp_path, str(tmp_path)))
    assert mask_token(bare, 2060, None, ()) == (2048, "unused row")
    # No row is unused. Special tokens 0 to 3: 0 is pad, 1 and 2 are in the template, 2 is eos; only 3 is left.
    assert mask_token(bare, 2048, None, {5}) == (3, "unused special")
    with pytest.raises(OptionError, match="choose an id with --mask-token-id"):
        mask_token(bare, 2048, None, {3})
    named = replace(bare)
    named.tokenizer.chat_template += "{# <|mask|> #}"
    with pytest.raises(OptionError, match="choose an id with --mask-token-id"):
        mask_token(named, 2048, None, ())


@pytest.mark.parametrize(
    ("asked", "seen", "rule"),
    [
        (2048, (), "out of range"),
        (-1, (), "out of range"),
        (9, {9}, "occurs in the captured"),
        (None, {3}, "occurs in"),
    ],
)
def test_mask_token_refusals(chat, asked, seen, rule):
    with pytest.raises(OptionError, match=rule):
        mask_token(chat, 2048, asked, seen)


def test_a_signal_that_comes_while_a_template_is_rendered_is_not_blamed_on_the_conversation(chat):
    def interrupted(*_, **__):
        raise Interrupted("stopped by SIGTERM")

    stopped = SimpleNamespace(new_context=interrupted, root_render_func=interrupted)
    for frame in (chat.frame, None):
        with pytest.raises(Interrupted):
            split_turns(replace(chat, compiled=stopped, frame=frame), talk("Hi", "Hello.")["messages"])
