"""Does a cache hold what the target computes? Random samples are run again, alone, and compared with what is stored.

n rows of one sample, L layers, H hidden.
"""

import numpy as np
import torch
from torch import Tensor

from cache.codecs import HiddenCodec
from cache.read import Cache, open_cache
from cache.verify import Fault
from capture.forward import ShardPlan, run_shard
from schemas.arrays import SCALED
from schemas.errors import CacheError, OptionError
from schemas.say import Say
from target.head import check_head, head_traits
from target.load import config_sha256, load_target, resolve_target
from target.probe import check_decoder

# Largest difference of a layer's states, as a share of its largest value, and of a log-probability. A batch of another
# shape rounds differently: in bfloat16 by up to two units of the largest value.
TOLERANCES = {"float32": (1e-3, 0.02), "bfloat16": (3e-2, 0.5), "float16": (1e-2, 0.1)}
BF16_ROUNDING = 2**-8
# Where values are quantised one may fall to the next step, so steps are left out of that difference; and the mean one, which
# quantisation does not change on average, must be this small a share of the mean magnitude.
MEAN_TOLERANCES = {"float32": 0.01, "bfloat16": 0.1, "float16": 0.05}


def recheck(path: str, target_name: str, samples: int, device: str, trust_remote_code: bool, say: Say) -> list[Fault]:
    """Recompute `samples` random samples with the target; a fault for each that differs by more than rounding.

    Raises CacheError for a cache of another target, TargetError where the target cannot be loaded.
    """
    cache = open_cache(path)
    identity = cache.manifest.identity
    if samples < 1:
        raise OptionError(f"--samples {samples}: give at least 1")
    reference = resolve_target(target_name, trust_remote_code)
    if (found := config_sha256(reference)) != identity.target.config_sha256:
        raise CacheError(
            f"{path} was captured from {identity.target.name} with config sha256 {identity.target.config_sha256[:16]}, "
            f"{reference.name} has {found[:16]}: give the target that it was captured from"
        )
    if (held := identity.target.revision) != reference.revision:
        say.warn(
            f"{path} was captured from {identity.target.name} at revision {held}, this is {reference.revision}: what differs may be "
            "the target's weights, and not the cache"
        )
    target = load_target(reference, identity.dtype, device)
    traits = head_traits(target.config)
    check_head(target, traits)
    check_decoder(target, traits)
    recorded = cache.manifest.record.get("prefill_chunk", "none")
    # A cache merged of such and such names both.
    chunk = int(recorded) if recorded.isdigit() else None
    chosen = np.random.default_rng(identity.seed).permutation(len(cache.index))[:samples]
    faults = []
    for done, row in enumerate(sorted(chosen.tolist()), 1):
        plan = _plan_of(cache, row)
        alone = identity.model_copy(update={"shard_tokens": len(plan.input_ids)})
        fresh = run_shard(target, traits, alone, plan, lambda _: None, chunk, cache.codec)
        faults += _differences(cache, row, fresh)
        say.progress("recompute", done, len(chosen))
    return faults


def _plan_of(cache: Cache, row: int) -> ShardPlan:
    """One sample as a shard of its own."""
    sample = cache.index.slice(row, 1).to_pylist()[0]
    ids, mask = cache.tokens(sample["offset"], sample["length"])
    zero = np.zeros(1, dtype=np.int64)
    length = np.array([sample["length"]])
    return ShardPlan(
        [sample["sample_id"]], zero, length, zero, ids.numpy().astype(np.int32), mask.numpy().astype(np.uint8)
    )


def _differences(cache: Cache, row: int, fresh: dict[str, np.ndarray]) -> list[Fault]:
    identity, sample = cache.manifest.identity, cache.index.slice(row, 1).to_pylist()[0]
    offset, length, shard = sample["offset"], sample["length"], sample["shard"]
    states, logprobs = TOLERANCES[identity.dtype]
    if identity.codec != "f32":
        states = max(states, BF16_ROUNDING)
    stored_nLH = cache.hidden(offset, length, identity.layers).float()
    faults = []
    for place, layer in enumerate(identity.layers):
        own = {family: fresh[f"{family}/{layer}"] for family in cache.codec.families}
        fresh_nH = cache.codec.decode(own, layer).float()
        difference_nH = (stored_nLH[:, place] - fresh_nH).abs()
        excess_nH = (difference_nH - _step(cache.codec, own, fresh_nH)).clamp(min=0)
        error, mean = (
            float(excess_nH.max() / fresh_nH.abs().max()),
            float(difference_nH.mean() / fresh_nH.abs().mean()),
        )
        if not error <= states:
            what = f"states differ from the target's by {error:.1e} of their largest value (rounding: {states:.0e})"
            faults.append(Fault(f"hidden/{layer}", what, (sample["sample_id"],), shard))
        elif identity.codec in SCALED and not mean <= MEAN_TOLERANCES[identity.dtype]:
            what = f"states differ from the target's by {mean:.0%} on average (rounding: {MEAN_TOLERANCES[identity.dtype]:.0%})"
            faults.append(Fault(f"hidden/{layer}", what, (sample["sample_id"],), shard))
    wanted = np.flatnonzero(fresh["tokens/loss_mask"][1:])
    stored_nK = cache.topk(offset, length)[1].numpy()[wanted]
    error = float(np.abs(stored_nK - fresh["logits/topk_logprobs"][wanted].astype(np.float32)).max(initial=0.0))
    if not error <= logprobs:
        what = f"log-probabilities differ from the target's by {error:.2f} (rounding: {logprobs})"
        faults.append(Fault("logits/topk_logprobs", what, (sample["sample_id"],), shard))
    return faults


def _step(codec: HiddenCodec, arrays: dict[str, np.ndarray], rows_nH: Tensor) -> Tensor:
    """How far apart neighbours are that a value may be rounded to, with a little for the scale's own rounding."""
    if codec.name not in SCALED:
        return torch.zeros(1)
    scale_n1 = torch.from_numpy(arrays["hidden_scale"])[:, None]
    if codec.name == "fp8":  # three bits after the leading one
        return torch.maximum(rows_nH.abs() / 8, scale_n1 / 512) * 1.02
    return scale_n1 * 1.02
