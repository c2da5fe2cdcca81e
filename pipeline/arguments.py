"""What is typed becomes options: lists, `--set key=value`, `--config`, and what several commands ask in the same words."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from schemas.errors import OptionError
from schemas.strict import Strict, parse
from schemas.yaml_text import load_yaml

Options = TypeVar("Options", bound=Strict)

Device = Annotated[str, typer.Option(help="auto (CUDA where there is one), cpu, cuda, cuda:1 ...")]
Dtype = Annotated[
    str, typer.Option(help="The target's precision: auto (the checkpoint's), float32, bfloat16, float16.")
]
Attention = Annotated[
    str, typer.Option(help="The target's attention: auto, or a name that transformers knows (sdpa, eager ...).")
]
Nproc = Annotated[
    int | None,
    typer.Option(
        min=1, help="Processes on this machine, by default one, or --tp. Under torchrun or srun, leave it out."
    ),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run model code that comes with the target.")
]


def layer_list(text: str | None) -> tuple[int, ...] | None:
    """ "1,9,17" as numbers; None stays None. OptionError names the part that is no number."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not (part.isascii() and part.isdigit()):
            raise OptionError(
                f"--layers {text}: {part!r} is no layer number: write decoder layers from 0, as in --layers 1,9,17,25"
            )
    return tuple(int(part) for part in parts)


def options_of(model: type[Options], arguments: Mapping[str, Any]) -> Options:
    """A command's options out of its parameters, which have the same names; None leaves the schema's default.

    Raises OptionError that names the flag: `--top-k: Input should be greater than or equal to 1 (got 0)`.
    """
    given = {name: arguments[name] for name in model.model_fields if arguments.get(name) is not None}
    return parse(model, given, "", OptionError, lambda key: f"--{key.split('.')[0].replace('_', '-')}")


def read_yaml(path: str) -> dict[str, Any]:
    """A YAML file that holds a mapping; OptionError otherwise."""
    try:
        data = load_yaml(Path(path).read_text(encoding="utf-8"))
    except OSError as fault:
        raise OptionError(f"--config {path}: {fault.strerror}: give a YAML file such as a run's config.yaml") from None
    except ValueError as fault:
        raise OptionError(f"--config {path} is not YAML that can be used: {fault}: correct it there") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise OptionError(f"--config {path} holds a {type(data).__name__}, not sections such as draft: and optim:")
    # A section of which no line was kept sets nothing.
    return {section: {} if options is None else options for section, options in data.items()}


def read_setting(text: str) -> tuple[list[str], Any]:
    """ "optim.lr=1e-3" as (["optim", "lr"], 0.001); the value is YAML, so that null, true and [1, 2] mean what they say."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise OptionError(f"--set {text}: write section.key=value, as in --set optim.lr=1e-3")
    try:
        return key.strip().split("."), load_yaml(value)
    except ValueError as fault:
        raise OptionError(f"--set {text}: {value!r} is no YAML value ({fault})") from None


def merge(base: Mapping[str, Any], settings: Sequence[tuple[Sequence[str], Any]]) -> dict[str, Any]:
    """`base` with each setting put in its place; a section that is no mapping is refused by the schema later."""
    merged: dict[str, Any] = {name: dict(value) if isinstance(value, dict) else value for name, value in base.items()}
    for path, value in settings:
        place = merged
        for section in path[:-1]:
            if not isinstance(place.setdefault(section, {}), dict):
                raise OptionError(f"--set {'.'.join(path)}: {section} holds no settings of its own")
            place = place[section]
        place[path[-1]] = value
    return merged
