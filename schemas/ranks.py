"""Which of several processes this is, as the launcher said in the environment (torchrun's names, or those that srun gives)."""

from collections.abc import Mapping
from dataclasses import dataclass

from schemas.errors import OptionError


@dataclass(frozen=True)
class Ranks:
    """Process `rank` of `world`, the one numbered `local` of the `local_world` on its machine."""

    rank: int = 0
    world: int = 1
    local: int = 0
    local_world: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that plans, speaks and finishes."""
        return self.rank == 0


ALONE = Ranks()


def ranks_of(environment: Mapping[str, str]) -> Ranks | None:
    """The ranks that a launcher gave, or None where there is none: RANK and WORLD_SIZE, and LOCAL_RANK where it is set.

    srun starts processes without these; a job script exports RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS, and
    SLURM_LOCALID stands for LOCAL_RANK. Raises OptionError for values that are no ranks, and for one of srun's several
    processes that was given none.
    """
    given = [name for name in ("RANK", "WORLD_SIZE") if name in environment]
    if not given:
        _check_not_srun(environment)
        return None
    if len(given) == 1:
        # Taken for a process alone, each of several would do all of the work.
        other = "WORLD_SIZE" if given == ["RANK"] else "RANK"
        raise OptionError(
            f"{given[0]} is set but {other} is not: let torchrun set both, or unset {given[0]} for one process"
        )
    local = environment.get("LOCAL_RANK", environment.get("SLURM_LOCALID", "0"))
    found = {
        "RANK": environment["RANK"],
        "WORLD_SIZE": environment["WORLD_SIZE"],
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": environment.get("LOCAL_WORLD_SIZE", environment["WORLD_SIZE"]),
    }
    for name, value in found.items():
        if not (value.isascii() and value.isdigit()):
            raise OptionError(f"{name}={value!r} in the environment is no number: let torchrun set it, or unset it")
    ranks = Ranks(*(int(value) for value in found.values()))
    if not ranks.rank < ranks.world:
        raise OptionError(f"RANK={ranks.rank} is not below WORLD_SIZE={ranks.world}: ranks count from 0")
    if ranks.world > 1:
        _check_meeting_place(environment)
    return ranks


def _check_not_srun(environment: Mapping[str, str]) -> None:
    # Each of them would take itself for the only one and do all of the work.
    if (tasks := environment.get("SLURM_STEP_NUM_TASKS", "1")) not in ("", "0", "1"):
        raise OptionError(
            f"srun started {tasks} processes and told none of them its rank: export RANK=$SLURM_PROCID "
            "WORLD_SIZE=$SLURM_NTASKS, MASTER_ADDR and MASTER_PORT in each, or unset SLURM_STEP_NUM_TASKS where each is to work alone"
        )


def _check_meeting_place(environment: Mapping[str, str]) -> None:
    remedy = "set MASTER_ADDR and MASTER_PORT to a free port of rank 0's machine, or start with torchrun"
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environment.get(name):
            raise OptionError(f"WORLD_SIZE is set but {name} is not: {remedy}")
    port = environment["MASTER_PORT"]
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise OptionError(f"MASTER_PORT={port!r} in the environment is no port: {remedy}")
