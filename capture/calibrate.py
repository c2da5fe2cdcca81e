"""The calibration pass of int8 and int4: which channels of each layer are the widest, over the first samples of the plan.

A pure function of target and plan. What it finds is written into the arrays' attributes, where every other process and every
later run of the command reads it.
"""

import json
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from cache.calibrate import calibration_samples, widest_channels
from cache.codecs import Channels
from capture.forward import ShardPlan, make_batch, run_batch
from schemas.errors import CaptureFault
from target.layers import tap_layers
from target.load import Target


def first_samples(plan: Iterable[pa.Table]) -> str:
    """The samples of a plan, a table a shard, to calibrate on, as text that every process of the first copy of the target is told."""
    names: list[str] = []
    ids: list[list[int]] = []
    for table in plan:
        names += table["sample_id"].to_pylist()
        ids += table["input_ids"].to_pylist()
        count = calibration_samples([len(sample) for sample in ids])
        if count < len(ids):
            break
    return json.dumps(list(zip(names[:count], ids[:count], strict=True)))


@torch.inference_mode()
def calibrate(target: Target, layers: Sequence[int], samples: str, prefill_chunk: int | None) -> Channels:
    """The outlier channels of each layer by `first_samples`; none where it names no samples.

    Every process that holds a part of the target calls this. Raises CaptureFault for a state that is not finite.
    """
    rows: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    with tap_layers(target.layers, layers) as taken:
        for name, ids in json.loads(samples):
            plan = _alone(name, ids)
            for _ in run_batch(target, make_batch(plan, 0, plan.input_ids), prefill_chunk):
                for layer in layers:
                    sums_1H = taken[layer][0].double().abs().sum(0, keepdim=True)
                    if not bool(sums_1H.isfinite().all()):
                        raise CaptureFault(
                            f"layer {layer}: a hidden state is not finite (sample {name}, in calibration); nothing was stored: "
                            "check the target's weights, or run it with --dtype float32"
                        )
                    rows[layer].append(sums_1H)
                taken.clear()
    return {layer: widest_channels(sums) for layer, sums in rows.items() if sums}


def _alone(name: str, ids: Sequence[int]) -> ShardPlan:
    zero = np.zeros(1, dtype=np.int64)
    tokens = np.array(ids, dtype=np.int32)
    return ShardPlan([name], zero, np.array([len(ids)]), zero, tokens, np.zeros(len(ids), np.uint8))
