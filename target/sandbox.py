"""Jinja's sandbox, with short ways for what chat templates do all the time: a message's key, a text's method, a loop's place.

The sandbox asks a dozen questions about every attribute, and raises and catches an exception for every key of a message: most of
what rendering costs. Here the answers that depend on the kind of object and the name alone are worked out once, by asking the
sandbox itself. All else goes to the sandbox as it did, so that a template may do exactly what it might before.
"""

from types import BuiltinMethodType
from typing import Any

from jinja2 import Template
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, missing

# Numbers and booleans by their nature; `previtem` and its like may be anything.
PLACES = frozenset({"first", "last", "index", "index0", "revindex", "revindex0", "length"})
# Values of a namespace that are certainly no method.
PLAIN = frozenset({str, int, bool, float, type(None), list, dict, tuple})
# The keyword arguments that compiled templates add to every call.
ADDED = ("_loop_vars", "_block_vars")


def _allowed(kind: type) -> frozenset[str]:
    # The attributes of a plain `kind` that the sandbox hands out as they are, whatever the object holds.
    sandbox, example = ImmutableSandboxedEnvironment(), kind()
    values = {name: getattr(example, name) for name in dir(example)}
    return frozenset(
        name
        for name, value in values.items()
        if sandbox.wrap_str_format(value) is None and sandbox.is_safe_attribute(example, name, value)
    )


ALLOWED = {kind: _allowed(kind) for kind in (str, dict, list)}
DICT_NAMES = frozenset(dir(dict))


class QuickSandbox(ImmutableSandboxedEnvironment):
    """The sandbox that transformers renders chat templates in: same results, same refusals."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As the sandbox does; at once for plain dicts, texts and lists, and for what a loop and a namespace hold."""
        kind = type(obj)
        if kind is dict and attribute not in DICT_NAMES:
            value = obj.get(attribute, missing)
            return self.undefined(obj=obj, name=attribute) if value is missing else value
        if attribute in ALLOWED.get(kind, ()) or (kind is LoopContext and attribute in PLACES):
            return getattr(obj, attribute)
        if issubclass(kind, Namespace) and not attribute.startswith("_"):
            value = getattr(obj, attribute, missing)
            if type(value) in PLAIN:
                return value
        return super().getattr(obj, attribute)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """As the sandbox does; at once for a text's methods and for namespaces, which nothing marks as unsafe or as taking a context."""
        kind = type(obj)
        text = kind is BuiltinMethodType and type(obj.__self__) is str
        if not text and not (kind is type and issubclass(obj, Namespace)):
            return super().call(context, obj, *args, **kwargs)
        for name in ADDED:
            kwargs.pop(name, None)
        return obj(*args, **kwargs)


def quick(template: Template, source: str) -> Template:
    """The same template in a quick sandbox. One that was not compiled in Jinja's own sandbox is returned as it is."""
    if type(template.environment) is not ImmutableSandboxedEnvironment:
        return template
    # An overlay shares filters, tests, globals and extensions; its class decides how attributes are reached.
    sandbox = template.environment.overlay()
    sandbox.__class__ = QuickSandbox
    compiled = sandbox.from_string(source)
    # One mapping, no chain of them: their names are counted anew for each rendering.
    compiled.globals = dict(compiled.globals)
    return compiled
