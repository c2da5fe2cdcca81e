"""The held-out lines of metrics.jsonl: the draft as it is now, on every anchor of a fixed set of samples."""

import time
from collections.abc import Sequence
from typing import Any

import torch

from cache.read import Cache
from draft.accept import PACKED_TOKENS, Pack, evaluate_pack, report_of
from train.batch import read_samples
from train.sharding import plain_draft
from train.step import Learner
from train.team import SOLO, Team


def val_line(learner: Learner, cache: Cache, rows: Sequence[int], team: Team = SOLO) -> dict[str, Any]:
    """Figures of the samples, as `draft.accept.evaluate_samples` defines them, in the precision of training.

    `val/walk` and `val/uniform` are acceptances (docs/design.md, section 4); `val/accept_len` is the walk's, the headline figure, and
    `val/base_*` are the backbone's, where there is a selector. `val/accuracy_per_slot` has an entry for each slot from 1 on, null
    where no block has it. `val/loss` weighs all slots alike, unlike `train/loss`. `val/seconds` is what it took. The ranks share
    the samples out and all return the same, whose bits do not depend on their number.
    """
    started = time.perf_counter()
    low = learner.precision != torch.float32
    packs = _packs(cache, rows)
    mine: list[Pack] = []
    draft = plain_draft(learner.draft, learner.device)
    with torch.autocast(learner.device.type, learner.precision, enabled=low):
        for names, spans in packs[team.ranks.rank :: team.world]:
            samples = read_samples(cache, spans).to(learner.device)
            mine.append(evaluate_pack(draft, learner.head, names, samples))
    dealt = team.gather(mine)
    report = report_of(dealt[number % team.world][number // team.world] for number in range(len(packs)))
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


def _packs(cache: Cache, rows: Sequence[int]) -> list[tuple[list[str], list[tuple[int, int]]]]:
    """The samples in runs of up to a number of tokens: their ids, and where each lies (offset, length)."""
    column = {name: cache.index[name] for name in ("sample_id", "offset", "length")}
    packs: list[tuple[list[str], list[tuple[int, int]]]] = []
    tokens = 0
    for row in rows:
        name, offset, length = (column[key][row].as_py() for key in ("sample_id", "offset", "length"))
        if not packs or tokens + length > PACKED_TOKENS:
            packs.append(([], []))
            tokens = 0
        packs[-1][0].append(name)
        packs[-1][1].append((offset, length))
        tokens += length
    return packs
