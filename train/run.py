"""`dflash train`: the loop. Cache in; config.yaml, provenance.json, metrics.jsonl, checkpoints/ and draft/ out."""

import time
from dataclasses import dataclass
from shlex import quote
from typing import Any

from schemas.errors import Bystander, Interrupted, TrainFault
from schemas.options import TrainOptions
from schemas.ranks import ALONE, Ranks
from schemas.say import Say, Silent
from train.batch import Batch, read_batches
from train.checkpoint import Best, Checkpoint, TrainState
from train.evaluate import val_line
from train.export import export_draft
from train.faults import report_not_finite
from train.interrupt import Interrupt
from train.metrics import add_sums, append_line, peak_memory_gb, read_lines, train_line
from train.optim import learning_rate
from train.prefetch import Prefetch
from train.rundir import CHECKPOINTS, CONFIG
from train.setup import Job, prepare
from train.sharding import whole_all
from train.step import NotFinite, run_step, take_window
from train.stream import StreamState, stream
from train.team import Team, assemble
from train.trackers import Trackers, open_trackers
from train.writer import CheckpointWriter

READ_AHEAD = 4
SHOWN = {
    "train/loss": "loss",
    "train/accept_len": "accept_len",
    "val/walk": "held_out",
    "train/tokens_per_s": "tokens/s",
    "train/data_wait": "data_wait",
    "train/memory_gb": "GB",
}


@dataclass(frozen=True)
class TrainSummary:
    """What a finished run came to: its folder, its steps, the draft's parameters, which checkpoint the draft is, the last figures."""

    run: str
    steps: int
    parameters: int
    checkpoint: str
    metrics: dict[str, float]


def train(
    options: TrainOptions,
    cache: str,
    out: str,
    resume: str | bool,
    say: Say,
    ranks: Ranks = ALONE,
    partial: bool = False,
) -> TrainSummary | None:
    """Train a draft on a cache into the run folder `out`; `resume` True goes on from its newest checkpoint, a name from that one.

    `partial`: of a cache that still grows, train on the shards that are committed now; resumed, the run stays with those.
    With `ranks` this is one of several processes that share every step: the first speaks, writes and returns what the run came to,
    the others None. Raises UserError's kinds (options, cache, folder), TrainFault (a loss that is not finite),
    Interrupted after SIGTERM, when the state is saved, and Bystander where another process has failed. A resumed run ends with the
    bits of the uninterrupted one, if it has as many ranks.
    """
    with assemble(ranks, options.run.device) as team:
        summary = _train(options, cache, out, resume, say if team.first else Silent(), team, partial)
        team.wait()
        return summary


def _train(
    options: TrainOptions, cache: str, out: str, resume: str | bool, say: Say, team: Team, partial: bool
) -> TrainSummary | None:
    job = prepare(options, cache, out, resume, say, team, partial)
    run = job.options.run
    parameters = sum(parameter.numel() for parameter in job.learner.draft.parameters())
    say.note(
        f"training {job.options.draft.kind}, {parameters:,} parameters, for {job.steps} steps on layers {_list(job.cache.layers)}"
        + (f", over {team.world} ranks" if team.world > 1 else "")
    )
    micros = stream(job.order, StreamState(job.start.epoch, job.start.position), team.ranks.rank, team.world)
    with (
        Interrupt() as interrupt,
        Prefetch(read_batches(job.cache, job.draw, micros), READ_AHEAD) as ready,
        open_trackers(job.run, job.options, job.start.step) if team.first else Trackers([]) as trackers,
    ):
        with CheckpointWriter(job.run / CHECKPOINTS, run.keep) as writer:
            state = _loop(job, ready, writer, trackers, interrupt, say)
        if not team.first:
            return None
        exported = export_draft(job.run, job.learner, state, run)
    lines = [line for line in read_lines(job.run) if "train/lr" in line]
    return TrainSummary(out, state.step, parameters, exported.checkpoint, lines[-1] if lines else {})


def is_over(state: TrainState, steps: int, patience: int | None) -> bool:
    """Whether a run has done its steps, or has waited long enough for a better evaluation."""
    return state.step >= steps or (patience is not None and state.stale >= patience)


