"""What RUN/draft holds when a run ends: the best checkpoint by walk acceptance, or the last; provenance.json says which."""

from pathlib import Path

from draft.files import save_draft
from draft.model import Draft
from schemas.options import RunOptions
from train.checkpoint import TrainState, checkpoint_name, load_checkpoint
from train.rundir import CHECKPOINTS, DRAFT, Exported, record_export
from train.step import Learner


def export_draft(run: Path, learner: Learner, state: TrainState, options: RunOptions) -> Exported:
    """Write the draft of a run that has ended at `state`; all its checkpoints are on disk."""
    best = state.best if options.export == "best" else None
    step = state.step if best is None else best.step
    draft = Draft(learner.draft.config)
    draft.load_state_dict(dict(load_checkpoint(run / CHECKPOINTS / checkpoint_name(step)).model))
    save_draft(run / DRAFT, draft, options.draft_dtype)
    exported = Exported(
        checkpoint=checkpoint_name(step),
        chosen="last" if best is None else "best",
        walk=None if best is None else best.walk,
    )
    record_export(run, exported)
    return exported
