"""What a capture has to do, by what lies in its place already: nothing, what is missing, or all of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cache.append import begin_append, resume_append
from cache.codecs import Channels
from cache.disk import check_free, needed_bytes
from cache.generations import MERGED, generations_of, way_to_mend
from cache.layout import read_channels
from cache.store import open_store
from cache.verify import forget, verify
from cache.write import CacheWriter, check_same, existing_manifest
from capture.append import addition, appendable, plan_again, plan_append
from capture.lines import Scan
from capture.plan import Shards
from capture.planning import plan_capture, tell_plan
from capture.recall import recall
from capture.settings import Settings, check_reading, scan_data
from schemas.arrays import WITH_OUTLIERS
from schemas.errors import CacheDamaged, CacheError, OptionError
from schemas.manifest import CONVERTED, Manifest
from schemas.say import Say
from target.tokens import mask_token


@dataclass(frozen=True)
class Job:
    """What was `found` there, and what follows: it is `done`; it is gone on with by `writer`; or it is begun by `plan`.

    `appends`: the plan is of shards behind those found. `replaced`: what was found is another capture, which goes. `earlier`:
    what was found was appended to, and is made again, each generation's shards by its own plan (first shard, plan_sha256).
    """

    found: Manifest | None
    done: Manifest | None = None
    writer: CacheWriter | None = None
    plan: tuple[Manifest, Shards] | None = None
    appends: bool = False
    replaced: bool = False
    earlier: Sequence[tuple[int, str]] = ()


def find_job(settings: Settings, say: Say, confirm: Callable[[Manifest], bool] = lambda _: True) -> Job:
    """Compare what is asked with what is there; plan what is to be begun. Nothing is written but the end of what was all there.

    `confirm` is asked, with its manifest, whether another cache may be overwritten. Raises UserError (its kinds) for a cache of
    other settings or data that may not be, and for want of disk.
    """
    out, scans = settings.options.out, scan_data(settings.options, say)
    found = existing_manifest(out)
    if settings.options.append:
        return _append_job(settings, scans, found, say)
    same = same_as(found, settings, scans)
    replaced = found is not None and same is None
    if found is not None and replaced and not confirm(found):
        raise OptionError(f"{out} is kept as it is: give another --out, or confirm --overwrite")
    if same is not None and same.complete:
        _, faults = verify(out, False, say)
        if not faults:
            say.note(f"{out} is already captured with these settings and this data: nothing to do")
            return Job(found, done=same)
        say.warn(f"{out} is damaged ({faults[0].where}: {faults[0].what}): capturing again what is")
        _check_captured(out, same)
        forget(out, faults)
        found = same = existing_manifest(out)
    if same is not None:
        _check_captured(out, same)
        if (writer := CacheWriter.resume(out)) is not None:
            return _go_on(settings, found, writer, say)
        if len(generations_of(same)) > 1:
            plan, earlier = plan_again(settings, scans, same, say)
            return Job(found, plan=(same.model_copy(update={"complete": False}), plan), earlier=earlier)
    manifest, plan, collected = plan_capture(settings, scans, say, recall(settings, scans, found, say))
    check_free(open_store(out), *needed_bytes(manifest.identity, manifest.totals.shards, plan.nbytes))
    tell_plan(manifest, collected, say)
    return Job(found, plan=(manifest, plan), replaced=replaced)


def _go_on(settings: Settings, found: Manifest | None, writer: CacheWriter, say: Say) -> Job:
    missing, out = writer.missing_shards(), settings.options.out
    if missing:
        _warn_of_pieces(settings, writer.manifest, "the remaining", say)
    say.note(
        f"{out}: going on, {len(missing)} of {writer.manifest.totals.shards - writer.first_shard} shards to do; "
        f"{writer.plan.samples:,} samples taken from the plan"
    )
    if not missing:
        return Job(found, done=writer.finish())
    check_free(writer.store, *needed_bytes(writer.manifest.identity, len(missing), writer.plan.size))
    return Job(found, writer=writer)


def _append_job(settings: Settings, scans: Sequence[Scan], found: Manifest | None, say: Say) -> Job:
    out = settings.options.out
    held, left = appendable(settings, scans, found, say)
    if not left:
        return Job(found, done=held)
    if (writer := resume_append(out)) is not None:
        return _go_on(settings, found, writer, say)
    if (planned := plan_append(settings, left, held, say)) is None:
        return Job(found, done=held)
    pending, plan, collected = planned
    added = addition(pending, held)
    check_free(open_store(out), *needed_bytes(held.identity, added.totals.shards, plan.nbytes))
    tell_plan(added, collected, say, appended=True)
    _warn_of_pieces(settings, held, "the new", say)
    return Job(found, plan=(pending, plan), appends=True)


def _warn_of_pieces(settings: Settings, begun: Manifest, which: str, say: Say) -> None:
    pieces = str(settings.options.prefill_chunk or "none")
    if (before := begun.record.get("prefill_chunk", "none")) != pieces:
        say.warn(
            f"{settings.options.out} was begun with --prefill-chunk {before}, now it is {pieces}: {which} shards differ from "
            "what they would have been by rounding"
        )


def _check_captured(out: str, manifest: Manifest) -> None:
    if CONVERTED in manifest.record:
        raise CacheError(
            f"{out} was converted from another cache, so it is not captured again: run its `dflash convert` command again (it mends "
            "what is damaged), and append again what was appended since"
        )
    if MERGED not in manifest.record:
        return
    raise CacheError(f"{out} was merged from several caches, so it cannot be captured again: {way_to_mend(manifest)}")


def known_channels(job: Job, out: str) -> Channels | None:
    """The outlier channels that shards which are there already were stored with; None where the target is to choose them."""
    if job.writer is not None:
        return job.writer.channels
    assert job.plan is not None
    identity = job.plan[0].identity
    if identity.codec not in WITH_OUTLIERS:
        return {}
    if job.found is None or job.replaced:
        return None
    try:
        return read_channels(open_store(out), identity, identity.layers)
    except CacheDamaged:  # killed before they were written, or damaged: the same are chosen again
        return None


def open_writer(job: Job, out: str, record: Mapping[str, str], channels: Channels, say: Say) -> CacheWriter:
    """The writer of a job that is not done; only here is anything removed or begun.

    `record` is what the loaded target adds to the record of a manifest that is begun, `channels` the outlier channels of int8 and
    int4.
    """
    if job.writer is not None:
        return job.writer
    assert job.plan is not None
    if job.replaced:
        say.note(f"{out}: removing what another capture left there")
        open_store(out).remove()
    manifest, plan = job.plan
    if job.appends:
        return begin_append(out, manifest, plan)
    if job.earlier:
        return CacheWriter.create(out, manifest, plan, job.earlier, channels)
    recorded = manifest.model_copy(update={"record": manifest.record | dict(record)})
    return CacheWriter.create(out, recorded, plan, channels=channels, vacant=job.found is None or job.replaced)


def same_as(found: Manifest | None, settings: Settings, scans: Sequence[Scan]) -> Manifest | None:
    """What is there already, where it is this capture; None where nothing is, or something else that may be overwritten.

    Raises CacheError for something else that may not.
    """
    if found is None:
        return None
    # A mask token that depends on the data follows from data that is compared anyway; any other is found again here.
    asked = settings.options.mask_token_id
    if asked is None and found.mask_token_source == "unused special":
        mask_id = found.identity.mask_token_id
    else:
        mask_id, _ = mask_token(settings.chat, settings.identity.target.vocab_size, asked, ())
    identity = settings.identity.model_copy(update={"mask_token_id": mask_id})
    sources = [(scan.shown, scan.sha256, scan.rows) for scan in scans]
    try:
        check_same(settings.options.out, found, identity, sources)
        check_reading(settings, found)
    except CacheError:
        if settings.options.overwrite:
            return None
        raise
    return found
