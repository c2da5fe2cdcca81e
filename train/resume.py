"""Where a run begins: at step 0, or at a checkpoint of the same run, with whatever lies after it cleared away."""

from collections.abc import Callable
from pathlib import Path

import torch

from schemas.errors import DraftError
from schemas.options import OptimOptions, TrainOptions
from schemas.say import Say
from train.checkpoint import (
    Checkpoint,
    TrainState,
    checkpoint_name,
    list_checkpoints,
    load_checkpoint,
    remove_checkpoint,
)
from train.faults import FILE as NOT_FINITE
from train.metrics import cut_back
from train.optim import learning_rate
from train.rundir import CHECKPOINTS, Provenance, check_same_run, holds_run, read_provenance
from train.sharding import like
from train.step import Learner


def where_to_begin(
    run: Path,
    options: TrainOptions,
    provenance: Provenance,
    resume: str | bool,
    length: Callable[[TrainState], int],
    say: Say,
) -> Checkpoint | None:
    """The checkpoint to go on from, or None to begin; DraftError where folder, `resume` and what the run was do not fit each other.

    `length` is the number of the run's steps in all, seen from a checkpoint.
    """
    there = holds_run(run)
    checkpoints = list_checkpoints(run / CHECKPOINTS)
    if resume is False:
        if there:
            done = f"at step {max(checkpoints)}" if checkpoints else "without a checkpoint"
            raise DraftError(f"--out {run} holds a run already, {done}: go on with --resume, or give another --out")
        return None
    if not there:
        raise DraftError(f"--out {run} holds no run to resume: leave out --resume to begin one")
    check_same_run(run, options, provenance)
    _compare_versions(run, provenance, say)
    if resume is not True:
        named = {path.name: path for path in checkpoints.values()}
        path = named.get(Path(resume).name)
        # A path may lead to another run's checkpoint of the same name.
        if path is None or (resume != path.name and Path(resume).resolve() != path.resolve()):
            raise DraftError(
                f"no checkpoint {resume!r} in {run / CHECKPOINTS}: choose among {', '.join(named) or 'none'}"
            )
    elif checkpoints:
        path = checkpoints[max(checkpoints)]
    else:
        say.note(f"{run} has no checkpoint yet: beginning at step 0")
        return None
    checkpoint = load_checkpoint(path)
    steps = length(checkpoint.state)
    if checkpoint.state.step > steps:
        raise DraftError(
            f"{path} is at step {checkpoint.state.step}, beyond the {steps} asked for: give more steps, or an earlier checkpoint"
        )
    say.note(f"resuming from {path} at step {checkpoint.state.step} of {steps}")
    return checkpoint


def restore(learner: Learner, checkpoint: Checkpoint, where: Path) -> None:
    """Put a checkpoint's weights and optimizer state into place; DraftError where they are not this draft's."""
    path = str(where / checkpoint_name(checkpoint.state.step))
    expected = {name: tuple(value.shape) for name, value in learner.draft.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in checkpoint.model.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise DraftError(
                f"{path}: {name} has shape {found.get(name)}, this draft {expected.get(name)}: resume with the run's own options"
            )
    with torch.no_grad():
        for name, parameter in learner.optimizers.parameters.items():
            parameter.copy_(like(parameter, checkpoint.model[name]))
    learner.optimizers.load(checkpoint.optimizer, path)


def resumed_state(run: Path, state: TrainState, held_out: str, say: Say) -> TrainState:
    """A checkpoint's state, without its best evaluation where that cannot be gone on from: other samples, or its weights are gone."""
    if state.held_out != held_out:
        if state.best is not None:
            say.note("other held-out samples are evaluated than before: the best checkpoint is sought anew")
        return state.model_copy(update={"best": None, "stale": 0, "held_out": held_out})
    if state.best is not None and state.best.step not in list_checkpoints(run / CHECKPOINTS):
        say.note(f"{checkpoint_name(state.best.step)}, the best so far, is no longer there: the best is sought anew")
        return state.model_copy(update={"best": None, "stale": 0})
    return state


def say_new_length(step: int, before: int, steps: int, options: OptimOptions, say: Say) -> None:
    """Say what another length does to the learning rate of a run that goes on at `step`: it follows the schedule of the new one."""
    if before == steps or not 0 < step < steps:
        return
    last, following = learning_rate(step - 1, before, options), learning_rate(step, steps, options)
    say.note(
        f"{before} steps become {steps}: the learning rate goes on at {following:.3g} after {last:.3g}, as the schedule "
        f"({options.schedule}) of the new length has it"
    )


def clear_after(run: Path, step: int, say: Say) -> None:
    """Remove what lies after the step to begin at: it will be written again. Checkpoints first, so that a kill loses no metrics."""
    for later, path in list_checkpoints(run / CHECKPOINTS).items():
        if later > step:
            say.note(f"removing {path}, which lies after step {step}")
            remove_checkpoint(path)
    cut_back(run, step)
    (run / NOT_FINITE).unlink(missing_ok=True)


def _compare_versions(run: Path, provenance: Provenance, say: Say) -> None:
    held, now = read_provenance(run).versions, provenance.versions
    changed = [f"{name} {version} -> {now.get(name)}" for name, version in held.items() if now.get(name) != version]
    if changed:
        say.warn(
            f"{run} was begun with other versions ({', '.join(changed)}): its bits may differ from an uninterrupted run's"
        )
