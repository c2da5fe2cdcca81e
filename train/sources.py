"""`data.sources`: which of a cache's sources to train on, and how often each of their samples runs in an epoch."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from schemas.errors import OptionError
from schemas.manifest import Source


def source_weights(asked: Mapping[str, float] | None, held: Sequence[Source]) -> dict[int, float] | None:
    """The weight of each source asked for, by its number in the manifest; None stays None.

    A source is named by its number, its path, its file's name, or that without the ending. Raises OptionError, which lists the
    sources, where a name fits none or several, and where two names fit one.
    """
    if asked is None:
        return None
    offer = ", ".join(f"{number} ({source.path})" for number, source in enumerate(held))
    if not asked:
        raise OptionError(f"data.sources names none: choose among {offer}")
    weights: dict[int, float] = {}
    for name, weight in asked.items():
        found = _matches(name, held)
        if not found:
            raise OptionError(f"data.sources: the cache has no source {name!r}: choose among {offer}")
        if len(found) > 1:
            raise OptionError(f"data.sources: {name!r} fits {len(found)} sources: give the number or path, of {offer}")
        if found[0] in weights:
            raise OptionError(f"data.sources names source {found[0]} ({held[found[0]].path}) twice: name it once")
        weights[found[0]] = weight
    return weights


def _matches(name: str, held: Sequence[Source]) -> list[int]:
    """Numbers of the sources that a name fits, by the most exact way in which it fits any."""
    known = [
        (source.path, str(number), Path(source.path).name, Path(source.path).stem) for number, source in enumerate(held)
    ]
    for way in range(4):
        if found := [number for number, names in enumerate(known) if names[way] == name]:
            return found
    return []
