"""`dflash capture`: all is decided before the weights are loaded; then shard after shard is run and committed."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cache.store import open_store
from cache.target_files import FOLDER, HEAD, checksums_record, file_fault
from cache.write import CacheWriter, existing_manifest
from capture.append import addition, appendable, plan_append
from capture.calibrate import calibrate, first_samples
from capture.crew import Crew, gather
from capture.job import Job, find_job, known_channels, open_writer, same_as
from capture.planning import plan_capture, tell_plan
from capture.progress import Progress
from capture.recall import recall
from capture.settings import Settings, scan_data, settle
from capture.shards import run_shards
from schemas.errors import CacheError
from schemas.manifest import Manifest
from schemas.options import CaptureOptions
from schemas.ranks import ALONE, Ranks
from schemas.say import Say, Silent
from target.head import check_head, head_file, head_tensors
from target.load import Target, load_target
from target.parallel import parallel_group
from target.prefill import check_pieces
from target.probe import check_decoder
from target.traits import target_record

TARGET_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.jinja", "vocab.json", "merges.txt", "vocab.txt"),
    *("tokenizer.model", "spiece.model"),
)


@dataclass(frozen=True)
class DryRun:
    """What a capture would do: the manifest it would begin with, samples cut at the maximum length, and the disk, where one bounds it."""

    manifest: Manifest
    truncated: int
    free_bytes: int | None


def capture(
    options: CaptureOptions, say: Say, ranks: Ranks = ALONE, confirm: Callable[[Manifest], bool] = lambda _: True
) -> Manifest | None:
    """Capture the target's hidden states into `options.out`; the first process returns the finished cache's manifest.

    A finished cache of the same settings and data is left as it is; an unfinished one is gone on with. `confirm` is asked
    before --overwrite gives up another cache, of which it gets the manifest. Every one of several processes calls this; they
    share the work shard by shard. Raises UserError (its kinds) before anything is
    written, CaptureFault for values that must not be stored, Bystander where another process failed.
    """
    with gather(ranks, options.tp) as crew:
        if ranks.first:
            return _lead(settle(options, say, ranks), crew, say, confirm)
        _follow(options, crew)
        return None


def dry_run(options: CaptureOptions, say: Say) -> DryRun | None:
    """Plan as `capture` would and write nothing; None where nothing is to append. Raises the same UserErrors."""
    settings, scans = settle(options, say), scan_data(options, say)
    found = existing_manifest(options.out)
    if options.append:
        held, left = appendable(settings, scans, found, say)
        if not left or (planned := plan_append(settings, left, held, say)) is None:
            return None
        manifest, collected = addition(planned[0], held), planned[2]
    else:
        same_as(found, settings, scans)
        manifest, _, collected = plan_capture(settings, scans, say, recall(settings, scans, found, say))
    tell_plan(manifest, collected, say, options.append)
    return DryRun(manifest, collected.truncated, open_store(options.out).free_bytes())


def _lead(settings: Settings, crew: Crew, say: Say, confirm: Callable[[Manifest], bool]) -> Manifest:
    """The first process: decides what there is to do, does its share, and finishes when every shard is in."""
    out, job = settings.options.out, find_job(settings, say, confirm)
    crew.tell("work", "nothing" if job.done else "load")
    if job.done:
        open_store(out).clean_workspaces()
        return job.done
    with parallel_group(crew.store, crew.replica, crew.member, crew.tp, settings.device):
        # Before anything is written or removed: weights that cannot be used must not cost a folder.
        target = _load(settings)
        head = head_file(target, settings.identity.target.tied)
        crew.tell("loaded/0")
        crew.hear_all("loaded")
        job = _look_again(job, settings, say, confirm)
        if job.done:
            crew.tell("calibrate", "[]")
            crew.tell("shards", "[]")
            return job.done
        channels = known_channels(job, out)
        samples = first_samples(job.plan[1]) if channels is None and job.plan else "[]"
        crew.tell("calibrate", samples)
        chosen = calibrate(target, settings.identity.layers, samples, settings.options.prefill_chunk)
        files = _target_files(settings, head)
        record = target_record(target) | checksums_record(files)
        writer = open_writer(job, out, record, chosen if channels is None else channels, say)
        # From here on the plan is read shard by shard, so that memory does not grow with the data.
        del job
        _put_target(writer, files)
        missing = writer.missing_shards()
        crew.tell("shards", json.dumps(missing))
        progress = Progress(crew, writer.plan.tokens(missing), say)
        run_shards(target, settings.traits, writer, missing, crew, progress, settings.options.prefill_chunk)
        crew.tell("done/0")
        crew.hear_all("done", progress.wait)
        progress.show(at_once=True)
        return writer.finish()


def _follow(options: CaptureOptions, crew: Crew) -> None:
    """Every other process: does its share of what the first one found to do."""
    rank = crew.ranks.rank
    # Only now, so that a mistake of the user's is found, and said, by the first process alone.
    if crew.hear("work") == "nothing":
        return
    settings = settle(options, Silent(), crew.ranks)
    with parallel_group(crew.store, crew.replica, crew.member, crew.tp, settings.device):
        target = _load(settings)
        head_file(target, settings.identity.target.tied)
        crew.tell(f"loaded/{rank}")
        if crew.replica == 0:
            calibrate(target, settings.identity.layers, crew.hear("calibrate"), options.prefill_chunk)
        missing = json.loads(crew.hear("shards"))
        if missing:
            writer = CacheWriter.resume(options.out)
            assert writer is not None, "the first process began it"
            progress = Progress(crew, 0, Silent())
            run_shards(target, settings.traits, writer, missing, crew, progress, options.prefill_chunk)
            writer.store.clean_workspaces()
        crew.tell(f"done/{rank}")


def _look_again(job: Job, settings: Settings, say: Say, confirm: Callable[[Manifest], bool]) -> Job:
    # Loading takes minutes, in which another capture may have begun or finished the same cache.
    while existing_manifest(settings.options.out) != job.found:
        say.note(f"{settings.options.out}: another capture came first while this one was planned")
        job = find_job(settings, say, confirm)
    return job


def _load(settings: Settings) -> Target:
    # The target, once all that is needed of it is known to be there.
    options, identity = settings.options, settings.identity
    target = load_target(settings.ref, identity.dtype, str(settings.device), options.attn, options.tp)
    check_head(target, settings.traits)
    check_decoder(target, settings.traits)
    if options.prefill_chunk is not None:
        check_pieces(target, options.prefill_chunk)
    head_tensors(target, identity.target.tied)
    return target


def _target_files(settings: Settings, head: bytes) -> dict[str, bytes]:
    paths = {f"{FOLDER}/{name}": settings.ref.folder / name for name in TARGET_FILES}
    return {key: path.read_bytes() for key, path in paths.items() if path.is_file()} | {HEAD: head}


def _put_target(writer: CacheWriter, files: Mapping[str, bytes]) -> None:
    if writer.first_shard:  # what is appended to has them, and stays as it is
        return
    store, manifest = writer.store, writer.manifest
    for key, data in files.items():
        what = file_fault(manifest, key, [data])
        if what is None:
            writer.put_file(key, data)
            continue
        # Of the same weights, as another version of a library writes them: those that the manifest vouches for stay.
        held = store.get(key)
        if held is None or file_fault(manifest, key, [held]) is not None:
            raise CacheError(
                f"{store.where(key)} is missing or damaged, and this target's {what}: go on with the versions that began the capture, or "
                "give another --out or --overwrite"
            )
