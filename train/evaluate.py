"""The held-out lines of metrics.jsonl: the draft as it is now, on every anchor of a fixed set of samples."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cache.read import Cache
from draft.accept import PACKED_TOKENS, evaluate_samples
from draft.blocks import PackedSamples
from train.batch import read_samples
from train.step import Learner


def val_line(learner: Learner, cache: Cache, rows: Sequence[int]) -> dict[str, Any]:
    """Figures of the samples, as `draft.accept.evaluate_samples` defines them, in the precision of training.

    `val/walk` and `val/uniform` are acceptances (docs/design.md, section 4); `val/accept_len` is the walk's, the headline figure, and
    `val/base_*` are the backbone's, where there is a selector. `val/accuracy_per_slot` has an entry for each slot from 1 on, null
    where no block has it. `val/loss` weighs all slots alike, unlike `train/loss`. `val/seconds` is what it took.
    """
    started = time.perf_counter()
    low = learner.precision != torch.float32
    with torch.autocast(learner.device.type, learner.precision, enabled=low):
        report = evaluate_samples(learner.draft, learner.head, _packs(learner, cache, rows))
    line = {"val/loss": report["loss"], **_figures(report, "val/")}
    if "backbone" in report:
        base = report["backbone"]
        line |= {
            "val/base_loss": base["loss"],
            "val/selector_loss": report["loss"] - base["loss"],
            **_figures(base, "val/base_"),
            "val/candidate_recall": report["candidate_recall"],
        }
    return line | {"val/seconds": time.perf_counter() - started}


def _figures(report: dict[str, Any], prefix: str) -> dict[str, Any]:
    walk, uniform = report["walk"]["acceptance"], report["uniform"]["acceptance"]
    return {
        f"{prefix}accuracy": report["accuracy"],
        f"{prefix}accept_len": walk,
        f"{prefix}walk": walk,
        f"{prefix}uniform": uniform,
        f"{prefix}accuracy_per_slot": report["accuracy_per_slot"],
    }


def _packs(learner: Learner, cache: Cache, rows: Sequence[int]) -> Iterator[tuple[list[str], PackedSamples]]:
    """The samples, packed up to a number of tokens, on the draft's device."""
    column = {name: cache.index[name] for name in ("sample_id", "offset", "length")}
    names: list[str] = []
    spans: list[tuple[int, int]] = []
    for row in rows:
        name, offset, length = (column[key][row].as_py() for key in ("sample_id", "offset", "length"))
        if spans and sum(size for _, size in spans) + length > PACKED_TOKENS:
            yield names, read_samples(cache, spans).to(learner.device)
            names, spans = [], []
        names.append(name)
        spans.append((offset, length))
    yield names, read_samples(cache, spans).to(learner.device)
