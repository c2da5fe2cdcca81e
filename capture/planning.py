"""From data to a plan, before the target is loaded: what will be captured, where it will lie, and whether there is room."""

import platform
from collections.abc import Sequence

import torch

from capture.collect import Collected, collect
from capture.lines import Scan
from capture.plan import Shards, build_plan
from capture.settings import Settings, reading_record, sample_rules
from capture.spool import spool_folder
from capture.tell import counts_record, first_skipped_record, tell_data, versions_record
from schemas.manifest import Manifest
from schemas.say import Say
from target.tokens import mask_token


def plan_capture(
    settings: Settings, scans: Sequence[Scan], say: Say, collected: Collected | None = None
) -> tuple[Manifest, Shards, Collected]:
    """Read and tokenise the data, unless it was `collected`, choose the mask token, lay out the shards. Raises UserError (its kinds)."""
    options, identity = settings.options, settings.identity
    vocab_size = identity.target.vocab_size
    collected = collected or collect(
        settings.chat,
        scans,
        sample_rules(settings),
        lambda done, total: say.progress("reading", done, total),
        folder=spool_folder(options.out),
    )
    mask_id, mask_source = mask_token(settings.chat, vocab_size, options.mask_token_id, collected.seen)
    plan, totals = build_plan(collected, identity.shard_tokens, identity.batch_tokens)
    positions = getattr(settings.config.get_text_config(), "max_position_embeddings", None)
    longest = int(collected.samples.lengths().max())
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
            **versions_record(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": settings.device.type,
            "attn": options.attn,
            **reading_record(settings),
            **first_skipped_record(collected.first_skipped),
            **counts_record(collected),
            "prefill_chunk": str(options.prefill_chunk or "none"),
        },
    )
    return manifest, plan, collected


def tell_plan(manifest: Manifest, collected: Collected, say: Say, appended: bool = False) -> None:
    """Say what the plan keeps, cuts and leaves out, and what is probably not meant.

    Of what is `appended` all or nothing may be held out: the cache has its share, by a --val-fraction that is settled.
    """
    totals, token = manifest.totals, manifest.identity.mask_token_id
    say.note(f"mask token: {token} ({manifest.mask_token_source})")
    tell_data(manifest, collected, say)
    if totals.val_samples == 0 and not appended and manifest.identity.val_fraction > 0:
        say.warn("no sample falls into the held-out part: raise --val-fraction, or nothing can be evaluated")
    if totals.val_samples == totals.samples and not appended:
        say.warn("every sample falls into the held-out part: lower --val-fraction, or nothing can be trained on")
