"""From options to a run that is ready to step: everything is checked before anything is written."""

from dataclasses import dataclass
from pathlib import Path

import torch

from cache.layout import read_root
from cache.read import Cache
from cache.store import open_store
from draft.files import check_place
from draft.model import new_draft
from draft.shape import draft_config
from schemas.errors import OptionError, TrainFault
from schemas.options import TrainOptions
from schemas.say import Say
from train.batch import Draw, first_anchor
from train.checkpoint import TrainState
from train.data import open_data
from train.heldout import HeldOut, choose_held_out, planned_blocks
from train.optim import make_optimizers
from train.resolve import resolve_options
from train.resume import clear_after, restore, resumed_state, say_new_length, where_to_begin
from train.rundir import CHECKPOINTS, DRAFT, provenance_of, read_options, write_run
from train.sources import source_weights
from train.step import Learner
from train.stream import Order, order_of, steps_of
from train.trackers import check_trackers


@dataclass(frozen=True)
class Job:
    """A run that is ready: resolved options, what it reads, what it updates, how long, and where it begins."""

    run: Path
    options: TrainOptions
    cache: Cache
    learner: Learner
    order: Order
    draw: Draw
    held_out: HeldOut
    steps: int
    start: TrainState


def prepare(
    options: TrainOptions, cache_path: str, out: str, resume: str | bool, say: Say, partial: bool = False
) -> Job:
    """Resolve, check and load all, then write the run's config and provenance. Nothing is written where an error is raised.

    `partial`: of a cache that still grows, the shards that are committed now are trained on.
    """
    if "://" in out:
        raise OptionError(f"--out {out}: only a cache can lie in an object store: give a local folder")
    manifest = read_root(open_store(cache_path))
    options = resolve_options(options, manifest.identity, say)
    check_trackers(options)
    cache, shards = open_data(cache_path, options.run.layers, Path(out), bool(resume), partial, say)
    cache = cache.verifying(options.data.verify_every)
    for note in cache.notes:
        say.note(note)
    weights = source_weights(options.data.sources, manifest.sources)
    order = order_of(cache.index, options.data.seed, options.data.window, options.data.batch_tokens, weights)
    _check_train(options, cache, order)
    options = _with_rate(options, cache, order, say)
    held_out = choose_held_out(options, cache, order, weights, say)
    options = options.model_copy(update={"run": options.run.model_copy(update={"eval_every": held_out.every})})
    learner = _learner(options, cache)
    steps = _steps(options, order)
    run, provenance = Path(out), provenance_of(cache, cache_path, shards)
    checkpoint = where_to_begin(run, options, provenance, resume, steps, say)
    # The last thing a run writes; better refused now than after hours of steps.
    check_place(run / DRAFT, learner.draft.config, options.run.draft_dtype)
    start = TrainState(held_out=held_out.digest)
    if checkpoint is not None:
        restore(learner, checkpoint, run / CHECKPOINTS)
        start = resumed_state(run, checkpoint.state, held_out.digest, say)
        say_new_length(start.step, _steps(read_options(run), order), steps, options.optim, say)
    clear_after(run, start.step, say)
    write_run(run, options, provenance)
    draw = Draw.of(options.draft.block_size, options.data, options.loss)
    return Job(run, options, cache, learner, order, draw, held_out, steps, start)


def _learner(options: TrainOptions, cache: Cache) -> Learner:
    identity = cache.manifest.identity
    config = draft_config(cache.target_config, identity, cache.layers, options.draft)
    device = torch.device(options.run.device)
    precision = torch.bfloat16 if options.run.precision == "bfloat16" else torch.float32
    # A generator takes 64 bits; the seed may be any integer.
    draft = new_draft(config, torch.Generator().manual_seed(options.data.seed % 2**63)).to(device)
    draft.attention = "flex" if options.run.attention == "flex" else "split"
    optimizers = make_optimizers(dict(draft.named_parameters()), options.optim)
    head = cache.head().to(device, precision)
    return Learner(draft, head, optimizers, options.loss, options.optim.clip, identity.mask_token_id, device, precision)


def _steps(options: TrainOptions, order: Order) -> int:
    if options.run.steps is not None:
        return options.run.steps
    assert options.run.epochs is not None
    return steps_of(order, options.run.epochs, options.optim.accumulate)


def _check_train(options: TrainOptions, cache: Cache, order: Order) -> None:
    """TrainFault where there is nothing to train on."""
    if first_anchor(cache, options.draft.block_size, order.row_S.tolist()) is None:
        of_sources = " of data.sources" if options.data.sources is not None else ""
        raise TrainFault(
            f"none of the {len(order.row_S)} training samples of {cache.path}{of_sources} has a supervised token followed by another "
            f"within a block of {options.draft.block_size}: capture other conversations"
        )
    if order.weight_S is not None and (expected := float(order.weight_S.sum())) < 1:
        raise OptionError(
            f"data.sources leaves {expected:.2g} of {len(order.row_S)} samples an epoch: give weights with at least one sample"
        )


def _with_rate(options: TrainOptions, cache: Cache, order: Order, say: Say) -> TrainOptions:
    """The options with `data.anchor_rate` as a number, and a word on what it comes to."""
    data = options.data
    if data.anchor_rate == "auto":
        longest = int(cache.index["supervised"].to_numpy()[order.row_S].max())
        data = data.model_copy(update={"anchor_rate": min(1.0, data.anchors / longest)})
    blocks = planned_blocks(data, cache, order)
    say.note(
        f"at most {blocks.max():,} blocks a sample, {blocks.mean():,.0f} on average (data.anchor_rate {data.anchor_rate:.3g}, "
        f"data.anchors {data.anchors})"
    )
    return options.model_copy(update={"data": data})
