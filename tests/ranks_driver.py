"""Trainings by several processes, some of which are killed; forked from one interpreter, since importing torch takes seconds.

Reads tasks from standard input, one JSON object each: {"world", "options", "cache", "out", "resume", "signals": [[rank, step, signal]],
"gradients": file or null}; answers each with a line of JSON: the exit status of every process (negative: the signal that ended it) and
what each wrote to standard error. A rank with a signal sends it to itself as it begins that step; signal 0 is
a fault of its own. With `gradients` nothing is
trained: the gradients of the first step, of weights all of which matter, go into the file.
"""

import json
import os
import socket
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
import torch._dynamo  # noqa: E402
import torch.distributed.fsdp  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from train_fixtures import TARGET_CONFIG  # noqa: E402

from cache.peers import whole  # noqa: E402
from draft.shape import text_config  # noqa: E402
from schemas.errors import DflashError, Interrupted, TrainFault  # noqa: E402
from schemas.options import TrainOptions  # noqa: E402
from schemas.ranks import Ranks  # noqa: E402
from schemas.say import Silent  # noqa: E402
from train import run as training  # noqa: E402
from train.batch import read_batches  # noqa: E402
from train.gradients import GradientSum  # noqa: E402
from train.setup import prepare  # noqa: E402
from train.sharding import like  # noqa: E402
from train.step import _taking_part, accumulate, take_window  # noqa: E402
from train.stream import StreamState, stream  # noqa: E402
from train.team import assemble  # noqa: E402


def gradients(task: dict[str, Any], options: TrainOptions, ranks: Ranks) -> None:
    with assemble(ranks, "cpu") as team:
        job = prepare(options, task["cache"], task["out"], False, Silent(), team)
        with torch.no_grad():
            for number, parameter in enumerate(job.learner.optimizers.parameters.values()):
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
                parameter.add_(0.1 * like(parameter, noise))
        micros = stream(job.order, StreamState(), ranks.rank, ranks.world)
        window = take_window(read_batches(job.cache, job.draw, micros), options.optim.accumulate)
        learner = job.learner
        if learner.gradient_sum is not None:
            # Small buckets, so that there are many.
            learner = replace(learner, gradient_sum=GradientSum(list(learner.optimizers.parameters.values()), 2000))
        accumulate(learner, _taking_part(learner, window))
        if learner.gradient_sum is not None:
            learner.gradient_sum.finish()
        grads = {name: whole(p.grad).contiguous() for name, p in learner.optimizers.parameters.items()}
        spread = options.run.shard and ranks.world > 1
        assert all(isinstance(p.grad, DTensor) == spread for p in learner.optimizers.parameters.values())
        if ranks.first:
            save_file(grads, task["gradients"])


def child(task: dict[str, Any], ranks: Ranks) -> None:
    options = TrainOptions.model_validate_json(json.dumps(task["options"]))
    real, begun = training.run_step, [0]

    def watched(*arguments: Any) -> Any:
        begun[0] += 1
        for rank, step, number in task["signals"]:
            if (rank, step) == (ranks.rank, begun[0]):
                if number == 0:
                    raise TrainFault("the disk is on fire")
                os.kill(os.getpid(), number)
        return real(*arguments)

    training.run_step = watched
    code = 0
    try:
        if task["gradients"] is not None:
            gradients(task, options, ranks)
        else:
            training.train(options, task["cache"], task["out"], task["resume"], Silent(), ranks)
    except (DflashError, Interrupted) as fault:
        print(f"{type(fault).__name__}: {fault}", file=sys.stderr)
        code = fault.exit_code
    except BaseException as fault:
        print(f"{type(fault).__name__}: {fault}", file=sys.stderr)
        code = 99
    sys.stderr.flush()
    os._exit(code)


def run(task: dict[str, Any]) -> dict[str, object]:
    world, pids = task["world"], dict[int, int]()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(free.getsockname()[1]))
    files = [tempfile.TemporaryFile() for _ in range(world)]  # noqa: SIM115
    for rank in range(world):
        if (pid := os.fork()) == 0:
            os.dup2(files[rank].fileno(), 2)
            child(task, Ranks(rank, world, rank, world))
        pids[pid] = rank
    codes: dict[int, int] = {}
    while len(codes) < world:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pids[pid]] = os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    said = []
    for file in files:
        file.seek(0)
        said.append(file.read().decode())
    return {"codes": [codes[rank] for rank in range(world)], "said": said}


if __name__ == "__main__":
    # Its imports, once for all processes.
    text_config(TARGET_CONFIG)
    for text in sys.stdin:
        print(json.dumps(run(json.loads(text))), flush=True)
