"""`dflash capture`: all is decided before the weights are loaded; then shard after shard is run and committed."""

import platform
import shutil
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
import transformers

from cache.device import resolve_device
from cache.verify import forget, verify
from cache.write import CacheWriter, check_same, existing_manifest
from capture.forward import run_shard, shard_plan
from capture.plan import Collected, build_plan, collect
from capture.samples import SampleRules
from capture.settings import Settings, settle
from schemas.arrays import bytes_per_token
from schemas.errors import CacheError, OptionError
from schemas.manifest import Manifest
from schemas.options import CaptureOptions
from schemas.say import Say
from target.head import check_head, head_file, head_tensors
from target.load import Target, load_target
from target.tokens import mask_token

TARGET_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *(
        "added_tokens.json",
        "chat_template.jinja",
        "vocab.json",
        "merges.txt",
        "vocab.txt",
        "tokenizer.model",
        "spiece.model",
    ),
)


@dataclass(frozen=True)
class DryRun:
    """What a capture would do: the manifest it would begin with, samples cut at the maximum length, and the disk."""

    manifest: Manifest
    truncated: int
    free_bytes: int


def capture(options: CaptureOptions, say: Say) -> Manifest:
    """Capture the target's hidden states into `options.out`; returns the finished cache's manifest.

    A finished cache of the same settings and data is left as it is; an unfinished one is gone on with. Raises UserError
    (its kinds) before anything is written, CaptureFault for values that must not be stored.
    """
    settings, found = settle(options, say), existing_manifest(options.out)
    same = _same_as(found, settings)
    if same is not None and same.complete:
        _, faults = verify(options.out, False, say)
        if not faults:
            say.note(f"{options.out} is already captured with these settings and this data: nothing to do")
            return same
        say.warn(f"{options.out} is damaged ({faults[0].where}: {faults[0].what}): capturing again what is")
        forget(options.out, faults)
        found = same = existing_manifest(options.out)
    writer = None if same is None else CacheWriter.resume(options.out)
    if writer is not None:
        missing = writer.missing_shards()
        say.note(f"{options.out}: going on, {len(missing)} of {writer.manifest.totals.shards} shards to do")
        return _run(settings, _load(settings), writer, missing, say) if missing else writer.finish()
    manifest, table, collected = plan_capture(settings, say)
    needed, free = _disk(manifest), _free_bytes(options.out)
    if needed > free:
        raise OptionError(
            f"{options.out} needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free: free some, capture fewer layers "
            "or rows, or give another --out"
        )
    _tell(manifest, collected, say)
    # Before anything is written or removed: weights that cannot be used must not cost a folder.
    target = _load(settings)
    if existing_manifest(options.out) != found:
        say.note(f"{options.out}: another capture came first while this one was planned")
        return capture(options, say)
    if found is not None and same is None:
        say.note(f"{options.out}: removing what another capture left there")
        _remove(options.out)
    writer = CacheWriter.create(options.out, manifest, table)
    return _run(settings, target, writer, writer.missing_shards(), say)


def dry_run(options: CaptureOptions, say: Say) -> DryRun:
    """Plan as `capture` would and write nothing. Raises the same UserErrors."""
    settings = settle(options, say)
    _same_as(existing_manifest(options.out), settings)
    manifest, _, collected = plan_capture(settings, say)
    _tell(manifest, collected, say)
    return DryRun(manifest, collected.truncated, _free_bytes(options.out))


def _same_as(found: Manifest | None, settings: Settings) -> Manifest | None:
    """What is there already, where it is this capture; None where nothing is, or something else that may be overwritten."""
    if found is None:
        return None
    # A mask token that depends on the data follows from data that is compared anyway; any other is found again here.
    asked = settings.options.mask_token_id
    if asked is None and found.mask_token_source == "unused special":
        mask_id = found.identity.mask_token_id
    else:
        mask_id, _ = mask_token(settings.chat, settings.identity.target.vocab_size, asked, ())
    identity = settings.identity.model_copy(update={"mask_token_id": mask_id})
    sources = [(scan.shown, scan.sha256, scan.rows) for scan in settings.scans]
    try:
        check_same(settings.options.out, found, identity, sources)
    except CacheError:
        if settings.options.overwrite:
            return None
        raise
    return found


