"""`dflash train`: the loop. Cache in; config.yaml, provenance.json, metrics.jsonl, checkpoints/ and draft/ out."""

import time
from dataclasses import dataclass
from shlex import quote

from draft.files import save_draft
from schemas.errors import Interrupted, TrainFault
from schemas.options import TrainOptions
from schemas.say import Say
from train.batch import Batch, read_batches
from train.checkpoint import Checkpoint, TrainState, save_checkpoint
from train.evaluate import val_line
from train.interrupt import Interrupt
from train.metrics import add_sums, append_line, read_lines, train_line
from train.optim import learning_rate
from train.prefetch import Prefetch
from train.rundir import CHECKPOINTS, CONFIG, DRAFT
from train.setup import Job, prepare
from train.step import NotFinite, run_step, take_window
from train.stream import StreamState, stream

READ_AHEAD = 4
SHOWN = {
    "train/loss": "loss",
    "train/accept_len": "accept_len",
    "train/tokens_per_s": "tokens/s",
    "train/data_wait": "data_wait",
}


@dataclass(frozen=True)
class TrainSummary:
    """What a finished run came to: its folder, its steps, the draft's parameters, the last line of its training metrics."""

    run: str
    steps: int
    parameters: int
    metrics: dict[str, float]


def train(options: TrainOptions, cache: str, out: str, resume: str | bool, say: Say) -> TrainSummary:
    """Train a draft on a cache into the run folder `out`; `resume` True goes on from its newest checkpoint, a name from that one.

    Raises UserError's kinds (options, cache, folder), TrainFault (nothing to train on, a loss that is not finite) and
    Interrupted after SIGTERM, when the state is saved. A resumed run ends with the bits of the uninterrupted one.
    """
    job = prepare(options, cache, out, resume, say)
    parameters = sum(parameter.numel() for parameter in job.learner.draft.parameters())
    say.note(
        f"training {job.options.draft.kind}, {parameters:,} parameters, for {job.steps} steps on layers {_list(job.cache.layers)}"
    )
    micros = stream(job.order, StreamState(job.start.epoch, job.start.position))
    batches = read_batches(job.cache, job.draw, micros)
    with Interrupt() as interrupt, Prefetch(batches, READ_AHEAD) as ready:
        _loop(job, ready, interrupt, say)
        save_draft(job.run / DRAFT, job.learner.draft, job.options.run.draft_dtype)
    lines = [line for line in read_lines(job.run) if "train/lr" in line]
    return TrainSummary(out, job.steps, parameters, lines[-1] if lines else {})


def _loop(job: Job, batches: Prefetch[Batch], interrupt: Interrupt, say: Say) -> None:
    """Step until the run is done or SIGTERM arrives."""
    run = job.options.run
    step, sums = job.start.step, dict(job.start.sums)
    while step < job.steps:
        started, waited = time.perf_counter(), batches.waited
        window = take_window(batches, job.options.optim.accumulate)
        lr = learning_rate(step, job.steps, job.options.optim)
        try:
            add_sums(sums, run_step(job.learner, window, lr))
        except NotFinite as fault:
            raise TrainFault(_explain(job, step, fault)) from None
        step, last = step + 1, window[-1].micro
        add_sums(sums, {"seconds": time.perf_counter() - started, "waited": batches.waited - waited})
        done = step == job.steps
        if done or step % run.log_every == 0:
            line = train_line(step, last.epoch, lr, sums, job.options.loss.selector_weight)
            append_line(job.run, line)
            say.progress("train", step, job.steps, **{shown: line[key] for key, shown in SHOWN.items() if key in line})
            sums = {}
        if run.eval_every and (done or step % run.eval_every == 0):
            append_line(job.run, {"step": step, "epoch": last.epoch} | val_line(job.learner.draft, job.cache))
        if done or interrupt.arrived or step % run.checkpoint_every == 0:
            _save(job, TrainState(step=step, epoch=last.resume.epoch, position=last.resume.position, sums=sums))
        if interrupt.arrived and not done:
            raise Interrupted(
                f"stopped by SIGTERM at step {step} of {job.steps}, all saved: go on with `{_command(job)}`"
            )


def _command(job: Job) -> str:
    run = job.run
    return f"dflash train --cache {quote(job.cache.path)} --out {quote(str(run))} --config {quote(str(run / CONFIG))} --resume"


def _save(job: Job, state: TrainState) -> None:
    learner = job.learner
    checkpoint = Checkpoint(learner.draft.state_dict(), learner.optimizers.state(), state)
    save_checkpoint(job.run / CHECKPOINTS, checkpoint, job.options.run.keep)


def _explain(job: Job, step: int, fault: NotFinite) -> str:
    names = [job.cache.index["sample_id"][row].as_py() for row in fault.rows[:8]]
    more = f" and {len(fault.rows) - len(names)} more" if len(fault.rows) > len(names) else ""
    return (
        f"step {step + 1}: the {fault.what} is {fault.value}, before the update; samples {', '.join(names)}{more}: look at them with "
        "`dflash inspect`, or lower optim.lr"
    )


def _list(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers))
