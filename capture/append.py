"""Planning an append: what of the data is new, and the shards it makes. Also the whole plan of a cache that grew, to mend it.

Each append is planned alone, from its own sources and without what the cache held by then, so its plan can be made again from
the same files in the same order.
"""

from collections.abc import Sequence, Set

from cache.append import grown, pending_append
from cache.generations import GENERATIONS, generations_of, mendable, pending_metadata, way_to_mend
from cache.index import read_index
from cache.plan import plan_sha256
from cache.store import open_store
from cache.verify import verify
from cache.write import check_identity
from capture.collect import Collected, collect, digests_of
from capture.lines import Scan
from capture.plan import Joined, Planned, Shards, build_plan
from capture.settings import Settings, check_reading, sample_rules
from capture.spool import spool_folder
from schemas.errors import CacheError, OptionError
from schemas.manifest import Manifest, Source
from schemas.say import Say


def appendable(
    settings: Settings, scans: Sequence[Scan], found: Manifest | None, say: Say
) -> tuple[Manifest, list[Scan]]:
    """The finished cache, and those of the data files that are not in yet.

    Raises CacheError where there is nothing to append to, it is unfinished or damaged, its settings differ (naming the field
    and both values), or an append of other data is under way.
    """
    out = settings.options.out
    if found is None:
        raise CacheError(f"--append: {out} holds no cache yet: leave out --append to begin one")
    # Which id stands for MASK was settled when the cache was made; only an explicit other one contradicts it.
    asked = settings.options.mask_token_id
    mask_id = found.identity.mask_token_id if asked is None else asked
    check_identity(out, found, settings.identity.model_copy(update={"mask_token_id": mask_id}))
    check_reading(settings, found)
    if not found.complete:
        raise CacheError(
            f"--append: {out} is not finished: first {way_to_mend(found)}"
            + (", without --append" if mendable(found) else "")
        )
    held = {(source.sha256, source.rows) for source in found.sources}
    left = [scan for scan in scans if not any(scan.sha256 == sha and scan.rows <= rows for sha, rows in held)]
    for scan in scans:
        if scan not in left:
            say.note(f"{scan.shown} is already in {out}")
    if left and (pending := pending_append(out)) is not None:
        _check_pending(out, found, pending, left)
    _, faults = verify(out, False, say)
    if faults:
        way = way_to_mend(found) + (", without --append" if mendable(found) else "")
        raise CacheError(f"--append: {out} is damaged ({faults[0].where}: {faults[0].what}): first {way}")
    if not left:
        say.note(f"{out}: all of this data is already in: nothing to do")
    return found, left


def _check_pending(out: str, found: Manifest, pending: Manifest, scans: Sequence[Scan]) -> None:
    begun = pending.sources[len(found.sources) :]
    if [(scan.sha256, scan.rows) for scan in scans] != [(source.sha256, source.rows) for source in begun]:
        raise CacheError(
            f"{out} has an unfinished append of {_names(begun)}, this command gives {_names(scans)}: finish that one first (give "
            f"its data), or give it up by removing {out}/plan.parquet"
        )


def _names(files: Sequence[Scan] | Sequence[Source]) -> str:
    return ", ".join(
        f"{item.shown if isinstance(item, Scan) else item.path} ({item.rows} rows, sha256 {item.sha256[:16]})"
        for item in files
    )


def plan_append(
    settings: Settings, scans: Sequence[Scan], found: Manifest, say: Say
) -> tuple[Manifest, Shards, Collected] | None:
    """The manifest to come, the plan of the new shards (behind the old ones) and what was read; None where no sample is new.

    Samples that the cache has already are left out and counted as duplicates. Raises DataError for the data, OptionError
    where the cache's mask token occurs in it.
    """
    out, identity = settings.options.out, found.identity
    known = frozenset(digests_of(read_index(open_store(out), found)))
    collected = _collect(settings, scans, known, say)
    if not collected.samples:
        say.note(f"{out}: every sample of this data is already in: nothing to do")
        return None
    if identity.mask_token_id in collected.seen:
        token = settings.chat.tokenizer.convert_ids_to_tokens(identity.mask_token_id)
        raise OptionError(
            f"the mask token of {out}, {identity.mask_token_id} ({token!r}), occurs in {_names(scans)}, where it must not: "
            "leave those rows out, or capture all data into another --out with another --mask-token-id"
        )
    plan, totals = build_plan(collected, identity.shard_tokens, identity.batch_tokens)
    plan = plan.behind(found.totals.shards, len(found.sources))
    return grown(found, collected.sources, totals), plan, collected


def addition(pending: Manifest, found: Manifest) -> Manifest:
    """The part of a manifest to come that an append adds: its sources, its totals."""
    totals = {
        name: getattr(pending.totals, name) - getattr(found.totals, name) for name in type(found.totals).model_fields
    }
    return found.model_copy(
        update={
            "sources": pending.sources[len(found.sources) :],
            "totals": found.totals.model_copy(update=totals),
        }
    )


def plan_again(
    settings: Settings, scans: Sequence[Scan], found: Manifest, say: Say
) -> tuple[Shards, list[tuple[int, str]]]:
    """The plan of all shards of a cache that was appended to, and each generation's first shard and plan_sha256.

    `scans` are the cache's own sources, in order. Raises CacheError where they no longer make the same plan.
    """
    shard_tokens, generations = found.identity.shard_tokens, generations_of(found)
    known: set[bytes] = set()
    plans: list[Planned] = []
    digests: list[tuple[int, str]] = []
    made: Manifest | None = None
    for generation in generations:
        before = 0 if made is None else len(made.sources)
        own = slice(before, before + generation.sources)
        sources = found.sources[own]
        collected = _collect(settings, scans[own], known, say)
        known.update(collected.samples.digests())
        plan, totals = build_plan(collected, shard_tokens, found.identity.batch_tokens)
        if made is None:
            record = {name: value for name, value in found.record.items() if name != GENERATIONS}
            made = found.model_copy(update={"complete": True, "sources": sources, "totals": totals, "record": record})
            metadata = None
        else:
            plan = plan.behind(made.totals.shards, before)
            made = grown(made, sources, totals)
            metadata = pending_metadata(made)
        plans.append(plan)
        digests.append((generation.first_shard, plan_sha256(plan, metadata)))
    assert made is not None
    if generations_of(made) != generations or made.totals != found.totals:
        raise CacheError(
            f"{settings.options.out} was planned with {found.totals.samples} samples in {found.totals.shards} shards, the same data now "
            f"gives {made.totals.samples} in {made.totals.shards}: use the versions that made it ({found.record}), or another --out"
        )
    return Joined(plans), digests


def _collect(settings: Settings, scans: Sequence[Scan], known: Set[bytes], say: Say) -> Collected:
    return collect(
        settings.chat,
        scans,
        sample_rules(settings),
        lambda done, total: say.progress("reading", done, total),
        known,
        spool_folder(settings.options.out),
    )
