"""What a capture has to do, by what lies in its place already: nothing, what is missing, or all of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from cache.store import open_store
from cache.verify import forget, verify
from cache.write import CacheWriter, check_same, existing_manifest
from capture.lines import Scan
from capture.planning import check_disk, plan_capture, tell_plan
from capture.settings import Settings, check_reading, scan_data
from schemas.errors import CacheError
from schemas.manifest import Manifest
from schemas.say import Say
from target.tokens import mask_token


@dataclass(frozen=True)
class Job:
    """What was `found` there, and what follows: it is `done`; it is gone on with by `writer`; or it is begun by `plan`.

    `replaced`: what was found is another capture, which goes.
    """

    found: Manifest | None
    done: Manifest | None = None
    writer: CacheWriter | None = None
    plan: tuple[Manifest, pa.Table] | None = None
    replaced: bool = False


def find_job(settings: Settings, say: Say) -> Job:
    """Compare what is asked with what is there; plan what is to be begun. Nothing is written but the end of what was all there.

    Raises UserError (its kinds) for a cache of other settings or data that may not be overwritten, and for want of disk.
    """
    out, scans = settings.options.out, scan_data(settings.options, say)
    found = existing_manifest(out)
    same = same_as(found, settings, scans)
    if same is not None and same.complete:
        _, faults = verify(out, False, say)
        if not faults:
            say.note(f"{out} is already captured with these settings and this data: nothing to do")
            return Job(found, done=same)
        say.warn(f"{out} is damaged ({faults[0].where}: {faults[0].what}): capturing again what is")
        forget(out, faults)
        found = same = existing_manifest(out)
    writer = None if same is None else CacheWriter.resume(out)
    if writer is not None:
        missing, pieces = writer.missing_shards(), str(settings.options.prefill_chunk or "none")
        if missing and (before := writer.manifest.record.get("prefill_chunk")) != pieces:
            say.warn(
                f"{out} was begun with --prefill-chunk {before}, now it is {pieces}: the remaining shards differ from what "
                "they would have been by rounding"
            )
        say.note(f"{out}: going on, {len(missing)} of {writer.manifest.totals.shards} shards to do")
        return Job(found, writer=writer) if missing else Job(found, done=writer.finish())
    manifest, table, collected = plan_capture(settings, scans, say)
    check_disk(out, manifest)
    tell_plan(manifest, collected, say)
    return Job(found, plan=(manifest, table), replaced=found is not None and same is None)


def open_writer(job: Job, out: str, record: Mapping[str, str], say: Say) -> CacheWriter:
    """The writer of a job that is not done; only here is anything removed or begun.

    `record` is what the loaded target adds to the record of a manifest that is begun.
    """
    if job.writer is not None:
        return job.writer
    assert job.plan is not None
    if job.replaced:
        say.note(f"{out}: removing what another capture left there")
        open_store(out).remove()
    manifest, table = job.plan
    return CacheWriter.create(out, manifest.model_copy(update={"record": manifest.record | dict(record)}), table)


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
