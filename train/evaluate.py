"""The held-out lines of metrics.jsonl: the draft as it is now, on every anchor of the validation split."""

from typing import Any

from cache.read import Cache
from draft.accept import evaluate_cache
from draft.model import Draft


def val_line(draft: Draft, cache: Cache) -> dict[str, Any]:
    """Figures of the validation split, as `evaluate_cache` defines them.

    `val/walk` and `val/uniform` are acceptances (docs/design.md, section 4); `val/accept_len` is the walk's, the headline figure, and
    `val/base_*` are the backbone's, where there is a selector. `val/loss` weighs all slots alike, unlike `train/loss`.
    """
    report = evaluate_cache(draft, cache, "val")
    line = {
        "val/loss": report["loss"],
        "val/accuracy": report["accuracy"],
        "val/accept_len": report["walk"]["acceptance"],
    }
    line |= {"val/walk": report["walk"]["acceptance"], "val/uniform": report["uniform"]["acceptance"]}
    if "backbone" in report:
        base = report["backbone"]
        line |= {
            "val/base_loss": base["loss"],
            "val/selector_loss": report["loss"] - base["loss"],
            "val/base_accuracy": base["accuracy"],
            "val/base_accept_len": base["walk"]["acceptance"],
        }
        line["val/candidate_recall"] = report["candidate_recall"]
    return line
