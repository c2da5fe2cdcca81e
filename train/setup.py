"""From options to a run that is ready to step: everything is checked before anything is written."""

from dataclasses import dataclass
from pathlib import Path

import torch

from cache.device import resolve_device
from cache.layout import read_root
from cache.read import Cache
from cache.store import open_store
from draft.files import check_place
from draft.model import new_draft
from draft.shape import draft_config
from schemas.errors import CacheError, OptionError
from schemas.options import TrainOptions
from schemas.say import Say
from train.batch import Draw, first_anchor
from train.checkpoint import TrainState
from train.compiling import compile_layers
from train.data import open_data
from train.float8 import TILE, to_float8
from train.gradients import GradientSum
from train.heldout import HeldOut, choose_held_out, planned_blocks
from train.optim import make_optimizers
from train.resolve import resolve_options
from train.resume import clear_after, restore, resumed_state, say_new_length, where_to_begin
from train.rundir import (
    CHECKPOINTS,
    DRAFT,
    Provenance,
    provenance_of,
    read_options,
    read_provenance,
    write_run,
)
from train.sharding import shard
from train.sources import source_weights
from train.step import Learner
from train.stream import Order, StreamState, order_of, steps_left
from train.team import SOLO, Team
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
    team: Team


def prepare(
    options: TrainOptions,
    cache_path: str,
    out: str,
    resume: str | bool,
    say: Say,
    team: Team = SOLO,
    partial: bool = False,
) -> Job:
    """Resolve, check and load all, then write the run's config and provenance. Nothing is written where an error is raised.

    `partial`: of a cache that still grows, the shards that are committed now are trained on.
    Every rank does the same and sees the same files, which is checked; the first rank writes when all have read.
    """
    if "://" in out:
        raise OptionError(f"--out {out}: only a cache can lie in an object store: give a local folder")
    manifest = read_root(open_store(cache_path))
    options = resolve_options(options, manifest.identity, say, team.ranks)
    check_trackers(options)
    cache, shards = open_data(cache_path, options.run.layers, Path(out), bool(resume), partial, say, team)
    cache = cache.verifying(options.data.verify_every)
    for note in cache.notes:
        say.note(note)
    weights = source_weights(options.data.sources, manifest.sources)
    order = order_of(cache.index, options.data.seed, options.data.window, options.data.batch_tokens, weights)
    _check_train(options, cache, order)
    options = _with_rate(options, cache, order, say)
    held_out = choose_held_out(options, cache, order, weights, say, team.world)
    options = options.model_copy(update={"run": options.run.model_copy(update={"eval_every": held_out.every})})
    learner = _learner(options, cache, team, say)
    run, provenance = Path(out), provenance_of(cache, cache_path, shards, team.world)

    def length(state: TrainState) -> int:
        return _length(options, order, team.world, state)

    checkpoint = where_to_begin(run, options, provenance, resume, length, say)
    # The last thing a run writes; better refused now than after hours of steps.
    check_place(run / DRAFT, learner.draft.config, options.run.draft_dtype)
    start = TrainState(held_out=held_out.digest)
    if checkpoint is not None:
        restore(learner, checkpoint, run / CHECKPOINTS)
        start = resumed_state(run, checkpoint.state, held_out.digest, say)
        before, ranks = read_options(run), read_provenance(run).ranks
        _say_new_step(options, team.world, before, ranks, say)
        say_new_length(start.step, _length(before, order, ranks, start), length(start), options.optim, say)
    _agree(team, options, provenance, start)
    if options.run.compile:
        say.note("compiling the draft's layers (run.compile)")
        compile_layers(learner, options.optim.accumulate)
        team.wait()
    if team.first:
        clear_after(run, start.step, say)
        write_run(run, options, provenance)
    draw = Draw.of(options.draft.block_size, options.data, options.loss)
    return Job(run, options, cache, learner, order, draw, held_out, length(start), start, team)


def _learner(options: TrainOptions, cache: Cache, team: Team, say: Say) -> Learner:
    identity = cache.manifest.identity
    config = draft_config(cache.target_config, identity, cache.layers, options.draft)
    device = resolve_device(options.run.device, team.ranks)
    precision = torch.bfloat16 if options.run.precision == "bfloat16" else torch.float32
    # A generator takes 64 bits; the seed may be any integer.
    draft = new_draft(config, torch.Generator().manual_seed(options.data.seed % 2**63)).to(device)
    draft.attention = "flex" if options.run.attention == "flex" else "split"
    if options.run.float8:
        taken, left = to_float8(draft)
        odd = f", not those whose sizes are no multiples of {TILE}: {', '.join(left)}" if left else ""
        say.note(f"{len(taken)} products of the layers in float8{odd}")
    sharded = options.run.shard and team.world > 1
    if sharded:
        shard(draft, device, team.world)
    optimizers = make_optimizers(dict(draft.named_parameters()), options.optim)
    head = cache.head().to(device, precision)
    several = team.world > 1 and not sharded
    gradient_sum = GradientSum(list(optimizers.parameters.values())) if several else None
    return Learner(
        draft,
        head,
        optimizers,
        options.loss,
        options.optim.clip,
        identity.mask_token_id,
        device,
        precision,
        team,
        gradient_sum,
    )


def _length(options: TrainOptions, order: Order, world: int, state: TrainState) -> int:
    """The run's steps in all: those asked for, or those behind `state` and those left of the epochs asked for."""
    if options.run.steps is not None:
        return options.run.steps
    assert options.run.epochs is not None
    place = StreamState(state.epoch, state.position)
    return state.step + steps_left(order, place, options.run.epochs, options.optim.accumulate, world)


def _say_new_step(options: TrainOptions, world: int, before: TrainOptions, ranks: int, say: Say) -> None:
    if (now := options.optim.accumulate * world) != (then := before.optim.accumulate * ranks):
        say.warn(
            f"a step is {now} micro-batches now, {world} ranks by optim.accumulate {options.optim.accumulate}, and was {then}: for "
            f"the same run let the product be {then}"
        )


def _agree(team: Team, options: TrainOptions, provenance: Provenance, start: TrainState) -> None:
    """Return when every rank has read what it needs. OptionError where one would train another draft, or from another place."""
    mine = (options.model_dump(exclude={"log"}), provenance.index_sha256, start.step, start.epoch, start.position)
    for rank, theirs in enumerate(team.gather(mine)):
        for what, one, other in zip(("options", "cache", "step", "epoch", "position"), mine, theirs, strict=True):
            if one != other:
                raise OptionError(
                    f"rank {team.ranks.rank} and rank {rank} have different {what} ({str(one)[:80]}, {str(other)[:80]}): give all the "
                    "same command, cache and --out, on disks that all machines see"
                )


def _check_train(options: TrainOptions, cache: Cache, order: Order) -> None:
    """CacheError where there is nothing to train on."""
    of_sources = " of data.sources" if options.data.sources is not None else ""
    if not len(order.row_S):
        raise CacheError(
            f"{cache.path} holds no training samples{of_sources}, all are held out: capture with a smaller --val-fraction, or more data"
        )
    if first_anchor(cache, options.draft.block_size, order.row_S.tolist()) is None:
        raise CacheError(
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
