"""A run's folder: config.yaml (every option, resolved), provenance.json (the cache and the versions), and what may follow what.

RUN/  config.yaml  provenance.json  metrics.jsonl  checkpoints/  draft/
"""

import hashlib
import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from pydantic import Field

from cache.read import Cache
from cache.whole import write_whole
from cache.workspace import TEMPORARY
from schemas.errors import DraftError
from schemas.manifest import Identity, Totals, first_difference
from schemas.options import TrainOptions
from schemas.strict import Strict, parse
from schemas.yaml_text import dump_yaml, load_yaml

CONFIG, PROVENANCE, CHECKPOINTS, DRAFT = "config.yaml", "provenance.json", "checkpoints", "draft"
PACKAGES = ("dflash-pipeline", "torch", "transformers", "numpy")

# What a run may change when it goes on: how long, where, and what it says; everything else would make it another run.
FREE = frozenset(
    {
        *("steps", "epochs", "device", "shard", "compile", "eval_every", "eval_share", "patience", "export"),
        *("log_every", "checkpoint_every", "keep"),
    }
)


class Exported(Strict):
    """Which checkpoint draft/ holds; `walk` is its held-out acceptance, where it was chosen for it."""

    checkpoint: str
    chosen: Literal["best", "last"]
    walk: float | None


class Provenance(Strict):
    """What a run was trained on. `index_sha256` is over the cache's index: its samples, their places and their tokens.

    `shards` are those that were committed when a run on a growing cache began, which index and totals are of; None: all.
    `ranks` is how many processes share its steps since it last began. `draft` says what draft/ holds, and is null until the run has
    ended.
    """

    cache: str
    identity: Identity
    totals: Totals
    index_sha256: str
    shards: tuple[int, ...] | None = None
    versions: dict[str, str]
    ranks: int = Field(1, ge=1)
    draft: Exported | None = None


def provenance_of(cache: Cache, path: str, shards: tuple[int, ...] | None = None, ranks: int = 1) -> Provenance:
    """The provenance of a run on a cache, given as `path`, or on those of its shards alone, by so many processes."""
    columns = cache.index.select(["sample_id", "offset", "length", "split", "shard", "tokens_sha256"]).to_pydict()
    digest = hashlib.sha256(json.dumps(columns).encode())
    manifest = cache.manifest
    versions = {package: _version(package) for package in PACKAGES}
    return Provenance(
        cache=path,
        identity=manifest.identity,
        totals=manifest.totals,
        index_sha256=digest.hexdigest(),
        shards=shards,
        versions=versions,
        ranks=ranks,
    )


def holds_run(run: Path) -> bool:
    """Whether a folder holds a run; DraftError where it holds something else. config.yaml is what makes a folder a run."""
    if not run.exists():
        return False
    if not run.is_dir():
        raise DraftError(f"--out {run} is a file: give a new folder, or one that a training began")
    if (run / CONFIG).is_file():
        return True
    if other := sorted(e.name for e in run.iterdir() if e.name != PROVENANCE and not e.name.startswith(TEMPORARY)):
        raise DraftError(f"--out {run} holds something else ({other[0]!r}): give a new or empty folder")
    return False


def write_run(run: Path, options: TrainOptions, provenance: Provenance) -> None:
    """Write provenance.json, then config.yaml, each whole."""
    write_whole(run / PROVENANCE, [provenance.model_dump_json(indent=1).encode() + b"\n"])
    text = dump_yaml(options.model_dump(mode="json"))
    write_whole(run / CONFIG, [text.encode()])


def record_export(run: Path, exported: Exported) -> None:
    """Say in provenance.json which checkpoint draft/ holds."""
    provenance = read_provenance(run).model_copy(update={"draft": exported})
    write_whole(run / PROVENANCE, [provenance.model_dump_json(indent=1).encode() + b"\n"])


def read_options(run: Path) -> TrainOptions:
    """The resolved options of a run, from its config.yaml; DraftError where there is none or it is malformed."""
    try:
        data = load_yaml((run / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        raise DraftError(
            f"{run / CONFIG} cannot be read ({str(fault).splitlines()[0]}): give the folder of a run"
        ) from None
    return parse(TrainOptions, data, str(run / CONFIG), DraftError)


def read_provenance(run: Path) -> Provenance:
    """What a run was trained on, from its provenance.json; DraftError where there is none or it is malformed."""
    try:
        data = json.loads((run / PROVENANCE).read_bytes())
    except (OSError, ValueError) as fault:
        raise DraftError(f"{run / PROVENANCE} cannot be read ({fault}): give the folder of a run") from None
    return parse(Provenance, data, str(run / PROVENANCE), DraftError)


def check_same_run(run: Path, options: TrainOptions, provenance: Provenance) -> None:
    """Refuse to go on with other options or another cache: DraftError names the first field that differs and both values."""
    held, asked = read_provenance(run), provenance
    if (difference := first_difference(held.identity, asked.identity, "identity.")) is not None:
        name, ours, theirs = difference
        raise DraftError(
            f"{run} was trained on a cache with {name} {ours!r}, {asked.cache} has {theirs!r}: give that cache, or another --out"
        )
    if held.index_sha256 != asked.index_sha256:
        raise DraftError(
            f"{run} was trained on {held.totals.samples} samples with index_sha256 {held.index_sha256[:16]}, {asked.cache} has "
            f"{asked.totals.samples} with {asked.index_sha256[:16]}: give that cache, or another --out"
        )
    before, now = read_options(run).model_dump(), options.model_dump()
    if before["optim"]["accumulate"] * held.ranks == now["optim"]["accumulate"] * asked.ranks:
        # The same micro-batches a step, dealt among more ranks or fewer: the same run.
        before["optim"]["accumulate"] = now["optim"]["accumulate"]
    for group, fields in before.items():
        for name, value in fields.items():
            if now[group][name] != value and group != "log" and not (group == "run" and name in FREE):
                raise DraftError(
                    f"{run} was trained with {group}.{name} {value!r}, this command asks for {now[group][name]!r}: "
                    "resume with the same options, or give another --out"
                )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
