"""The quick sandbox: whatever a template reaches for, it gets what transformers' own sandbox gives it, and no more."""

import pytest
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, UndefinedError
from jinja2.runtime import LoopContext, Undefined
from jinja2.utils import Namespace
from markupsafe import Markup
from template_fixtures import FAMILIES
from transformers.utils.chat_template_utils import _compile_jinja_template

from target.sandbox import QuickSandbox, quick

MESSAGES = [
    {"role": "user", "content": "{0.__class__}", "items": "mine", "__class__": "theirs", "tools": [{"a": 1}]},
    {"role": "assistant", "content": "Hi "},
]
# What must be refused, by what: Jinja's sandbox, or the absence of what was asked for.
ESCAPES = {
    "{{ ''.__class__.__mro__ }}": SecurityError,
    "{{ ''.__class__() }}": SecurityError,
    "{{ ''['__class__'].__mro__ }}": SecurityError,
    "{{ (''|attr('__class__')).__mro__ }}": SecurityError,
    "{{ messages.__class__.__base__ }}": SecurityError,
    "{{ messages[0].keys.__self__.x }}": SecurityError,
    "{{ messages.append(1) }}": SecurityError,
    "{{ messages[0].update({'role': 'x'}) }}": SecurityError,
    "{{ messages[0].pop('role') }}": SecurityError,
    "{{ messages[0].setdefault('x', 1) }}": SecurityError,
    "{% set ns = namespace(d={}) %}{{ ns.d.clear() }}": SecurityError,
    "{{ '{0.__class__.__mro__}'.format('') }}": SecurityError,
    "{{ messages[0].content.format(1).nothing.x }}": UndefinedError,
    "{{ '{x.__class__.__mro__}'.format_map({'x': 1}) }}": SecurityError,
    "{% set f = 'a{0.__class__.__mro__}'.format %}{{ f('') }}": SecurityError,
    "{% set ns = namespace(f='{0.__class__.__mro__}'.format) %}{{ ns.f('') }}": SecurityError,
    "{% for f in ['{0.__class__.__mro__}'.format, 1] %}{{ loop.previtem('') if loop.last else '' }}{% endfor %}": SecurityError,
    "{{ ['']|map('format')|map(attribute='__class__')|list }}{{ ''.strip.__self__.x }}": SecurityError,
    "{% for m in messages %}{{ loop.__init__.__globals__ }}{% endfor %}": SecurityError,
    "{% for m in messages %}{{ loop._iterable.append(m) }}{% endfor %}": SecurityError,
    "{% set ns = namespace(x=1) %}{{ ns.__init__.__globals__ }}": UndefinedError,
    "{{ namespace(__class__=1) }}": SecurityError,
    "{{ namespace.__init__.__globals__ }}": SecurityError,
    "{{ raise_exception.__globals__.x }}": SecurityError,
    "{{ cycler.__init__.__globals__ }}": SecurityError,
    "{{ range(1000000) }}": OverflowError,
    "{{ messages[0].nothing.more }}": UndefinedError,
    "{{ ''.nothing() }}": UndefinedError,
    "{{ ''.strip(1) }}": TypeError,
    "{{ ''.join([1]) }}": TypeError,
    "{{ raise_exception('no') }}": TemplateError,
}
HARMLESS = {
    "{{ messages[0].role.startswith('u') }} {{ messages[1].content.strip().upper() }}": "True HI",
    "{{ messages[0].items }} {{ messages[0]['items'] }} {{ messages[0].get('role') }}": None,
    "{% for key, value in messages[1].items() %}{{ key }}={{ value }};{% endfor %}": "role=assistant;content=Hi ;",
    "{% for m in messages %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{{ loop.revindex0 }} {% endfor %}": "1False21 2True20 ",
    "{% for m in messages %}{{ m.content.split('i', maxsplit=1) | length }}{% endfor %}": "12",
    "{% set ns = namespace(n=1, m=none) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ ns.m }}{{ ns.o is defined }}": "2NoneFalse",
    "{% for m in messages %}{{ (loop.previtem or {}).role }}{{ (loop.nextitem or {}).role }}|{% endfor %}": "assistant|user|",
    "<{{ messages[0].content.format(1) }}>": "<>",
    "{{ '{}-{:>3}'.format(1, 'a') }} {{ '{a}'.format_map({'a': 1}) }} {{ '%s' | format('x') }}": "1-  a 1 x",
    "{{ messages | map(attribute='role') | join(',') }} {{ messages[0]|attr('role') }}": "user,assistant ",
    "{% generation %}{{ messages[1].content }}{% endgeneration %}": "Hi ",
    "{% for m in messages %}{% break %}{% endfor %}{{ messages | tojson }}{{ messages.index(messages[1]) }}": None,
    "{% macro f(x) %}{{ x.strip() }}{% endmacro %}{{ f(' a ') }}{{ dict(a=1).a }}{{ messages[0].x is defined }}": "a1False",
}


