"""The processes that train together: their sums, what they know of each other, and the end of all where one fails.

One process alone needs no network, and all of this is then the identity.
"""

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from cache.device import resolve_device
from cache.peers import lost_peer, meet, stand_by
from schemas.errors import Bystander, DflashError, Interrupted
from schemas.ranks import ALONE, Ranks

Value = TypeVar("Value")

# Nobody waits longer for a rank that says nothing: for one that was killed where no launcher ends the others.
PATIENCE = timedelta(minutes=30)
FAILED, FAULTS, HEARD = "failed", "faults", "heard"
WATCH_SECONDS = 0.5
# For those who are asked to hear why one of them stops: on a busy machine threads wait for seconds.
HEAR_SECONDS = 10.0
# For a process to notice by itself that another has failed, before it is ended in the middle of waiting for it.
LEAVE_SECONDS = 20.0


@dataclass(frozen=True)
class Team:
    """This process among those that train together; `device` is where it computes, and what is summed over all lies."""

    ranks: Ranks
    device: torch.device

    @property
    def world(self) -> int:
        """How many processes there are."""
        return self.ranks.world

    @property
    def first(self) -> bool:
        """Whether this is the process that speaks and writes."""
        return self.ranks.first

    def sums(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Sums over all ranks, in double precision, the same bits on each. Every rank gives the same names."""
        if self.world == 1:
            return dict(sums)
        names = sorted(sums)
        values = torch.tensor([sums[name] for name in names], dtype=torch.float64, device=self.device)
        dist.all_reduce(values)
        return dict(zip(names, values.tolist(), strict=True))

    def any(self, here: bool) -> bool:
        """Whether it is so on any rank."""
        return self.sums({"here": float(here)})["here"] > 0

    def gather(self, value: Value) -> list[Value]:
        """Every rank's value, in the order of ranks."""
        if self.world == 1:
            return [value]
        values: list[Value | None] = [None] * self.world
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]

    def wait(self) -> None:
        """Return when every rank has come here."""
        self.any(False)


SOLO = Team(ALONE, torch.device("cpu"))


@contextmanager
def assemble(ranks: Ranks, device: str) -> Iterator[Team]:
    """The team, for as long as the work takes: gloo between CPUs, NCCL between GPUs.

    A rank that fails tells the others, which then end as Bystander rather than wait for it: at their next sum where its
    connections are closed, else within seconds. Raises OptionError for a device that is not there. Interrupted is taken to be
    agreed on by all.
    """
    if ranks.world == 1:
        yield Team(ranks, resolve_device(device, ranks))
        return
    store = meet(ranks, "train")
    watch = _Watch(store)
    try:
        with watch:
            place = resolve_device(device, ranks)
            if place.index is not None:
                torch.cuda.set_device(place)
            backend = "nccl" if place.type == "cuda" else "gloo"
            own = dist.PrefixStore("group", store)
            dist.init_process_group(backend, store=own, rank=ranks.rank, world_size=ranks.world, timeout=PATIENCE)
            yield Team(ranks, place)
    except (Interrupted, KeyboardInterrupt):
        raise
    except BaseException as fault:
        reason = watch.reason or _reason(store, ranks, fault)
        if reason is None:
            _let_hear(store, ranks)
            raise
        stand_by()
        raise Bystander(reason) from None
    dist.destroy_process_group()


class _Watch:
    """Hears why another process has failed, while this one may be waiting for it, and ends this one where it does not notice.

    (It does not inside a sum on a GPU that will never be complete.) `reason` is what was heard.
    """

    reason: str | None = None

    def __init__(self, store: dist.Store) -> None:
        self._store, self._over = store, threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_fault: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(WATCH_SECONDS):
            # The first process holds the store: when it is gone, so is the answer.
            with suppress(RuntimeError):
                if not self._store.check([FAILED]):
                    continue
                self.reason = _heard(self._store)
            if not self._over.wait(LEAVE_SECONDS):
                os._exit(Bystander.exit_code)


def _reason(store: dist.Store, ranks: Ranks, fault: BaseException) -> str | None:
    # Why another process made this one stop; None where the fault is its own, which the others are told then.
    if isinstance(fault, Bystander):
        return str(fault)
    lost = lost_peer(fault)
    with suppress(RuntimeError):
        if lost is None and store.add(FAULTS, 1) == 1:
            what = str(fault) if isinstance(fault, DflashError) else type(fault).__name__
            store.set(FAILED, f"process {ranks.rank} stopped: {what}")
            return None
        if store.check([FAILED]):
            return _heard(store)
    return f"another process is gone ({lost}): go on with --resume"


def _heard(store: dist.Store) -> str:
    why = str(store.get(FAILED).decode())
    store.add(HEARD, 1)
    return why


def _let_hear(store: dist.Store, ranks: Ranks) -> None:
    # The first process holds the store, unless a launcher does: with it goes what it told the others.
    deadline = time.monotonic() + HEAR_SECONDS
    if ranks.first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        while store.add(HEARD, 0) < ranks.world - 1 and time.monotonic() < deadline:
            time.sleep(0.02)
