"""The loop of a capture: claim a shard, run the target over it, commit it, while the next one runs."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from cache.write import CacheWriter
from capture.crew import Crew
from capture.forward import ShardPlan, run_shard, shard_plan
from capture.progress import Progress
from target.head import HeadTraits
from target.load import Target


def run_shards(
    target: Target,
    traits: HeadTraits,
    writer: CacheWriter,
    missing: Sequence[int],
    crew: Crew,
    progress: Progress,
    prefill_chunk: int | None = None,
) -> None:
    """Do those of the `missing` shards that this process's copy of the target claims; see `run_shard` for `prefill_chunk`.

    A thread writes one shard while the target runs the next, so two shards are in memory and neither the device nor the
    disk waits. Raises what run_shard and commit_shard raise; a shard that was claimed then stays missing.
    """
    identity = writer.manifest.identity
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="commit") as pool:
        pending: tuple[Future[int], str] | None = None
        for shard in crew.claim(missing):
            plan, begun = shard_plan(writer.plan.shard(shard), shard, identity.shard_tokens), time.monotonic()
            places = batch_places(plan)
            arrays = run_shard(target, traits, identity, plan, _counted(progress, places), prefill_chunk, writer.codec)
            if pending is not None:
                _settle(pending, progress)
            if crew.member == 0:
                line = _line(shard, plan, places, time.monotonic() - begun, crew)
                pending = pool.submit(writer.commit_shard, shard, arrays), line
            del arrays
        if pending is not None:
            _settle(pending, progress)


def batch_places(plan: ShardPlan) -> list[int]:
    """Places of each padded forward pass of a shard: samples times the longest of them."""
    count = np.bincount(plan.batch)
    longest = np.zeros_like(count)
    np.maximum.at(longest, plan.batch, plan.length)
    return [int(places) for places in count * longest]


def _counted(progress: Progress, places: Sequence[int]) -> Callable[[int], None]:
    following = iter(places)
    return lambda tokens: progress.batch(tokens, next(following))


def _settle(pending: tuple[Future[int], str], progress: Progress) -> None:
    future, line = pending
    written = future.result()
    progress.shard(f"{line}, {written / 1e6:,.1f} MB", written)


def _line(shard: int, plan: ShardPlan, places: Sequence[int], seconds: float, crew: Crew) -> str:
    tokens = int(plan.length.sum())
    who = f", process {crew.ranks.rank}" if crew.ranks.world > 1 else ""
    return (
        f"shard {shard}{who}: {len(plan.length):,} samples, {tokens:,} tokens, padding {1 - tokens / sum(places):.1%}, "
        f"{tokens / max(seconds, 1e-9):,.0f} tokens/s"
    )
