"""Weak scaling: tokens/s of several ranks, each with a micro-batch of its own and pinned to a core, against one rank on one core.

    python benchmarks/ranks.py [--ranks 2] [--steps 4] [--rounds 3] [--shard]

A dflash2 draft of two layers at SmolLM2's sizes (H 576, V 49152; 33 million parameters), blocks of 16, AdamW, a micro-batch of
512 packed tokens and 64 blocks a rank, float32 on the CPU. One rank and several run alternately.
"""

import argparse
import os
import socket
import statistics
import time
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.queues import Queue

import torch
from checkpointing import TOKENS, learner_and_batch

from schemas.options import OptimOptions
from schemas.ranks import Ranks
from train.gradients import GradientSum
from train.optim import make_optimizers
from train.sharding import shard
from train.step import run_step
from train.team import assemble


def work(rank: int, world: int, port: int, steps: int, spread: bool, answer: "Queue[float]") -> None:
    """One rank: a step to warm up, then `steps`, timed from when all are ready to when all have done them."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    learner, batch = learner_and_batch()
    with assemble(Ranks(rank, world, rank, world), "cpu") as team:
        learner = replace(learner, team=team)
        if world > 1 and spread:
            shard(learner.draft, team.device, world)
            optimizers = make_optimizers(dict(learner.draft.named_parameters()), OptimOptions(name="adamw"))
            learner = replace(learner, optimizers=optimizers)
        elif world > 1:
            learner = replace(learner, gradient_sum=GradientSum(list(learner.optimizers.parameters.values())))
        run_step(learner, [batch], 1e-4)
        team.wait()
        started = time.perf_counter()
        for _ in range(steps):
            run_step(learner, [batch], 1e-4)
        team.wait()
        if team.first:
            answer.put(world * TOKENS * steps / (time.perf_counter() - started))


def tokens_per_s(world: int, steps: int, spread: bool) -> float:
    """Over all ranks."""
    context = get_context("spawn")
    answer: Queue[float] = context.Queue()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    ranks = [context.Process(target=work, args=(rank, world, port, steps, spread, answer)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert all(process.exitcode == 0 for process in ranks), "a rank failed"
    return answer.get()


def main() -> None:
    """Print both rates and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shard", action="store_true", help="spread the draft over the ranks")
    arguments = parser.parse_args()
    rates: dict[int, list[float]] = {1: [], arguments.ranks: []}
    for _ in range(arguments.rounds):
        for world in rates:
            rates[world].append(tokens_per_s(world, arguments.steps, arguments.shard))
    for world, each in rates.items():
        print(f"{world} rank{'s' if world > 1 else ' '}  {statistics.median(each):8,.0f} tokens/s")
    one, several = (statistics.median(each) for each in rates.values())
    print(f"{arguments.ranks} ranks / 1 rank   {several / one:6.2f}")


if __name__ == "__main__":
    main()