def plan_capture(settings: Settings, say: Say) -> tuple[Manifest, pa.Table, Collected]:
    """Read and tokenise the data, choose the mask token, lay out the shards. Raises UserError (its kinds)."""
    options, identity = settings.options, settings.identity
    vocab_size = identity.target.vocab_size
    rules = SampleRules(
        identity.tokenizer_sha256, vocab_size, options.max_length, options.val_fraction, options.skip_bad_rows
    )
    collected = collect(settings.chat, settings.scans, rules, lambda done, total: say.progress("reading", done, total))
    mask_id, mask_source = mask_token(settings.chat, vocab_size, options.mask_token_id, collected.seen)
    table, totals = build_plan(collected, identity.shard_tokens, identity.batch_tokens)
    positions = getattr(settings.config.get_text_config(), "max_position_embeddings", None)
    longest = max(len(sample.input_ids) for sample in collected.samples)
    if positions is not None and longest > positions:
        say.warn(
            f"the longest sample has {longest} tokens, the target was made for {positions}: consider --max-length "
            f"{positions}"
        )
    manifest = Manifest(
        complete=False,
        identity=identity.model_copy(update={"mask_token_id": mask_id}),
        sources=collected.sources,
        totals=totals,
        mask_token_source=mask_source,
        record={
            "dflash-pipeline": version("dflash-pipeline"),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "device": resolve_device(options.device).type,
            "attn": options.attn,
        },
    )
    return manifest, table, collected


def _tell(manifest: Manifest, collected: Collected, say: Say) -> None:
    totals, token = manifest.totals, manifest.identity.mask_token_id
    say.note(f"mask token: {token} ({manifest.mask_token_source})")
    for source in manifest.sources:
        skipped = ", ".join(f"{count} {reason}" for reason, count in source.skipped.items()) or "none skipped"
        say.note(f"{source.path}: {source.kept} of {source.rows} rows kept ({skipped})")
    if collected.truncated:
        say.note(f"{collected.truncated} samples cut at {manifest.identity.max_length} tokens")
    if collected.duplicates:
        say.note(f"{collected.duplicates} exact duplicates are captured once")
    if collected.retokenised:
        say.warn(f"{collected.retokenised} rows bring ids of another tokenizer: their text was tokenised anew")
    if totals.val_samples == 0 and manifest.identity.val_fraction > 0:
        say.warn("no sample falls into the held-out part: raise --val-fraction, or nothing can be evaluated")
    if totals.val_samples == totals.samples:
        say.warn("every sample falls into the held-out part: lower --val-fraction, or nothing can be trained on")


def _load(settings: Settings) -> Target:
    # The target, once all that is needed of it is known to be there.
    options, identity = settings.options, settings.identity
    target = load_target(settings.ref, identity.dtype, options.device, options.attn)
    check_head(target, settings.traits)
    head_tensors(target, identity.target.tied)
    return target


def _run(settings: Settings, target: Target, writer: CacheWriter, missing: list[int], say: Say) -> Manifest:
    identity = writer.manifest.identity
    writer.put_file("target/head.safetensors", head_file(target, identity.target.tied))
    for name in TARGET_FILES:
        if (path := settings.ref.folder / name).is_file():
            writer.put_file(f"target/{name}", path.read_bytes())
    total = _tokens_of(writer.plan, missing)
    done, begun = 0, time.monotonic()

    def after_batch(tokens: int) -> None:
        nonlocal done
        done += tokens
        say.progress("capture", done, total, tokens_per_s=done / max(time.monotonic() - begun, 1e-9))

    for shard in missing:
        plan = shard_plan(writer.plan, shard, identity.shard_tokens)
        writer.commit_shard(shard, run_shard(target, settings.traits, identity, plan, after_batch))
    return writer.finish()


def _tokens_of(plan: pa.Table, shards: list[int]) -> int:
    wanted = np.isin(plan["shard"].to_numpy(), shards)
    return int(plan["length"].to_numpy()[wanted].sum())


def _disk(manifest: Manifest) -> int:
    return bytes_per_token(manifest.identity)[0] * manifest.totals.shards * manifest.identity.shard_tokens


def _free_bytes(out: str) -> int:
    folder = Path(out).absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _remove(out: str) -> None:
    # Renamed first: a kill in the middle must not leave half a cache under the name.
    gone = Path(out).with_name(f"{Path(out).name}.removed")
    shutil.rmtree(gone, ignore_errors=True)
    Path(out).rename(gone)
    shutil.rmtree(gone)
