"""What a capture or a preview says of its data: rows kept and left out, by reason, and what a user should know of them."""

from importlib.metadata import version
from itertools import zip_longest

from capture.collect import DUPLICATE, ROW_KINDS, Collected
from schemas.manifest import FIRST_SKIPPED, Manifest
from schemas.say import Say

COUNTS = "counts"


def first_skipped_record(first_skipped: dict[str, str]) -> dict[str, str]:
    """The first row of each reason as an entry of the manifest's record; none where every row was kept."""
    text = "; ".join(f"{reason}: {why}" for reason, why in sorted(first_skipped.items()))
    return {FIRST_SKIPPED: text} if text else {}


def first_skipped_of_record(manifest: Manifest) -> dict[str, str] | None:
    """What `first_skipped_record` made an entry of; None where that cannot be told."""
    text = manifest.record.get(FIRST_SKIPPED, "")
    reasons = sorted({reason for source in manifest.sources for reason in source.skipped})
    text = text.removeprefix(f"{reasons[0]}: ") if reasons else text
    found: dict[str, str] = {}
    for reason, after in zip_longest(reasons, reasons[1:]):
        found[reason], _, text = text.partition(f"; {after}: ") if after else (text, "", "")
    return found if first_skipped_record(found).get(FIRST_SKIPPED) == manifest.record.get(FIRST_SKIPPED) else None


def counts_record(collected: Collected) -> dict[str, str]:
    """How many samples are duplicates and rows of each kind, as an entry of the manifest's record."""
    counts = {DUPLICATE: collected.duplicates} | {kind: collected.counts[kind] for kind in ROW_KINDS}
    return {COUNTS: " ".join(f"{name}:{count}" for name, count in counts.items() if count or name == DUPLICATE)}


def counts_of_record(manifest: Manifest) -> dict[str, int] | None:
    """What `counts_record` made an entry of; None for a cache of a version that did not."""
    pairs = [part.partition(":") for part in manifest.record.get(COUNTS, "").split()]
    known = pairs and all(name in (DUPLICATE, *ROW_KINDS) and count.isdecimal() for name, _, count in pairs)
    return {name: int(count) for name, _, count in pairs} if known else None


def versions_record() -> dict[str, str]:
    """The versions that decide how text becomes tokens, as entries of the manifest's record."""
    return {name: version(name) for name in ("dflash-pipeline", "transformers", "tokenizers", "jinja2")}


def tell_data(manifest: Manifest, collected: Collected, say: Say) -> None:
    """Tell what became of every row, and warn as below."""
    for source in manifest.sources:
        skipped = ", ".join(f"{count} {reason}" for reason, count in source.skipped.items()) or "none skipped"
        say.note(f"{source.path}: {source.kept} of {source.rows} rows kept ({skipped})")
    for reason, why in collected.first_skipped.items():
        say.note(f"first {reason}: {why}")
    if collected.truncated:
        say.note(f"{collected.truncated} samples cut at {manifest.identity.max_length} tokens")
    if collected.duplicates:
        say.note(f"{collected.duplicates} exact duplicates are captured once")
    warn_of_data(manifest, collected, say)


def warn_of_data(manifest: Manifest, collected: Collected, say: Say) -> None:
    """Warn of what costs acceptance."""
    counts, name = collected.counts, manifest.identity.target.name
    if counts["retokenised"]:
        say.warn(f"{counts['retokenised']} rows bring ids of another tokenizer: their text was tokenised anew")
    if counts["unnamed"]:
        say.warn(f"{counts['unnamed']} rows bring ids that name no tokenizer: they are taken as {name}'s")
    if counts["plain"]:
        say.warn(f"{counts['plain']} rows are text without a turn of {name}'s template: all of it is supervised")
    if counts["foreign"]:
        rows = sum(source.rows for source in manifest.sources)
        say.warn(
            f"{counts['foreign']} of {rows} rows do not say that {name} wrote their answers: a draft accepts most on answers of "
            "its own target; make them with `dflash regenerate`"
        )
