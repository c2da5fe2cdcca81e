"""Several processes of the same command: started here with torch's own launcher, or by an outer torchrun or srun."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from schemas.errors import DflashError, Interrupted, OptionError
from schemas.ranks import ALONE, Ranks, ranks_of

LAUNCHER = "DFLASH_LAUNCHER"
PR_SET_PDEATHSIG = 1
# A worker that is told to stop finishes its forward pass and the shard it is writing, or its step and a checkpoint.
SHUTDOWN_SECONDS = 60
SAME = "the same command goes on where it stopped"


def own_ranks(environment: Mapping[str, str], nproc: int | None, tp: int = 1) -> Ranks | None:
    """Which of several processes this is; None where they are still to be launched.

    Raises OptionError where `nproc` contradicts an outer launcher, or is no multiple of `tp`.
    """
    if nproc is not None and nproc % tp:
        raise OptionError(f"--nproc {nproc} is no multiple of --tp {tp}: every copy of the target needs {tp} processes")
    ranks = ranks_of(environment)
    if ranks is None:
        return ALONE if (nproc or tp) == 1 else None
    if launched(environment):
        _end_with_parent()
    elif nproc is not None:
        raise OptionError(f"--nproc {nproc} inside a launcher that started {ranks.world} processes: leave --nproc out")
    return ranks


def launched(environment: Mapping[str, str]) -> bool:
    """Whether `launch` started this process; then it speaks for all of them where they are stopped."""
    return environment.get(LAUNCHER) == str(os.getppid())


def launch(
    words: Sequence[str], nproc: int, go_on: Callable[[], str] = lambda: SAME, patience: int = SHUTDOWN_SECONDS
) -> NoReturn:
    """Run `dflash WORDS` in `nproc` processes of this machine and exit as they did.

    The processes print for themselves. `go_on` says, once they have been stopped, how to go on; `patience` is how many seconds they
    have to stop by themselves. Exit code: that of the first that failed. Raises DflashError where one was killed,
    Interrupted and KeyboardInterrupt after SIGTERM and Ctrl-C.
    """
    import logging

    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # What failed is said by the process itself, in one line; the launcher, which does nothing else, would add forty.
    logging.disable(logging.ERROR)
    os.environ[LAUNCHER] = str(os.getpid())
    # Processes that share the cores must not each start a thread for every core.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id="dflash",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        shutdown_timeout=patience,
        # The processes print for themselves; a folder for their logs would stay behind.
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    try:
        elastic_launch(config, sys.executable)("-m", "pipeline", *words)
    except ChildFailedError as fault:
        rank, failure = min(fault.failures.items(), key=lambda item: item[1].timestamp)
        if failure.exitcode > 0:
            sys.exit(failure.exitcode)
        raise DflashError(
            f"process {rank} of {nproc} was ended by {signal.Signals(-failure.exitcode).name}: {go_on()}"
        ) from None
    except SignalException as fault:
        if fault.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise Interrupted(f"stopped by {fault.sigval.name}: {go_on()}") from None
    sys.exit(0)


def _end_with_parent() -> None:
    # A launcher that is killed cannot end its processes; on Linux the kernel does it.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
