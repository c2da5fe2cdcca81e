"""How a cache grew: by whom its shards were planned, and what a plan on disk says of that.

A capture plans all its shards at once. Each append plans the shards behind those, by its own sources alone: a generation. The
manifest's record holds them as "first shard:number of sources", so "0:2 5:1" is a cache of five shards from two files, to
which one more file was appended. A merged cache has shards of several captures, whose plans nobody can make again.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from schemas.errors import CacheError
from schemas.manifest import CONVERTED, Manifest
from schemas.strict import parse

GENERATIONS, MERGED = "generations", "merged"
# Keys of plan.parquet's own metadata.
PENDING_KEY, EARLIER_KEY = b"dflash.append", b"dflash.generations"


@dataclass(frozen=True)
class Generation:
    """Shards from `first_shard` on, planned together from the next `sources` of the manifest's sources."""

    first_shard: int
    sources: int


def generations_of(manifest: Manifest) -> list[Generation]:
    """The generations of a cache, oldest first; one where nothing was appended. CacheError for a record that says nonsense."""
    text = manifest.record.get(GENERATIONS)
    if text is None:
        return [Generation(0, len(manifest.sources))]
    try:
        found = [Generation(*map(int, part.split(":"))) for part in text.split()]
    except (TypeError, ValueError):
        found = []
    firsts = [generation.first_shard for generation in found]
    if (
        not found
        or firsts != sorted(set(firsts))
        or sum(generation.sources for generation in found) != len(manifest.sources)
    ):
        raise CacheError(
            f'record.{GENERATIONS} {text!r} is not "first shard:sources" for {len(manifest.sources)} sources: capture again'
        )
    return found


def generations_text(generations: Sequence[Generation]) -> str:
    """As the manifest's record holds them."""
    return " ".join(f"{generation.first_shard}:{generation.sources}" for generation in generations)


def mendable(manifest: Manifest) -> bool:
    """Whether one command can make damaged shards of this cache again: none knows both a merge and what was appended to it."""
    return MERGED not in manifest.record or CONVERTED in manifest.record or len(generations_of(manifest)) == 1


def way_to_mend(manifest: Manifest) -> str:
    """What to do about damaged or missing shards of this cache."""
    if not mendable(manifest):
        return "merge its caches again, into another --out, and append to that what was appended since"
    maker = "dflash merge" if MERGED in manifest.record else "dflash capture"
    return f"run the same `{'dflash convert' if CONVERTED in manifest.record else maker}` command again"


def pending_metadata(pending: Manifest) -> dict[bytes, bytes]:
    """What the plan of an append carries: the manifest that the cache will have."""
    return {PENDING_KEY: json.dumps(pending.model_dump(mode="json")).encode()}


def earlier_metadata(earlier: Sequence[tuple[int, str]]) -> dict[bytes, bytes]:
    """What the plan for mending an appended cache carries: each generation's first shard and the hash of its own plan."""
    return {EARLIER_KEY: json.dumps(earlier).encode()}


def read_pending(metadata: Mapping[bytes, bytes] | None, where: str) -> Manifest | None:
    """The manifest out of the metadata of an append's plan; None where the plan is no append's. Raises CacheError."""
    data = (metadata or {}).get(PENDING_KEY)
    return None if data is None else parse(Manifest, json.loads(data), where, CacheError)


def read_earlier(metadata: Mapping[bytes, bytes] | None) -> tuple[tuple[int, str], ...]:
    """Each generation's first shard and plan hash, out of the metadata of a mending plan; empty for any other plan."""
    data = (metadata or {}).get(EARLIER_KEY)
    return () if data is None else tuple((int(first), str(digest)) for first, digest in json.loads(data))
