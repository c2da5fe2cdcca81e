"""What the tests of captures by several processes share: the process that forks them, and the options of a capture."""

from pathlib import Path
from typing import Any

from capture_fixtures import capture_options
from driver_fixtures import Driver

from schemas.options import CaptureOptions

ROWS = 40


class CrewDriver(Driver):
    """tests/crew_driver.py at work."""

    def __init__(self) -> None:
        super().__init__("crew_driver.py")

    def run(
        self, world: int, options: CaptureOptions, kill: tuple[int, ...] = (), after: float = 0.0
    ) -> tuple[list[int], float]:
        options_given = options.model_dump(mode="json")
        answer = self.ask({"world": world, "options": options_given, "kill": kill, "after": after})
        return answer["codes"], answer["seconds"]


def options_for(target: str, data: str, out: Path, **options: Any) -> CaptureOptions:
    return capture_options(target, data, out, layers=(0, 2), **options)
