"""Stage two: `dflash train`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.arguments import layer_list, merge, read_setting, read_yaml
from pipeline.console import Console
from schemas.errors import OptionError
from schemas.options import TrainOptions
from schemas.strict import parse

NEWEST = "newest"
RESOLVED = "config.yaml"


def train(
    cache: Annotated[str, typer.Option(help="A complete cache: a folder, or s3://BUCKET/PATH.")],
    draft: Annotated[str | None, typer.Option(help="dflash or dflash2.")] = None,
    out: Annotated[str | None, typer.Option(help="The run's folder; by default runs/CACHE-DRAFT.")] = None,
    layers: Annotated[
        str | None,
        typer.Option(help="Which of the cache's layers to condition on; by default all but the target's last."),
    ] = None,
    config: Annotated[str | None, typer.Option(help="Options in YAML, such as another run's config.yaml.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="One option, such as optim.lr=1e-3; may be given several times."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the training samples; 6 where neither is given.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto (CUDA where there is one), cpu, cuda ...")] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="[CHECKPOINT]", help="Go on from the newest checkpoint of --out, or from the one named."),
    ] = None,
) -> None:
    """Train a draft from a cache. The target is not needed."""
    arguments = (draft, set_ or [], layer_list(layers), steps, epochs, device)
    options = train_options(config, *arguments)
    out = out or f"runs/{Path(cache).stem}-{options.draft.kind}"
    if resume and config is None and (Path(out) / RESOLVED).is_file():
        # What the run was begun with, so that nothing has to be typed again.
        options = train_options(f"{out}/{RESOLVED}", *arguments)
    from train.run import train as run_training

    with Console() as say:
        summary = run_training(options, cache, out, True if resume == NEWEST else resume or False, say)
    print(f"{out}: {summary.steps:,} steps done; the draft is {out}/draft, of {summary.checkpoint}")


def train_options(
    config: str | None,
    kind: str | None,
    settings: list[str],
    layers: tuple[int, ...] | None,
    steps: int | None,
    epochs: int | None,
    device: str | None,
) -> TrainOptions:
    """Defaults, then --config, then --set, then the options that have a flag of their own. Raises OptionError."""
    flags: list[tuple[list[str], Any]] = [
        (["draft", "kind"], kind),
        (["run", "layers"], None if layers is None else list(layers)),
        (["run", "device"], device),
    ]
    # A length on the command line replaces the other kind of length in a file, rather than clash with it.
    if steps is not None or epochs is not None:
        flags += [(["run", "steps"], steps), (["run", "epochs"], epochs)]
    data = merge(read_yaml(config) if config else {}, [read_setting(text) for text in settings])
    data = merge(data, [(path, value) for path, value in flags if value is not None or path[-1] in ("steps", "epochs")])
    return parse(TrainOptions, data, config or "train", OptionError)
