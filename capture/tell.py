"""What a capture or a preview says of its data: rows kept and left out, by reason, and what a user should know of them."""

from capture.collect import Collected
from schemas.manifest import FIRST_SKIPPED, Manifest
from schemas.say import Say


def first_skipped_record(first_skipped: dict[str, str]) -> dict[str, str]:
    """The first row of each reason as an entry of the manifest's record; none where every row was kept."""
    text = "; ".join(f"{reason}: {why}" for reason, why in sorted(first_skipped.items()))
    return {FIRST_SKIPPED: text} if text else {}


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
