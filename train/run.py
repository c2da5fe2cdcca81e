"""`dflash train`: the loop. Cache in; config.yaml, provenance.json, metrics.jsonl, checkpoints/ and draft/ out."""

import time
from dataclasses import dataclass
from shlex import quote
from typing import Any

from schemas.errors import Interrupted, TrainFault
from schemas.options import TrainOptions
from schemas.say import Say
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
from train.step import NotFinite, run_step, take_window
from train.stream import StreamState, stream
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
    options: TrainOptions, cache: str, out: str, resume: str | bool, say: Say, partial: bool = False
) -> TrainSummary:
    """Train a draft on a cache into the run folder `out`; `resume` True goes on from its newest checkpoint, a name from that one.

    `partial`: of a cache that still grows, train on the shards that are committed now; resumed, the run stays with those.
    Raises UserError's kinds (options, cache, folder), TrainFault (nothing to train on, a loss that is not finite) and
    Interrupted after SIGTERM, when the state is saved. A resumed run ends with the bits of the uninterrupted one.
    """
    job = prepare(options, cache, out, resume, say, partial)
    run = job.options.run
    parameters = sum(parameter.numel() for parameter in job.learner.draft.parameters())
    say.note(
        f"training {job.options.draft.kind}, {parameters:,} parameters, for {job.steps} steps on layers {_list(job.cache.layers)}"
    )
    micros = stream(job.order, StreamState(job.start.epoch, job.start.position))
    with (
        Interrupt() as interrupt,
        Prefetch(read_batches(job.cache, job.draw, micros), READ_AHEAD) as ready,
        open_trackers(job.run, job.options, job.start.step) as trackers,
    ):
        with CheckpointWriter(job.run / CHECKPOINTS, run.keep) as writer:
            state = _loop(job, ready, writer, trackers, interrupt, say)
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
    run, state = job.options.run, job.start
    while not is_over(state, job.steps, run.patience):
        state, epoch, lr = _advance(job, batches, state)
        step, before = state.step, state.best
        lines: list[dict[str, Any]] = []
        if step == job.steps or step % run.log_every == 0:
            line = train_line(step, epoch, lr, state.sums, job.options.loss.selector_weight)
            lines.append(line | {"train/memory_gb": peak_memory_gb(job.learner.device)})
            state = state.model_copy(update={"sums": {}})
        if job.held_out.every and (step == job.steps or step % job.held_out.every == 0):
            figures = val_line(job.learner, job.cache, job.held_out.rows)
            lines.append({"step": step, "epoch": epoch} | figures)
            state = judged(state, figures["val/walk"])
        for line in lines:
            append_line(job.run, line)
            trackers.write(line)
            state = state.model_copy(update={"metrics": state.metrics | line})
        shown = {shown: state.metrics.get(key) for key, shown in SHOWN.items()}
        say.progress("train", step, job.steps, **{name: value for name, value in shown.items() if value is not None})
        over = is_over(state, job.steps, run.patience)
        if over or interrupt.arrived or state.best != before or step % run.checkpoint_every == 0:
            writer.save(Checkpoint(job.learner.draft.state_dict(), job.learner.optimizers.state(), state))
        if interrupt.arrived and not over:
            writer.wait()
            raise Interrupted(
                f"stopped by SIGTERM at step {step} of {job.steps}, all saved: go on with `{_command(job)}`"
            )
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
        raise TrainFault(report_not_finite(job.run, job.cache, state.step + 1, lr, window, fault)) from None
    add_sums(sums, {"seconds": time.perf_counter() - started, "waited": batches.waited - waited})
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
