"""`dflash preview`: what a capture would supervise, before the target is loaded: samples, lengths, reasons, the cache's size."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console as RichConsole
from rich.style import Style
from rich.text import Text

from capture.collect import Collected
from capture.planning import plan_capture
from capture.samples import Sample
from capture.settings import scan_data, settle
from capture.tell import warn_of_data
from pipeline.inspect import rows_text, sources_text, totals_rows
from schemas.manifest import Manifest
from schemas.options import CaptureOptions
from schemas.say import Say

SUPERVISED, SPECIAL = Style(color="green", bold=True), Style(color="magenta", dim=True)
BARS = " ▏▎▍▌▋▊▉█"
BAR_WIDTH, BINS = 40, 8


def preview(options: CaptureOptions, samples: int, say: Say) -> None:
    """Print the preview to standard output. Raises the UserErrors of a capture; nothing is written."""
    settings, scans = settle(options, say), scan_data(options, say)
    manifest, _, collected = plan_capture(settings, scans, say)
    warn_of_data(manifest, collected, say)
    out = RichConsole(highlight=False, emoji=False, soft_wrap=True)
    colour = out.is_terminal and out.color_system is not None and not out.no_color
    for sample in spread(collected.samples, samples):
        out.print(sample_text(settings.chat.tokenizer, sample, colour))
    out.print(report_text(manifest, collected), markup=False)


def spread(samples: Sequence[Sample], count: int) -> list[Sample]:
    """`count` samples, evenly over all of them, the first included."""
    count = min(count, len(samples))
    return [samples[place * len(samples) // count] for place in range(count)]


def sample_text(tokenizer: Any, sample: Sample, colour: bool) -> Text:
    """A decoded sample, special tokens visible. Supervised text is coloured, or stands in ⟦ ⟧ where colours cannot be shown."""
    text = Text(
        f"{sample.sample_id} ({sample.split}, {len(sample.input_ids):,} tokens, {int(sample.loss_mask.sum()):,} supervised"
        f"{', cut' if sample.truncated else ''}); supervised text {'is green' if colour else 'stands in ⟦ ⟧'}\n"
    )
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    ids, mask = sample.input_ids.tolist(), sample.loss_mask.tolist()
    start = 0
    while start < len(ids):
        stop = start
        while stop < len(ids) and mask[stop] == mask[start]:
            stop += 1
        bracketed = mask[start] and not colour
        text.append("⟦" if bracketed else "")
        for piece, is_special in _pieces(ids[start:stop], special):
            style = SUPERVISED if mask[start] else SPECIAL if is_special else Style()
            shown = visible(tokenizer.decode(piece, skip_special_tokens=False, clean_up_tokenization_spaces=False))
            text.append(shown, style=style if colour else Style())
        text.append("⟧" if bracketed else "")
        start = stop
    return text.append("\n")


def _pieces(ids: Sequence[int], special: set[int]) -> list[tuple[list[int], bool]]:
    # Runs of special and of ordinary tokens: decoded together, since a character may need several tokens.
    pieces: list[tuple[list[int], bool]] = []
    for token in ids:
        if not pieces or pieces[-1][1] != (token in special):
            pieces.append(([], token in special))
        pieces[-1][0].append(token)
    return pieces


def visible(text: str) -> str:
    """The text without control characters, which would move a terminal's cursor or hide what follows."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)


def report_text(manifest: Manifest, collected: Collected) -> str:
    """Everything below the samples: histograms, what became of the rows, the cache."""
    lengths, supervised = (collected.samples.rows()[name].to_numpy() for name in ("length", "supervised"))
    lines = ["length of samples, tokens", *histogram(lengths), "supervised tokens of samples", *histogram(supervised)]
    lines += [sources_text(manifest.sources)]
    lines += [f"    first {reason}: {why}" for reason, why in collected.first_skipped.items()]
    rows = [
        *totals_rows(manifest.identity, manifest.totals),
        ("cut", f"{collected.truncated:,} samples at {manifest.identity.max_length:,} tokens"),
        ("mask token", f"{manifest.identity.mask_token_id} ({manifest.mask_token_source})"),
    ]
    return "\n".join([*lines, "the cache it would make", rows_text(rows)])


def histogram(values: np.ndarray) -> list[str]:
    """Counts in bins of equal width, as bars: one line a bin, widest bar for the fullest."""
    low, high = int(values.min()), int(values.max())
    edges = np.unique(np.linspace(low, high + 1, BINS + 1).astype(np.int64))
    counts, _ = np.histogram(values, bins=edges)
    lines = []
    for count, first, after in zip(counts.tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        eighths = -(-count * BAR_WIDTH * 8 // max(counts.tolist()))
        bar = "█" * (eighths // 8) + (BARS[eighths % 8] if eighths % 8 else "")
        lines.append(f"  {first:>7,} to {after - 1:>7,}  {bar:<{BAR_WIDTH}}  {count:,}")
    return lines
