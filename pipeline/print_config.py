"""`dflash train --print-config`: every option with its help, its allowed values and its default, as YAML that --config takes."""

import textwrap
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from schemas.options import TrainOptions
from schemas.strict import Strict
from schemas.yaml_text import dump_yaml

WIDTH = 110
HEADER = """\
# Every option of `dflash train`, with its value here. Keep what you change: a file for --config may leave out any option,
# and `--set section.key=value` sets one. What is "auto" or null is written as what it came to into the run's config.yaml.
"""
BOUNDS = ((Ge, "ge", "at least"), (Gt, "gt", "above"), (Le, "le", "at most"), (Lt, "lt", "below"))
TYPES = {int: "integer", float: "number", str: "text", bool: "true or false", NoneType: "null"}


def config_text(options: TrainOptions) -> str:
    """The options as commented YAML; reading it back gives the same options."""
    parts = [HEADER]
    for section, group in options:
        parts.append(f"\n# {_first_sentence(group)}\n{section}:\n")
        for name, info in type(group).model_fields.items():
            lines = textwrap.wrap(info.description or "", WIDTH - 4, break_on_hyphens=False)
            allowed = f"<{allowed_values(info)}; default {_value(info.get_default())}>"
            if len(lines[-1]) + len(allowed) < WIDTH - 4:
                lines[-1] += f" {allowed}"
            else:
                lines.append(allowed)
            parts += [f"  # {line}\n" for line in lines]
            parts.append(f"  {name}: {_value(getattr(group, name))}\n")
    return "".join(parts)


def help_of(model: type[Strict], name: str) -> str:
    """A field's description, as the help of its flag."""
    description = model.model_fields[name].description
    assert description is not None, f"{model.__name__}.{name} has no description"
    return f"{description[0].upper()}{description[1:]}."


def allowed_values(info: FieldInfo) -> str:
    """What a field may hold, in words: "integer, at least 1, or null"."""
    bounds = _bounds(info.metadata)
    # Bounds of a field beside a union are of its numbers.
    return ", or ".join(_kind(each, bounds) for each in _members(info.annotation))


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _kind(annotation: Any, bounds: str = "") -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}" if len(arguments) > 1 else str(arguments[0])
    if origin is tuple:
        items = [argument for argument in arguments if argument is not Ellipsis]
        count = "a list, each" if len(items) < len(arguments) else f"a list of {len(items)}, each"
        return f"{count} {_kind(items[0])}"
    if origin is dict:
        return f"a mapping of {_kind(arguments[0])} to {_kind(arguments[1])}"
    if hasattr(annotation, "__metadata__"):
        inner = next(meta for meta in annotation.__metadata__ if isinstance(meta, FieldInfo))
        return _kind(arguments[0], _bounds(inner.metadata))
    return TYPES[annotation] + (bounds if annotation in (int, float) else "")


def _bounds(metadata: list[Any]) -> str:
    return "".join(
        f", {words} {getattr(meta, name):g}"
        for meta in metadata
        for kind, name, words in BOUNDS
        if isinstance(meta, kind)
    )


def _value(value: Any) -> str:
    value = list(value) if isinstance(value, tuple) else value
    text = dump_yaml(value, default_flow_style=True, width=1 << 20).strip().removesuffix("...").strip()
    return str(text)


def _first_sentence(group: Strict) -> str:
    return " ".join((type(group).__doc__ or "").split("\n\n")[0].split())
