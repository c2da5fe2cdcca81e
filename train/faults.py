"""A loss that is not finite: which batch it was, in a file of the run and in one line."""

import json
from pathlib import Path

from cache.read import Cache
from cache.whole import write_whole
from train.step import NotFinite

FILE = "not-finite.json"
NAMED = 8


def report_not_finite(run: Path, cache: Cache, step: int, lr: float, fault: NotFinite) -> str:
    """Write RUN/not-finite.json and return the message: the step, which micro-batch of which epoch, and its samples.

    The file holds `step` (the one that was not done), `lr`, `what` and `value`, and of each micro-batch that is to blame its `epoch`,
    its `position` in it (from 0), the `rows` of the index and their `sample_ids`.
    """
    micros = fault.micros
    ids = cache.index["sample_id"]
    batches = [
        {
            "epoch": micro.epoch,
            "position": micro.position,
            "rows": list(micro.rows),
            "sample_ids": [ids[row].as_py() for row in micro.rows],
        }
        for micro in micros
    ]
    report = {"step": step, "lr": lr, "what": fault.what, "value": repr(fault.value), "batches": batches}
    write_whole(run / FILE, [json.dumps(report, indent=1).encode() + b"\n"])
    names = [ids[row].as_py() for micro in micros for row in micro.rows]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    places = ", ".join(f"{micro.position} of epoch {micro.epoch}" for micro in micros)
    return (
        f"step {step}: the {fault.what} is {fault.value}, before the update, in micro-batch {places}; samples {', '.join(names[:NAMED])}"
        f"{more}: {run / FILE} names them all; look at them with `dflash inspect`, or lower optim.lr"
    )
