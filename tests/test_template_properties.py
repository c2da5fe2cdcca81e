"""What holds of every template: what stands before a supervised span, by property; the date, the cost, and what is refused."""

from dataclasses import replace

import pytest
from capture_fixtures import talk
from conversation_fixtures import CHAT, NOTHING, THINKING, E, chat_of, samples
from hypothesis import given, settings
from hypothesis import strategies as st
from template_fixtures import FAMILIES, GEMMA3, LLAMA31, Family

from capture.lines import BadRow
from schemas.errors import DataError
from target import turns as module
from target.chat import encode_texts, prompt_ids, render
from target.turns import split_turns

turns = st.lists(st.text(st.sampled_from("ab \n.é7"), min_size=1, max_size=8), min_size=2, max_size=6)


@settings(max_examples=25, deadline=None)
@pytest.mark.parametrize("name", FAMILIES)
@given(turns)
def test_before_every_span_stands_the_generation_prompt(name, texts):
    """Each supervised span's prefix is what the target is given, an empty think block aside; and BOS stands once."""
    chat = chat_of(FAMILIES[name])
    messages = talk(*texts[: len(texts) // 2 * 2])["messages"]
    if not all(message["content"].strip() for message in messages):
        return
    histories = [messages[:j] for j in range(1, len(messages), 2)]
    wanted = [prompt_ids(chat, history) for history in histories]
    spans = []
    for sample in samples(chat, {"messages": messages}):
        ids, mask = sample.input_ids.tolist(), sample.loss_mask.tolist()
        spans += [ids[:i] for i in range(1, len(ids)) if mask[i] and not mask[i - 1]]
        assert ids[:2].count(chat.tokenizer.bos_token_id) <= 1
    blocks = {"qwen3": NOTHING, "qwen3.5": "\n</think>\n\n"}
    if name in blocks:
        # As the template itself writes it for a target that is asked not to think.
        kwargs = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
        texts_given = [chat.tokenizer.apply_chat_template(history, **kwargs) for history in histories]
        assert texts_given == [render(chat, history, True) + blocks[name] for history in histories]
        wanted = [encode_texts(chat.tokenizer, [text])[0] for text in texts_given]
    assert spans == wanted


nasty = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "\n", " ", "<", ">", "think>", "Yes", E, "\n\n", "</", "é", "<think>\n\n</think>\n\n"]
    ),
    max_size=5,
).map("".join)


@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("name", FAMILIES)
@given(st.lists(nasty, min_size=2, max_size=4), st.booleans())
def test_where_an_answer_begins_is_what_a_render_with_another_in_its_place_shows(name, texts, finished):
    chat = replace(chat_of(FAMILIES[name]), frame=None)
    messages = talk(*texts)["messages"]

    def at_the_beginning(chat, tail, core):
        alone = tail.startswith(core) and tail[len(core) :].lstrip().startswith(chat.eos_texts)
        return 0 if alone else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_certain_start", at_the_beginning)
        shown = split(chat, messages, finished)
    assert split(chat, messages, finished) == shown


def split(chat, messages, finished):
    try:
        return split_turns(chat, messages, finished)
    except DataError as fault:
        return str(fault)


@pytest.mark.parametrize(
    "content", ["Yes", "Yes \n", "<", "</", "No <b>", " Yes", "</think>", "<think>", "a</think>b", ""]
)
def test_only_an_answer_like_what_is_put_before_it_takes_a_render_more(monkeypatch, content):
    counted = []
    monkeypatch.setattr(module, "render", lambda *given: counted.append(given) or render(*given))
    split(chat_of(FAMILIES["qwen3"]), talk("Hi", content)["messages"], True)
    unlike = bool(content) and content[0] != " " and "think>" not in content
    assert (len(counted) == 2) == unlike


def test_a_day_later_the_tokens_are_the_same():
    for name in ("llama3.1", "gpt-oss"):
        chat = chat_of(FAMILIES[name])
        assert chat.dated
        assert "2024" in render(chat, CHAT, True)
        # transformers, left alone, writes today's.
        assert "2024" not in chat.tokenizer.apply_chat_template(CHAT, tokenize=False).replace("December 2023", "")
    assert not chat_of(GEMMA3).dated
    computed = LLAMA31.template.replace('"%d %b %Y"', '"%d %b" + " %Y"')
    chat = chat_of(Family(computed, LLAMA31.specials, LLAMA31.bos, LLAMA31.ends))
    assert chat.dated and "Today Date: 2024-07-26" in render(chat, CHAT, True)


@pytest.mark.parametrize(
    ("template", "messages", "rule"),
    [
        (GEMMA3.template, CHAT[:2] + CHAT[1:], "roles must alternate"),
        # The family's older template has no system role at all.
        (
            GEMMA3.template.replace(
                "{% set prefix, messages", "{{ raise_exception('System role not supported') }}{% set prefix, messages"
            ),
            CHAT,
            "System role not supported",
        ),
        (GEMMA3.template, THINKING, "leaves the answer's reasoning out"),
        (
            GEMMA3.template.partition("{%- if add_generation_prompt")[0],
            CHAT,
            "writes '<start_of_turn>model' before the answer but has no generation prompt",
        ),
        ("{{ bos_token }}" + GEMMA3.template, CHAT, "begins with two <bos> tokens"),
    ],
)
def test_what_cannot_be_had_is_refused_with_its_row(template, messages, rule):
    chat = chat_of(Family(template, GEMMA3.specials, GEMMA3.bos, GEMMA3.ends))
    with pytest.raises(BadRow, match=rf"^rows\.jsonl:1: .*{rule}"):
        samples(chat, {"messages": messages})
    assert samples(chat, {"messages": messages}, skip_bad_rows=True) == ()


def test_a_turn_costs_its_own_tokens_and_not_those_of_all_before_it(monkeypatch):
    chat = chat_of(FAMILIES["phi4"])
    texts = ["word " * 30] * 40
    counted = []
    from target import steps as module

    encode = module.encode_arrays
    monkeypatch.setattr(
        module, "encode_arrays", lambda tk, texts: counted.append(sum(map(len, texts))) or encode(tk, texts)
    )
    messages = talk(*texts)["messages"]
    found = samples(chat, {"messages": messages})
    assert len(found) == 1
    whole = len(render(chat, messages, False))
    assert sum(counted) < 1.2 * whole
    assert (
        found[0].input_ids.tolist()
        == encode_texts(chat.tokenizer, [render(chat, messages, False)])[0][: len(found[0].input_ids)]
    )


def test_split_turns_needs_no_content():
    chat = chat_of(FAMILIES["phi4"])
    (turn,) = split_turns(chat, talk("Hi", "")["messages"])
    assert turn.answer == E
