"""The processes that capture together, and what they tell each other through torch's key-value store.

A replica is one copy of the target over `tp` processes; the replicas share nothing but the store, so that none waits for a slow
one. One process alone runs the same code over a store in its memory.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch.distributed as dist

from cache.peers import lost_peer, meet, stand_by
from schemas.errors import Bystander, DflashError, Interrupted, OptionError
from schemas.ranks import Ranks

POLL_SECONDS = 0.05
LEAVE_SECONDS = 10.0
FAILED = "failed"


@dataclass(frozen=True)
class Crew:
    """This process among those that capture together; `store` is common to all, `tp` processes hold one copy of the target."""

    store: dist.Store
    ranks: Ranks
    tp: int = 1

    @property
    def replica(self) -> int:
        """Which copy of the target this process is part of."""
        return self.ranks.rank // self.tp

    @property
    def member(self) -> int:
        """Which part of that copy this process holds; member 0 writes."""
        return self.ranks.rank % self.tp

    def tell(self, key: str, value: str = "") -> None:
        """Publish a value once, for all."""
        self.store.set(key, value)

    def hear(self, key: str, meanwhile: Callable[[], None] = lambda: None) -> str:
        """Wait for a value. Raises Bystander where another process has failed meanwhile.

        Waiting is polling, since a process that sleeps inside the store would not notice SIGTERM.
        """
        while not self.store.check([key]):
            self.check()
            meanwhile()
            time.sleep(POLL_SECONDS)
        return str(self.store.get(key).decode())

    def hear_all(self, key: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait until every process has told `key` under its own rank."""
        for rank in range(self.ranks.world):
            self.hear(f"{key}/{rank}", meanwhile)

    def check(self) -> None:
        """Raise Bystander where another process has failed."""
        if self.store.check([FAILED]):
            raise Bystander(self.store.get(FAILED).decode())

    def claim(self, work: Sequence[int]) -> Iterator[int]:
        """Items of `work`, each given to one replica only, in order, as replicas become free."""
        turn = 0
        while True:
            key = f"claim/{self.replica}/{turn}"
            if self.member == 0:
                self.tell(key, str(self.store.add("claimed", 1) - 1))
            number = int(self.hear(key))
            if number >= len(work):
                return
            yield work[number]
            turn += 1


@contextmanager
def gather(ranks: Ranks, tp: int) -> Iterator[Crew]:
    """The crew, for as long as the work takes. A process that fails tells the others, so that none waits for it.

    Raises OptionError where the number of processes is no multiple of `tp`.
    """
    if ranks.world % tp:
        what = f"--tp {tp} does not divide the {ranks.world} processes: every copy of the target needs {tp} of them"
        raise OptionError(what) if ranks.first else Bystander(what)
    crew = Crew(meet(ranks, "capture"), ranks, tp)
    try:
        yield crew
    except BaseException as fault:
        reason = _reason(crew, fault)
        if reason is None:
            raise
        if not isinstance(fault, Interrupted | KeyboardInterrupt):
            # Whoever stopped this one as well waits for it.
            stand_by()
        raise Bystander(reason) from None
    _leave(crew)


def _reason(crew: Crew, fault: BaseException) -> str | None:
    # Why another process made this one stop; None where the fault is its own, which the others are told then.
    if isinstance(fault, Bystander):
        return str(fault)
    if crew.ranks.world > 1 and (lost := lost_peer(fault)) is not None:
        return f"another process is gone ({lost}): run the same command again"
    with suppress(RuntimeError):
        if crew.store.check([FAILED]):
            return str(crew.store.get(FAILED).decode())
        what = str(fault) if isinstance(fault, DflashError | Interrupted) else type(fault).__name__
        crew.tell(FAILED, f"process {crew.ranks.rank} stopped: {what}")
    return None


def _leave(crew: Crew) -> None:
    # The first process may be the one that holds the store: it goes last, though it does not wait for the dead.
    left, deadline = crew.store.add("left", 1), time.monotonic() + LEAVE_SECONDS
    while crew.ranks.first and left < crew.ranks.world and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        left = crew.store.add("left", 0)
