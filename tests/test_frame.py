"""Which templates are proven to write one message after the other, and that one render of such a one is as good as many."""

from dataclasses import replace

import pytest
from capture_fixtures import copy_tokenizer, talk
from conversation_fixtures import chat_of
from hypothesis import given, settings
from hypothesis import strategies as st
from template_fixtures import FAMILIES, GEMMA3, LLAMA31, PHI4, SMOLLM2
from transformers.utils.chat_template_utils import _compile_jinja_template

from schemas.errors import DataError
from target import turns as turns_module
from target.chat import open_chat, render, render_blocks
from target.frame import LooksAhead, frame_of
from target.load import TargetRef
from target.turns import split_turns

LOOP = "{% for m in messages %}{{ m.content }}{% endfor %}"
ENDS = "{% if add_generation_prompt %}A:{% endif %}"
FRAMED = [
    LOOP,
    LOOP + ENDS,
    "{{ bos_token }}" + LOOP,
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}" + LOOP + ENDS,
    "{% for m in messages %}{% if loop.first and messages[0].role == 'user' %}S{% endif %}{{ loop.index }}{{ m['content'] | trim }}{% endfor %}",
    "{{ messages[0].role }}" + LOOP,
    "{% set loop_messages = messages[1:] %}{% for m in loop_messages %}{{ m.content }}{% endfor %}" + ENDS,
    "{% for m in messages[2:] %}{{ m.content }}{% endfor %}" + ENDS,
    "{% if messages[0].role == 'user' %}{% set first, messages = messages[0].content, messages[1:] %}{% endif %}{{ first }}"
    "{% for m in messages %}{{ loop.index }}{{ first }}{{ messages[0].content }}{{ m.content }}{% endfor %}" + ENDS,
    "{% set told = messages if messages[0].content else messages[1:] %}{% for m in told %}{{ m.content }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content | length %}{{ ns.n }}{% endfor %}"
    + ENDS,
    "{% if tools %}{{ messages | length }}{% endif %}" + LOOP,
    *(
        "{% for m in messages %}" + body + "{{ m.content }}{% endfor %}" + ENDS
        for body in (
            "{{ messages[1].content }}",
            "{% set x = m.content %}{{ x }}",
            "{% if m.role == 'user' %}{% set x = 1 %}{% endif %}{{ x is defined }}",
            "{{ (loop.previtem or {}).content }}",
            "{% generation %}{{ m.content }}{% endgeneration %}",
            "{% macro f(x) %}{{ x.content }}{% endmacro %}{{ f(m) }}",
            "{% for key, value in m | items %}{{ key }}{% if not loop.last %},{% endif %}{% endfor %}",
            "{% if m.content == 'a' %}{% continue %}{% endif %}",
            "{% set text %}{{ m.content }}{% endset %}{{ text }}",
        )
    ),
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ m.content.strip() }}{% endfor %}",
]
# Each of them looks ahead, or sees messages or the generation prompt outside of where they are told.
UNPROVEN = [
    "{{ messages | length }}" + LOOP,
    LOOP + "{{ messages[-1].role }}",
    LOOP + "{{ messages[0].role }}",
    LOOP + LOOP,
    LOOP + "{% set messages = [] %}",
    "{% set messages = [messages[0]] %}" + LOOP,
    "{% if true %}" + LOOP + "{% endif %}",
    "{% set x = add_generation_prompt %}{% for m in messages %}{{ x }}{{ m.content }}{% endfor %}",
    "{% set add_generation_prompt = messages[0].role == 'user' %}" + LOOP + ENDS,
    "{% set add_generation_prompt = messages %}" + LOOP + ENDS,
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% set first = messages[0].content %}" + LOOP + "{{ first }}",
    "{% set end = joiner() %}{% for m in messages %}{{ end() }}{% endfor %}{{ end() }}",
    "{% for m in messages %}{{ m.content }}{% else %}none{% endfor %}",
    "{% for m in messages if m.content %}{{ m.content }}{% endfor %}",
    "{% for m in messages recursive %}{{ m.content }}{% endfor %}",
    "{% for messages in messages %}{{ messages[0] }}{% endfor %}",
    "{% for m in messages[:2] %}{{ m.content }}{% endfor %}",
    "{% for m in messages[::-1] %}{{ m.content }}{% endfor %}",
    "{% for m in messages[1:] | list %}{{ m.content }}{% endfor %}",
    "{% set others = messages | list %}{% for m in others %}{{ m.content }}{% endfor %}",
    "{% set ns = namespace(all=messages) %}" + LOOP,
    "{% set all = messages if messages[0].x else 'ab' %}{% for m in all %}{{ m.content }}{% endfor %}",
    "{% for m in tools or [] %}{{ m }}{% endfor %}",
    "{% if messages is sequence %}x{% endif %}" + LOOP,
    "{% if messages %}x{% endif %}" + LOOP,
    "{{ messages | map(attribute='role') | join }}" + LOOP,
    "{% block b %}x{% endblock %}" + LOOP,
    "{% macro f() %}{{ messages[-1].role }}{% endmacro %}" + LOOP,
    *(
        "{% for m in messages %}" + body + "{{ m.content }}{% endfor %}"
        for body in (
            "{% if loop.last %}x{% endif %}",
            "{{ loop.length }}",
            "{{ loop['last'] }}",
            "{{ loop | attr('last') }}",
            "{{ loop.nextitem }}",
            "{{ loop.changed(m) }}",
            "{{ loop.cycle('a', 'b') }}",
            "{% for x in [] %}{% else %}{{ loop.last }}{% endfor %}",
            "{% for x in [loop.last] %}{{ x }}{% endfor %}",
            "{{ messages[loop.index0 + 1].role }}",
            "{{ messages[-1].role }}",
            "{{ messages | last }}",
            "{{ m in messages }}",
            "{{ add_generation_prompt }}",
            "{% if m.content == 'x' %}{% break %}{% endif %}",
            "{% for n in messages %}{{ n.content }}{% endfor %}",
            "{{ [1, 2] | random }}",
        )
    ),
]
contents = st.lists(st.text(st.sampled_from("ab \n.<"), max_size=5), min_size=2, max_size=7)


