"""What a run reads: a complete cache, or the shards of a growing one that were there when the run began."""

from collections.abc import Sequence
from pathlib import Path

from cache.partial import open_partial, open_shards
from cache.read import Cache, open_cache
from schemas.say import Say
from train.rundir import holds_run, read_provenance
from train.team import SOLO, Team


def open_data(
    path: str, layers: Sequence[int] | None, run: Path, resume: bool, partial: bool, say: Say, team: Team = SOLO
) -> tuple[Cache, tuple[int, ...] | None]:
    """The cache at `path`, and its shards that are trained on where they are not all.

    A run that is resumed takes the shards that it began with, however many there are by now. Raises CacheError for an incomplete
    cache unless `partial`, CacheDamaged. Of a growing cache all ranks take what the first has found.
    """
    begun = read_provenance(run).shards if resume and holds_run(run) else None
    if begun is not None:
        cache = open_shards(path, begun, layers)
        say.note(
            f"{path}: going on with the {len(begun)} shards that the run began with ({len(cache.index):,} samples)"
        )
        return cache, begun
    if not partial:
        return open_cache(path, layers), None
    found = open_partial(path, layers)
    # A capture may commit a shard between one rank's look and another's.
    if found.shards != (shards := team.gather(found.shards)[0]):
        return open_cache(path, layers) if shards is None else open_shards(path, shards, layers), shards
    if found.shards is None:
        say.note(f"{path} is complete: --partial trains on all of it")
    else:
        say.note(
            f"{path} still grows: training on the {len(found.shards)} of {found.planned} shards that are committed now "
            f"({len(found.cache.index):,} samples)"
        )
    return found.cache, found.shards
