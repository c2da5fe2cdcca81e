"""What came out: `dflash evaluate`, `dflash inspect`, `dflash verify` and `dflash compare`."""

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.arguments import Attention, Device, Dtype, TrustRemoteCode, options_of
from pipeline.console import Console
from pipeline.inspect import rows_text
from schemas.errors import CacheDamaged
from schemas.options import EvaluateOptions

JsonFile = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the figures as JSON, too.")]


def evaluate(
    draft: Annotated[str, typer.Option(help="A run's folder, or a draft's.")],
    cache: Annotated[
        str | None,
        typer.Option(
            help="Held-out samples: alone for acceptance without the target, with --target for their prompts."
        ),
    ] = None,
    target: Annotated[str | None, typer.Option(help="Decode for real with this target.")] = None,
    prompts: Annotated[
        str | None, typer.Option(help="With --target: JSONL with `messages`, `turns` or `prompt`.")
    ] = None,
    split: Annotated[str, typer.Option(help="val or train.")] = "val",
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer when decoding.")] = 512,
    limit: Annotated[int | None, typer.Option(help="At most this many samples or prompts.")] = None,
    through_codec: Annotated[
        bool,
        typer.Option(help="Decoding with --cache: pass the target's states through its codec, as training saw them."),
    ] = True,
    lengths: Annotated[
        bool, typer.Option("--lengths", help="Add the accepted tokens of every block to the JSON.")
    ] = False,
    json: JsonFile = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    attn: Attention = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Say how many tokens a draft gets accepted: from the cache alone, or by decoding with the target."""
    options = options_of(EvaluateOptions, locals())
    from pipeline.evaluate import evaluate as run_evaluation

    with Console() as say:
        run_evaluation(options, json, say, lambda figures: say.result(figures_text(figures)))


def figures_text(figures: dict[str, Any]) -> str:
    """An evaluation in words, headline first."""
    rows: list[tuple[str, str]] = []
    for name in ("walk", "uniform", "decoded"):
        if name in figures:
            part = figures[name]
            of_blocks = f"({part['accepted']:,} drafted tokens accepted in {part['blocks']:,} blocks)"
            rows.append((name, f"{_acceptance(part)} tokens a block {of_blocks}"))
    if backbone := figures.get("backbone"):
        rows.append(
            (
                "backbone alone",
                f"walk {_acceptance(backbone['walk'])}, uniform {_acceptance(backbone['uniform'])}",
            )
        )
    if "candidate_recall" in figures:
        rows.append(("candidate recall", f"{figures['candidate_recall']:.3f}"))
    if "accuracy_per_slot" in figures:
        rows.append(
            (
                "accuracy by slot",
                " ".join("-" if value is None else f"{value:.2f}" for value in figures["accuracy_per_slot"]),
            )
        )
    if "loss" in figures:
        rows.append(("loss", f"{figures['loss']:.4f}"))
    if lossless := figures.get("lossless"):
        rows.append(
            ("lossless", f"{lossless['equal']} of {lossless['prompts']} prompts equal to plain greedy decoding")
        )
    if "speedup" in figures:
        rows.append(("speed-up", f"{figures['speedup']:.2f}x of plain greedy decoding, wall time"))
    return "\n".join([figures["draft"], rows_text(rows)])


def _acceptance(part: dict[str, Any]) -> str:
    return "-" if part["acceptance"] is None else f"{part['acceptance']:.3f}"


def inspect(
    cache: Annotated[str, typer.Argument(help="A complete cache.")],
    sample: Annotated[int, typer.Option(help="Which sample to decode.")] = 0,
    json: JsonFile = None,
) -> None:
    """Show what a cache holds: its manifest, its sizes and a sample with the supervised tokens marked."""
    from cache.layout import read_root
    from cache.store import open_store
    from pipeline.inspect import inspect_text
    from pipeline.results import write_json

    print(inspect_text(cache, sample, shutil.get_terminal_size((120, 24)).columns))
    if json is not None:
        write_json(Path(json), read_root(open_store(cache)).model_dump(mode="json"))


def verify(
    cache: Annotated[str, typer.Argument(help="A complete cache.")],
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every byte: checksums, tokens' hashes, finite states.")
    ] = False,
    target: Annotated[
        str | None, typer.Option(help="Also run --samples random samples again with this target.")
    ] = None,
    samples: Annotated[int, typer.Option(help="How many samples to run again.")] = 16,
    repair: Annotated[
        bool, typer.Option("--repair", help="Forget damaged shards, so that the next capture redoes just those.")
    ] = False,
    json: JsonFile = None,
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Say whether a cache is what it says it is, and if not what is damaged and which samples that touches."""
    from cache.generations import mendable, way_to_mend
    from cache.verify import forget
    from cache.verify import verify as find_faults
    from pipeline.inspect import faults_text
    from pipeline.results import write_json

    with Console() as say:
        manifest, faults = find_faults(cache, deep, say)
        if target is not None and not faults:
            from capture.recheck import recheck

            faults = recheck(cache, target, samples, device, trust_remote_code, say)
    if json is not None:
        write_json(Path(json), {"cache": cache, "deep": deep, "faults": [asdict(fault) for fault in faults]})
    print(faults_text(cache, manifest, faults, deep))
    if faults and not mendable(manifest):
        # Not even --repair: what it forgets nothing could make again, and what is sound could no longer be read.
        raise CacheDamaged(
            f"{cache} is damaged ({len(faults)} faults), and merged before it grew: {way_to_mend(manifest)}"
        )
    if faults and repair:
        count = forget(cache, faults)
        forgotten = f"{count} shards forgotten" if count else "no shard is damaged"
        print(f"{forgotten}: {way_to_mend(manifest)}, it does what is missing")
    if faults:
        what = "is damaged" if not repair else "was damaged"
        first = "" if repair else "--repair it, then "
        raise CacheDamaged(f"{cache} {what} ({len(faults)} faults): {first}{way_to_mend(manifest)}")


def compare(
    runs: Annotated[list[str], typer.Argument(help="Run folders that `dflash evaluate` measured.")],
    json: JsonFile = None,
) -> None:
    """Put the figures of several runs side by side."""
    from pipeline.compare import compare as records_of
    from pipeline.compare import compare_text
    from pipeline.results import write_json

    records = records_of(runs)
    print(compare_text(records))
    if json is not None:
        write_json(Path(json), {"runs": records})