def framed(template):
    compiled = _compile_jinja_template(template)

    def write(messages, asking):
        return compiled.generate(messages=messages, tools=None, add_generation_prompt=asking)

    return frame_of(compiled.environment.parse(template), write) is not None


@pytest.mark.parametrize("template", FRAMED)
def test_a_loop_that_sees_only_its_message_its_place_and_the_first_one_is_proven(template):
    assert framed(template)


@pytest.mark.parametrize("template", UNPROVEN)
def test_a_template_that_may_see_more_is_not(template):
    assert not framed(template)


@settings(max_examples=10, deadline=None)
@pytest.mark.parametrize("template", FRAMED)
@given(contents)
def test_the_texts_of_all_beginnings_come_from_one_render(tmp_path_factory, template, texts):
    chat = framed_chat(tmp_path_factory, template)
    messages = talk(*texts)["messages"]
    before, blocks, after, reach = render_blocks(chat, messages)
    assert chat.frame is not None and chat.frame.ending == after and reach <= 3
    for count in range(reach, len(messages) + 1):
        told = before + "".join(blocks[:count])
        for asking, after in ((True, chat.frame.asking), (False, chat.frame.ending)):
            given_to_it = chat.tokenizer.apply_chat_template(
                messages[:count], tokenize=False, add_generation_prompt=asking
            )
            assert told + after == given_to_it == render(chat, messages[:count], asking)


CHATS = {}


def framed_chat(folders, template):
    if template not in CHATS:
        CHATS[template] = framed_chat_at(folders.mktemp("framed"), template)
    return CHATS[template]


def framed_chat_at(folder, template):
    copy_tokenizer(folder, template)
    return open_chat(TargetRef("test", "local-0", folder, str(folder)))


@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("family", [PHI4, SMOLLM2, LLAMA31, GEMMA3])
@given(contents, st.booleans(), st.sampled_from(["", "system", "assistant"]))
def test_turns_are_the_same_as_with_a_render_for_each(family, texts, finished, first):
    chat = chat_of(family)
    assert chat.frame is not None
    messages = [*([{"role": first, "content": texts[0]}] if first else []), *talk(*texts)["messages"]]

    def outcome(given_chat):
        try:
            return split_turns(given_chat, messages, finished)
        except DataError as fault:
            return str(fault)

    assert outcome(chat) == outcome(replace(chat, frame=None))


def test_a_message_that_the_template_refuses_stops_only_the_turns_behind_it(tmp_path):
    template = FRAMED[-1].replace("{{ m.content.strip() }}", "<|im_start|>{{ m.content }}<|im_end|>") + ENDS
    chat = framed_chat_at(tmp_path, template.replace("A:", "<|im_start|>"))
    assert chat.frame is not None
    tool = {"role": "tool", "content": "x"}
    assert len(split_turns(chat, [*talk("a", "b")["messages"], tool])) == 1
    with pytest.raises(DataError, match="no tools"):
        split_turns(chat, [*talk("a", "b")["messages"], tool, *talk("c", "d")["messages"]])


def test_the_families_that_look_ahead_are_rendered_turn_by_turn():
    framed = {"phi4", "smollm2", "llama3.1", "gemma3"}
    assert {name for name in FAMILIES if chat_of(FAMILIES[name]).frame is not None} == framed


def test_a_conversation_for_which_a_template_looks_ahead_is_rendered_turn_by_turn(tmp_path):
    template = "{% if messages[0].role == 'system' %}{{ messages | length }}{% endif %}" + LOOP.replace(
        "{{ m.content }}", "<|im_start|>{{ m.content }}<|im_end|>"
    )
    chat = framed_chat_at(tmp_path, template + ENDS.replace("A:", "<|im_start|>"))
    messages = [{"role": "system", "content": "s"}, *talk("a", "b", "c", "d")["messages"]]
    with pytest.raises(LooksAhead):
        render_blocks(chat, messages)
    with pytest.raises(DataError, match="does not continue its generation prompt"):  # it counts the answer too
        split_turns(chat, messages)
    assert [turn.answer for turn in split_turns(chat, messages[1:])] == ["b<|im_end|>", "d<|im_end|>"]


def test_one_render_serves_all_turns(monkeypatch):
    chat, counted = chat_of(LLAMA31), []
    monkeypatch.setattr(turns_module, "render", lambda *given: counted.append(given) or render(*given))
    assert len(split_turns(chat, talk(*"abcdefgh")["messages"])) == 4 and not counted
