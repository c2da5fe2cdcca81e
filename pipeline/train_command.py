"""Stage two: `dflash train`, one draft or a sweep of them."""

import os
from collections.abc import Sequence
from pathlib import Path
from shlex import join
from typing import Annotated, Any

import typer

from pipeline.arguments import Nproc, layer_list, merge, read_setting, read_yaml
from pipeline.console import Console
from pipeline.grid import Setting, grid
from pipeline.launch import launch, own_ranks
from pipeline.print_config import config_text, help_of
from schemas.errors import OptionError
from schemas.options import DraftOptions, RunOptions, TrainOptions
from schemas.ranks import ALONE
from schemas.strict import parse

NEWEST = "newest"
# For a step and a checkpoint of several gigabytes on a slow disk.
SHUTDOWN_SECONDS = 300
RESOLVED = "config.yaml"


CacheToTrain = Annotated[
    str | None,
    typer.Option(help="A complete cache, or with --partial one that still grows: a folder, or s3://BUCKET/PATH."),
]
Out = Annotated[
    str | None,
    typer.Option(help="The run's folder, or the sweep's; by default runs/CACHE-DRAFT, runs/CACHE-sweep."),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="One option, such as optim.lr=1e-3; may be given several times."),
]
Resume = Annotated[
    str | None,
    typer.Option(
        metavar="[CHECKPOINT]",
        help="Go on from the newest checkpoint of --out, or from the one named; with more --steps a finished run, too.",
    ),
]
Partial = Annotated[
    bool,
    typer.Option(
        "--partial", help="Train on the shards that a running capture has committed by now; --resume stays with those."
    ),
]
Sweep = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=V1,V2",
        help="Train a draft for each value of an option, or each combination where given several times.",
    ),
]
Jobs = Annotated[
    int | None, typer.Option(help="With --sweep: how many runs at a time, each on a device of its own; by default 1.")
]


def train(
    context: typer.Context,
    cache: CacheToTrain = None,
    draft: Annotated[str | None, typer.Option(help=f"{help_of(DraftOptions, 'kind')} dflash or dflash2.")] = None,
    out: Out = None,
    layers: Annotated[str | None, typer.Option(metavar="1,9,17", help=help_of(RunOptions, "layers"))] = None,
    config: Annotated[str | None, typer.Option(help="Options in YAML, such as another run's config.yaml.")] = None,
    set_: Set = None,
    steps: Annotated[int | None, typer.Option(help=help_of(RunOptions, "steps"))] = None,
    epochs: Annotated[int | None, typer.Option(help=help_of(RunOptions, "epochs"))] = None,
    device: Annotated[str | None, typer.Option(help=help_of(RunOptions, "device"))] = None,
    nproc: Nproc = None,
    resume: Resume = None,
    partial: Partial = False,
    sweep: Sweep = None,
    jobs: Jobs = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Show every option with its help and value, and end.")
    ] = False,
) -> None:
    """Train a draft from a cache. The target is not needed."""
    flags = flags_of(draft, layer_list(layers), steps, epochs, device)
    settings = [read_setting(text) for text in set_ or []]
    options = train_options(config, settings, flags)
    if print_config:
        print(config_text(options), end="")
        return
    if cache is None:
        raise OptionError(
            "train needs --cache, a folder that `dflash capture` wrote (--print-config shows options without one)"
        )
    if sweep:
        _check_sweep(resume, partial, nproc)
        print(
            _sweep(
                cache,
                out or f"runs/{Path(cache).stem}-sweep",
                sweep,
                1 if jobs is None else jobs,
                config,
                settings,
                flags,
            )
        )
        return
    if jobs is not None:
        raise OptionError(f"--jobs {jobs} is how many runs of a --sweep go at a time: give a --sweep, or leave it out")
    out = out or f"runs/{Path(cache).stem}-{options.draft.kind}"
    if resume and config is None and (Path(out) / RESOLVED).is_file():
        # What the run was begun with, so that nothing has to be typed again.
        options = train_options(f"{out}/{RESOLVED}", settings, flags)
    if (ranks := own_ranks(os.environ, nproc)) is None:
        launch(context.obj, nproc or 1, lambda: go_on(context.obj, out), SHUTDOWN_SECONDS)
    from train.run import train as run_training

    with Console() as say:
        summary = run_training(options, cache, out, True if resume == NEWEST else resume or False, say, ranks, partial)
    if summary is not None:
        print(f"{out}: {summary.steps:,} steps done; the draft is {out}/draft, of {summary.checkpoint}")


