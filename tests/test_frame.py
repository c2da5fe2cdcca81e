"""Which templates are proven to write one message after the other, and that one render of such a one is as good as many."""

from dataclasses import replace

import pytest
from capture_fixtures import copy_tokenizer, talk
from conversation_fixtures import chat_of
from hypothesis import given, settings
from hypothesis import strategies as st
from template_fixtures import FAMILIES, PHI4, SMOLLM2
from transformers.utils.chat_template_utils import _compile_jinja_template

from schemas.errors import DataError
from target.chat import open_chat, render, render_blocks
from target.frame import writes_by_message
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
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ m.content.strip() }}{% endfor %}",
]
# Each of them looks ahead, keeps something from one message to the next, or sees messages outside of their loop.
UNPROVEN = [
    "{{ messages | length }}" + LOOP,
    "{{ messages[0].role }}" + LOOP,
    LOOP + "{{ messages[-1].role }}",
    LOOP + LOOP,
    LOOP + "{% set messages = [] %}",
    "{% if true %}" + LOOP + "{% endif %}",
    "{% set x = add_generation_prompt %}{% for m in messages %}{{ x }}{{ m.content }}{% endfor %}",
    "{% set loop_messages = messages[1:] %}{% for m in loop_messages %}{{ m.content }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{% else %}none{% endfor %}",
    "{% for m in messages if m.content %}{{ m.content }}{% endfor %}",
    "{% for m in messages recursive %}{{ m.content }}{% endfor %}",
    "{% for messages in messages %}{{ messages[0] }}{% endfor %}",
    *(
        "{% for m in messages %}" + body + "{{ m.content }}{% endfor %}"
        for body in (
            "{% if loop.last %}x{% endif %}",
            "{{ loop.length }}",
            "{{ loop['last'] }}",
            "{{ loop.nextitem }}",
            "{{ loop.changed(m) }}",
            "{{ loop.cycle('a', 'b') }}",
            "{{ messages[loop.index0 + 1].role }}",
            "{{ messages[1].role }}",
            "{{ messages | last }}",
            "{{ add_generation_prompt }}",
            "{% if m.content == 'x' %}{% break %}{% endif %}",
            "{% set x = 1 %}",
            "{% for n in messages %}{{ n.content }}{% endfor %}",
            "{{ [1, 2] | random }}",
            "{% generation %}x{% endgeneration %}",
            "{% macro f() %}x{% endmacro %}",
        )
    ),
]
contents = st.lists(st.text(st.sampled_from("ab \n.<"), max_size=5), min_size=2, max_size=7)


def framed(template):
    compiled = _compile_jinja_template(template)
    return writes_by_message(compiled.environment.parse(template))


@pytest.mark.parametrize("template", FRAMED)
def test_a_loop_that_sees_only_its_message_its_place_and_the_first_one_is_proven(template):
    assert framed(template)


@pytest.mark.parametrize("template", UNPROVEN)
def test_a_template_that_may_see_more_is_not(template):
    assert not framed(template)


@settings(max_examples=20, deadline=None)
@pytest.mark.parametrize("template", FRAMED)
@given(contents)
def test_the_texts_of_all_beginnings_come_from_one_render(tmp_path_factory, template, texts):
    chat = framed_chat(tmp_path_factory, template)
    messages = talk(*texts)["messages"]
    blocks = render_blocks(chat, messages)
    assert chat.frame is not None
    for count in range(1, len(messages) + 1):
        told = chat.frame.before + "".join(blocks[:count])
        for asking, after in ((True, chat.frame.asking), (False, chat.frame.ending)):
            given_to_it = chat.tokenizer.apply_chat_template(
                messages[:count], tokenize=False, add_generation_prompt=asking
            )
            assert told + after == given_to_it == render(chat, messages[:count], asking)


CHATS = {}


def framed_chat(folders, template):
    if template not in CHATS:
        folder = folders.mktemp("framed")
        copy_tokenizer(folder, template)
        CHATS[template] = open_chat(TargetRef("test", "local-0", folder, str(folder)))
    return CHATS[template]


@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("family", [PHI4, SMOLLM2])
@given(contents, st.booleans())
def test_turns_are_the_same_as_with_a_render_for_each(family, texts, finished):
    chat = chat_of(family)
    assert chat.frame is not None
    messages = talk(*texts)["messages"]

    def outcome(given_chat):
        try:
            return split_turns(given_chat, messages, finished)
        except DataError as fault:
            return str(fault)

    assert outcome(chat) == outcome(replace(chat, frame=None))


def test_a_message_that_the_template_refuses_stops_only_the_turns_behind_it(tmp_path):
    template = FRAMED[-1].replace("{{ m.content.strip() }}", "<|im_start|>{{ m.content }}<|im_end|>") + ENDS
    copy_tokenizer(tmp_path, template.replace("A:", "<|im_start|>"))
    chat = open_chat(TargetRef("test", "local-0", tmp_path, str(tmp_path)))
    assert chat.frame is not None
    tool = {"role": "tool", "content": "x"}
    assert len(split_turns(chat, [*talk("a", "b")["messages"], tool])) == 1
    with pytest.raises(DataError, match="no tools"):
        split_turns(chat, [*talk("a", "b")["messages"], tool, *talk("c", "d")["messages"]])


def test_the_families_that_look_ahead_are_rendered_turn_by_turn():
    assert {name for name in FAMILIES if chat_of(FAMILIES[name]).frame is not None} == {"phi4", "smollm2"}
