"""The base of everything that is read from a file or a command line: unknown keys refused, values frozen, errors in one line."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from schemas.errors import DflashError


class Strict(BaseModel):
    """A frozen record that refuses unknown keys and silent conversions (the string "8" is not the number 8)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


Model = TypeVar("Model", bound=BaseModel)


def parse(
    model: type[Model], data: Any, where: str, error: type[DflashError], named: Callable[[str], str] = str
) -> Model:
    """Validate `data`, as decoded from JSON or YAML, as `model`.

    `where` names the file for the message, if it is one; `named` turns a key into what the user typed. Raises `error` with
    every fault on one line, such as `hs.zarr/zarr.json: identity.layers.0: Input should be a valid integer (got 'one')`.
    """
    try:
        # Through JSON, since there strict mode takes a list for a tuple, which it refuses from Python objects. What JSON
        # has not, such as YAML's dates, becomes text, which no option of another kind takes.
        return model.model_validate_json(json.dumps(data, default=str))
    except ValidationError as fault:
        raise error(f"{where}: {describe(fault, named)}".removeprefix(": ")) from None


def describe(fault: ValidationError, named: Callable[[str], str] = str) -> str:
    """All faults of a validation on one line: `key: rule (got value)`, separated by semicolons."""
    parts = []
    for item in fault.errors():
        place = ".".join(str(part) for part in item["loc"])
        # A rule of a whole record names what it is about itself.
        key = named(place) if place else ""
        if item["type"] == "extra_forbidden":
            parts.append(f"{key}: unknown key; remove it or correct its name")
        elif item["type"] == "missing":
            parts.append(f"{key}: missing")
        else:
            got = "" if isinstance(item["input"], dict) else f" (got {_short(item['input'])})"
            parts.append(f"{key}: {item['msg'].removeprefix('Value error, ')}{got}".removeprefix(": "))
    return "; ".join(parts)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
