"""From options to a run that is ready to step: everything is checked before anything is written."""

from dataclasses import dataclass
from pathlib import Path

import torch

from cache.layout import read_root
from cache.read import Cache, open_cache
from cache.store import open_store
from draft.files import check_place
from draft.model import new_draft
from draft.shape import draft_config
from schemas.errors import OptionError, TrainFault
from schemas.options import TrainOptions
from schemas.say import Say
from train.batch import Draw, first_anchor
from train.checkpoint import TrainState
from train.optim import make_optimizers
from train.resolve import resolve_options
from train.resume import clear_after, restore, where_to_begin
from train.rundir import CHECKPOINTS, DRAFT, provenance_of, write_run
from train.step import Learner
from train.stream import Order, order_of, sample_order, steps_of


@dataclass(frozen=True)
class Job:
    """A run that is ready: resolved options, what it reads, what it updates, how long, and where it begins."""

    run: Path
    options: TrainOptions
    cache: Cache
    learner: Learner
    order: Order
    draw: Draw
    steps: int
    start: TrainState


def prepare(options: TrainOptions, cache_path: str, out: str, resume: str | bool, say: Say) -> Job:
    """Resolve, check and load all, then write the run's config and provenance. Nothing is written where an error is raised."""
    if "://" in out:
        raise OptionError(f"--out {out}: only a cache can lie in an object store: give a local folder")
    manifest = read_root(open_store(cache_path))
    options = resolve_options(options, manifest.identity, say)
    cache = open_cache(cache_path, options.run.layers)
    _check_val(options, cache)
    order = order_of(cache.index, options.data.seed, options.data.window, options.data.batch_tokens)
    learner = _learner(options, cache)
    steps = _steps(options, order)
    run, provenance = Path(out), provenance_of(cache, cache_path)
    checkpoint = where_to_begin(run, options, provenance, resume, steps, say)
    # The last thing a run writes; better refused now than after hours of steps.
    check_place(run / DRAFT, learner.draft.config, options.run.draft_dtype)
    if first_anchor(cache, options.draft.block_size, order.row_S[sample_order(order, 0)].tolist()) is None:
        raise TrainFault(
            f"none of the {len(order.row_S)} training samples of {cache_path} has a supervised token followed by another within a "
            f"block of {options.draft.block_size}: capture other conversations"
        )
    start = TrainState(step=0, epoch=0, position=0, sums={})
    if checkpoint is not None:
        restore(learner, checkpoint, run / CHECKPOINTS)
        start = checkpoint.state
    clear_after(run, start.step, say)
    write_run(run, options, provenance)
    draw = Draw.of(options.draft.block_size, options.data, options.loss)
    return Job(run, options, cache, learner, order, draw, steps, start)


def _learner(options: TrainOptions, cache: Cache) -> Learner:
    identity = cache.manifest.identity
    config = draft_config(cache.target_config, identity, cache.layers, options.draft)
    device = torch.device(options.run.device)
    precision = torch.bfloat16 if options.run.precision == "bfloat16" else torch.float32
    # A generator takes 64 bits; the seed may be any integer.
    draft = new_draft(config, torch.Generator().manual_seed(options.data.seed % 2**63)).to(device)
    optimizers = make_optimizers(dict(draft.named_parameters()), options.optim)
    head = cache.head().to(device, precision)
    return Learner(draft, head, optimizers, options.loss, options.optim.clip, identity.mask_token_id, device, precision)


def _steps(options: TrainOptions, order: Order) -> int:
    if options.run.steps is not None:
        return options.run.steps
    assert options.run.epochs is not None
    return steps_of(order, options.run.epochs, options.optim.accumulate)


def _check_val(options: TrainOptions, cache: Cache) -> None:
    if not options.run.eval_every:
        return
    held_out = [row for row, split in enumerate(cache.index["split"].to_pylist()) if split == "val"]
    if first_anchor(cache, options.draft.block_size, held_out) is None:
        raise OptionError(
            f"run.eval_every={options.run.eval_every}, but {cache.path} holds no held-out samples with an anchor: set it to 0, or "
            "capture with a larger --val-fraction"
        )
