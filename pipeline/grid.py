"""`--sweep key=v1,v2`: the grid of options that several of them span, and a name for each of its points."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from schemas.errors import OptionError
from schemas.yaml_text import dump_yaml, load_yaml

Setting = tuple[list[str], Any]


@dataclass(frozen=True)
class Point:
    """One combination: its name, which is its run's folder, and the settings that make it."""

    name: str
    settings: tuple[Setting, ...]


def read_sweep(text: str) -> tuple[list[str], list[Any]]:
    """ "draft.block_size=8,16" as (["draft", "block_size"], [8, 16]); values are YAML. Raises OptionError."""
    key, equals, values = text.partition("=")
    if not equals or not key.strip() or not values.strip():
        raise OptionError(f"--sweep {text}: write section.key=value,value, as in --sweep draft.block_size=8,16")
    try:
        parsed = load_yaml(f"[{values}]")
    except ValueError as fault:
        raise OptionError(f"--sweep {text}: {values!r} is no list of YAML values ({fault})") from None
    if repeated := [value for value in parsed if parsed.count(value) > 1]:
        raise OptionError(f"--sweep {text}: {repeated[0]!r} is given twice: give each value once")
    return key.strip().split("."), parsed


def grid(texts: Sequence[str]) -> list[Point]:
    """Every combination, the last option varying fastest. Raises OptionError for an option that is swept twice."""
    sweeps = [read_sweep(text) for text in texts]
    keys = [".".join(path) for path, _ in sweeps]
    if repeated := [key for key in keys if keys.count(key) > 1]:
        raise OptionError(f"--sweep {repeated[0]} is given twice: give all its values at once")
    leaves = [path[-1] for path, _ in sweeps]
    shown = [leaf if leaves.count(leaf) == 1 else key for leaf, key in zip(leaves, keys, strict=True)]
    points = []
    for values in product(*(values for _, values in sweeps)):
        settings = tuple((path, value) for (path, _), value in zip(sweeps, values, strict=True))
        points.append(
            Point(",".join(f"{key}={_plain(value)}" for key, value in zip(shown, values, strict=True)), settings)
        )
    names = [point.name for point in points]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise OptionError(
            f"two points of the sweep would share the folder {repeated[0]!r}: give values that differ in letters"
        )
    return points


def _plain(value: Any) -> str:
    """A value as a part of a folder's name."""
    text = dump_yaml(value, default_flow_style=True, width=1 << 20).strip().removesuffix("...").strip()
    return re.sub(r"[^\w.+-]+", "_", text).strip("_")
