"""The lines of metrics.jsonl sent on to TensorBoard or Weights & Biases, where `log.to` asks for it. Neither is ever needed."""

import hashlib
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from schemas.errors import OptionError
from schemas.options import TrainOptions

TENSORBOARD = "tensorboard"


class Tracker(Protocol):
    """Somewhere lines go."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Take in the figures after a step."""

    def close(self) -> None:
        """Send what is left."""


class Trackers:
    """All trackers of a run. Used as a context manager, so that they are closed however the run ends."""

    def __init__(self, trackers: list[Tracker]) -> None:
        self._trackers = trackers

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        for tracker in self._trackers:
            tracker.close()

    def write(self, line: Mapping[str, Any]) -> None:
        """Send a line of metrics.jsonl."""
        figures = scalars(line)
        for tracker in self._trackers:
            tracker.write(int(line["step"]), figures)


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """A line's figures as single numbers: a list's entries by their slot (val/accuracy_per_slot/1), without those that are null."""
    figures: dict[str, float] = {}
    for name, value in line.items():
        values = (
            {f"{name}/{slot}": each for slot, each in enumerate(value, 1)} if isinstance(value, list) else {name: value}
        )
        figures |= {key: float(each) for key, each in values.items() if each is not None}
    return {key: value for key, value in figures.items() if key != "step"}


def check_trackers(options: TrainOptions) -> None:
    """OptionError where a tracker's package is missing, before anything is written."""
    modules = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}
    for name in options.log.to:
        try:
            import_module(modules[name])
        except ImportError as fault:
            raise OptionError(
                f"log.to={name}, but its package cannot be imported ({fault}): pip install 'dflash-pipeline[{name}]', or leave it out"
            ) from None


def open_trackers(run: Path, options: TrainOptions, step: int) -> Trackers:
    """The trackers that `log.to` names, for a run that begins or goes on at `step`."""
    makers: dict[str, Callable[[Path, TrainOptions, int], Tracker]] = {"tensorboard": _TensorBoard, "wandb": _WandB}
    return Trackers([makers[name](run, options, step) for name in options.log.to])


class _TensorBoard:
    def __init__(self, run: Path, options: TrainOptions, step: int) -> None:  # noqa: ARG002
        # What a killed run wrote after the checkpoint it goes on from is hidden, and written again.
        writer = import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(str(run / TENSORBOARD), purge_step=step + 1)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    def __init__(self, run: Path, options: TrainOptions, step: int) -> None:  # noqa: ARG002
        place = str(run.resolve())
        # The same folder is the same run there, also after a kill.
        name = options.log.name or run.name
        number = hashlib.sha256(place.encode()).hexdigest()[:16]
        config = options.model_dump(mode="json")
        self._run = import_module("wandb").init(
            project=options.log.project, name=name, id=number, dir=place, config=config, resume="allow"
        )

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()