def _check_sweep(resume: str | None, partial: bool, nproc: int | None) -> None:
    if resume:
        raise OptionError("--sweep goes on with what was interrupted by itself: leave out --resume")
    if partial:
        raise OptionError("--partial would give each run of a --sweep other shards: sweep over a complete cache")
    if own_ranks(os.environ, nproc) != ALONE:
        raise OptionError("--sweep trains each draft in one process: leave out --nproc (--jobs runs several drafts)")


def go_on(words: Sequence[str], out: str) -> str:
    """The command that goes on with a run of several processes, when they have been stopped."""
    if not (Path(out) / RESOLVED).is_file():
        return "nothing was written, the same command begins again"
    kept = [word for word in words if not word.startswith("--resume=")]
    if "--resume" in kept:
        place = kept.index("--resume")
        named = kept[place + 1 : place + 2]
        # What it was to begin from lies behind it now.
        del kept[place : place + (2 if named and not named[0].startswith("--") else 1)]
    return f"go on with `dflash {join(kept)} --resume`"


def train_options(
    config: str | None, settings: Sequence[Setting], flags: Sequence[Setting], swept: Sequence[Setting] = ()
) -> TrainOptions:
    """Defaults, then --config, then --set, then flags, then a point of a sweep. Raises OptionError, naming where a value came from."""
    data = merge(read_yaml(config) if config else {}, [*settings, *flags, *swept])
    typed = {".".join(path): "--set " + ".".join(path) for path, _ in settings}
    typed |= {".".join(path): f"--{path[-1] if path[-1] != 'kind' else 'draft'}" for path, _ in flags}
    typed |= {".".join(path): "--sweep " + ".".join(path) for path, _ in swept}

    def named(key: str) -> str:
        # A list's item was typed with the list; of a section some may have been typed and some stand in the file.
        word = next((word for path, word in typed.items() if f"{key}.".startswith(f"{path}.")), None)
        section = any(path.startswith(f"{key}.") for path in typed)
        return word or (f"{config}: {key}" if config and not section else key)

    return parse(TrainOptions, data, "", OptionError, named)


def flags_of(
    kind: str | None, layers: tuple[int, ...] | None, steps: int | None, epochs: int | None, device: str | None
) -> list[Setting]:
    """The options that have a flag of their own, as settings."""
    flags: list[Setting] = [
        (["draft", "kind"], kind),
        (["run", "layers"], None if layers is None else list(layers)),
        (["run", "device"], device),
    ]
    given = [(path, value) for path, value in flags if value is not None]
    # A length on the command line replaces the other kind of length in a file, rather than clash with it.
    return (
        given if steps is None and epochs is None else [*given, (["run", "steps"], steps), (["run", "epochs"], epochs)]
    )


def _sweep(
    cache: str,
    out: str,
    texts: Sequence[str],
    jobs: int,
    config: str | None,
    settings: Sequence[Setting],
    flags: Sequence[Setting],
) -> str:
    """Check every point of the grid, then train them."""
    if "://" in out:
        raise OptionError(f"--out {out}: only a cache can lie in an object store: give a local folder")
    points = grid(texts)
    given = {".".join(path): value for path, value in [*settings, *flags]}
    for path, _ in points[0].settings:
        if given.get(".".join(path)) is not None:
            raise OptionError(
                f"{'.'.join(path)} is swept and also set to {given['.'.join(path)]!r}: give one of the two"
            )
    options: list[tuple[str, Any]] = [
        (point.name, train_options(config, settings, flags, point.settings)) for point in points
    ]
    from pipeline.sweep import Task, sweep

    with Console() as say:
        return sweep([Task(name, Path(out) / name, each) for name, each in options], cache, jobs, say)