def outcome(template):
    try:
        return template.render(messages=MESSAGES)
    except Exception as fault:
        return type(fault), str(fault)


def both(source):
    own = _compile_jinja_template(source)
    ours = quick(own, source)
    assert type(ours.environment) is QuickSandbox
    return own, ours


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_that_tries_to_break_out_is_refused_in_the_same_words(source):
    own, ours = map(outcome, both(source))
    assert own == ours
    assert isinstance(own, tuple) and issubclass(own[0], ESCAPES[source]), own


@pytest.mark.parametrize("source", HARMLESS)
def test_what_templates_do_gives_the_same_text(source):
    own, ours = map(outcome, both(source))
    assert isinstance(own, str), own
    # Methods that are printed stand at another place in memory each time.
    assert own.partition(" at 0x")[0] == ours.partition(" at 0x")[0]
    assert HARMLESS[source] in (None, ours)


def test_every_attribute_of_every_kind_of_object_is_reached_or_refused_as_before():
    own, ours = (template.environment for template in both("{{ messages }}"))
    loop = LoopContext(["{}".format, {"a": 1}], Undefined)
    next(loop)
    held = own.globals["namespace"](a=1, text="x", method="{}".format, role={})
    objects = [
        "x",
        "",
        Markup("x"),
        {},
        {"role": 1, "keys": 2, "__class__": 3},
        [1],
        (1,),
        1,
        None,
        {1},
        range(2),
        loop,
        held,
        Namespace({"_x": 1}),
    ]
    objects += ["x".strip, "x".format, {}.get, str, dict, len, own.undefined(name="x"), own.globals["dict"], lambda: 1]
    names = {name for obj in objects for name in dir(obj)}
    names |= {
        "role",
        "a",
        "text",
        "method",
        "nothing",
        "_x",
        "mro",
        "gi_frame",
        "__globals__",
        "unsafe_callable",
        "f_back",
        "",
    }
    for obj in objects:
        for name in names:
            one, other = (reached(sandbox, obj, name) for sandbox in (own, ours))
            assert one == other, (obj, name)


def reached(sandbox, obj, name):
    try:
        value = sandbox.getattr(obj, name)
    except Exception as fault:
        return type(fault), str(fault)
    if isinstance(value, Undefined) and value is not obj:
        return Undefined, value._undefined_message, value._undefined_name, value._undefined_exception
    if hasattr(value, "__wrapped__"):  # the sandbox's own way of formatting a text
        return "wrapped", value.__name__, value.__code__
    # Methods of the same object are equal, though made anew; other wrappers show what they are of.
    return type(value), repr(value)


def test_every_family_s_template_compiles_to_the_same_tree():
    for family in FAMILIES.values():
        own, ours = both(family.template)
        trees = [template.environment.parse(family.template) for template in (own, ours)]
        assert trees[0] == trees[1] and isinstance(trees[0], nodes.Template)
        assert own.globals.keys() == ours.globals.keys()


def test_a_template_of_another_sandbox_is_left_as_it_is():
    class Stricter(type(_compile_jinja_template("").environment)):
        pass

    template = Stricter().from_string("{{ ''.strip() }}")
    assert quick(template, "{{ ''.strip() }}") is template
