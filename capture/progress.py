"""How far a capture is, over all its processes: every process publishes its counts, the first one adds them up."""

import time
from dataclasses import dataclass, field

from capture.crew import Crew
from schemas.errors import CaptureFault
from schemas.say import Say

# How often a process that waits for the others looks at their counts, and how long it waits without any change.
SHOW_SECONDS = 0.5
PATIENCE_SECONDS = 3600.0


@dataclass
class Progress:
    """Counts of this process: `tokens` done, `places` of the padded batches they ran in, `bytes` written.

    `total` is the number of tokens that all processes together have to do.
    """

    crew: Crew
    total: int
    say: Say
    tokens: int = 0
    places: int = 0
    written: int = 0
    _begun: float = field(default_factory=time.monotonic)
    _shown: float = 0.0
    _lines: int = 0
    _last: tuple[int, ...] = ()
    _changed: float = field(default_factory=time.monotonic)

    def batch(self, tokens: int, places: int) -> None:
        """A forward pass is done."""
        self.tokens += tokens
        self.places += places
        self._publish()
        self.crew.check()
        self.show()

    def shard(self, line: str, written: int) -> None:
        """A shard is committed; `line` says so in the log of the first process."""
        self.written += written
        self._publish()
        self.crew.tell(f"line/{self.crew.store.add('lines', 1) - 1}", line)
        self.show(at_once=True)

    def show(self, at_once: bool = False) -> None:
        """In the first process: all new lines, and the sum of all counts, at most twice a second."""
        now = time.monotonic()
        if not self.crew.ranks.first or not (at_once or now - self._shown >= SHOW_SECONDS):
            return
        self._shown = now
        while self.crew.store.check([f"line/{self._lines}"]):
            self.say.note(self.crew.hear(f"line/{self._lines}"))
            self._lines += 1
        counts = self._sum()
        if counts != self._last:
            self._last, self._changed = counts, now
            self._tell(*counts)

    def wait(self) -> None:
        """In the first process, while others work: show them; CaptureFault where none of them gets on any more."""
        self.show()
        if time.monotonic() - self._changed > PATIENCE_SECONDS:
            raise CaptureFault(
                f"no process has got on for {PATIENCE_SECONDS / 60:.0f} minutes: one of them hangs or is dead; run the same command again"
            )

    def _tell(self, tokens: int, places: int, written: int) -> None:
        padding = 1 - tokens / places if places else 0.0
        rate = tokens / max(time.monotonic() - self._begun, 1e-9)
        self.say.progress(
            "capture",
            tokens,
            self.total,
            tokens_per_s=rate,
            padding=f"{padding:.1%}",
            written=f"{written / 1e6:,.1f} MB",
        )

    def _publish(self) -> None:
        self.crew.tell(f"counts/{self.crew.ranks.rank}", f"{self.tokens} {self.places} {self.written}")

    def _sum(self) -> tuple[int, int, int]:
        sums = [0, 0, 0]
        # One copy of the target counts once, over whichever of its processes writes.
        for rank in range(0, self.crew.ranks.world, self.crew.tp):
            if self.crew.store.check([f"counts/{rank}"]):
                values = self.crew.hear(f"counts/{rank}").split()
                sums = [total + int(value) for total, value in zip(sums, values, strict=True)]
        return sums[0], sums[1], sums[2]