def _loop(
    job: Job, batches: Prefetch[Batch], writer: CheckpointWriter, trackers: Trackers, interrupt: Interrupt, say: Say
) -> TrainState:
    """Step until the run is over or SIGTERM arrives. `state` is at all times what a checkpoint would hold."""
    run, state, team = job.options.run, job.start, job.team
    while not is_over(state, job.steps, run.patience):
        state, epoch, lr = _advance(job, batches, state)
        step, before = state.step, state.best
        lines: list[dict[str, Any]] = []
        if step == job.steps or step % run.log_every == 0:
            line = train_line(step, epoch, lr, state.sums, job.options.loss.selector_weight)
            lines.append(line | {"train/memory_gb": peak_memory_gb(job.learner.device)})
            state = state.model_copy(update={"sums": {}})
        if job.held_out.every and (step == job.steps or step % job.held_out.every == 0):
            figures = val_line(job.learner, job.cache, job.held_out.rows, team)
            lines.append({"step": step, "epoch": epoch} | figures)
            state = judged(state, figures["val/walk"])
        for line in lines:
            if team.first:
                append_line(job.run, line)
            trackers.write(line)
            state = state.model_copy(update={"metrics": state.metrics | line})
        shown = {shown: state.metrics.get(key) for key, shown in SHOWN.items()}
        say.progress("train", step, job.steps, **{name: value for name, value in shown.items() if value is not None})
        over, stopped = is_over(state, job.steps, run.patience), team.any(interrupt.arrived)
        if over or stopped or state.best != before or step % run.checkpoint_every == 0:
            optimizers = job.learner.optimizers
            model, memory = (whole_all(each, team.first) for each in (optimizers.parameters, optimizers.state()))
            if team.first:
                writer.save(Checkpoint(model, memory, state))
        if stopped and not over:
            writer.wait()
            # Whoever started the processes may end them all when the first has ended.
            team.wait()
            stop, launcher = f"stopped by SIGTERM at step {step} of {job.steps}, all saved", ""
            if team.world > 1:
                say.note(stop)
                launcher = " in the same launcher"
            raise Interrupted(f"{stop}: go on with `{_command(job)}`{launcher}")
    if state.step < job.steps:
        say.note(
            f"stopped at step {state.step} of {job.steps}: {state.stale} evaluations without a better one (run.patience)"
        )
    return state


def _advance(job: Job, batches: Prefetch[Batch], state: TrainState) -> tuple[TrainState, int, float]:
    """One step: the state after it, the epoch it was in, and its learning rate."""
    started, waited = time.perf_counter(), batches.waited
    window = take_window(batches, job.options.optim.accumulate)
    lr = learning_rate(state.step, job.steps, job.options.optim)
    sums = dict(state.sums)
    try:
        add_sums(sums, run_step(job.learner, window, lr))
    except NotFinite as fault:
        if not job.team.first:
            raise Bystander(str(fault)) from None
        raise TrainFault(report_not_finite(job.run, job.cache, state.step + 1, lr, fault)) from None
    # The clock is the first rank's, the waiting the mean over ranks: all wait for the slowest.
    waits = job.team.sums({"waited": (batches.waited - waited) / job.team.world})
    add_sums(sums, waits | {"seconds": time.perf_counter() - started})
    last = window[-1].micro
    place = {"step": state.step + 1, "epoch": last.resume.epoch, "position": last.resume.position}
    return state.model_copy(update={**place, "sums": sums}), last.epoch, lr


def judged(state: TrainState, walk: float | None) -> TrainState:
    """The state after an evaluation: a better walk acceptance is the best, any other one more without. None is no figure."""
    if walk is not None and (state.best is None or walk > state.best.walk):
        return state.model_copy(update={"best": Best(step=state.step, walk=walk), "stale": 0})
    return state.model_copy(update={"stale": state.stale + 1})


def _command(job: Job) -> str:
    run = job.run
    return f"dflash train --cache {quote(job.cache.path)} --out {quote(str(run))} --config {quote(str(run / CONFIG))} --resume"


def _list(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers))
