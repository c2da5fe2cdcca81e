"""What a log shows of a long work: figures, and when it will be done."""

import io

import pytest

import pipeline.console
from pipeline.console import Console


def test_a_log_has_the_first_the_last_and_a_line_every_ten_seconds_with_the_time_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = {"now": 100.0}
    monkeypatch.setattr(pipeline.console.time, "monotonic", lambda: clock["now"])
    stream = io.StringIO()
    with Console(stream) as say:
        for step in range(1, 101):
            say.progress("train", step, 100, loss=2.5, accept_len=1.234, GB=12.0)
            clock["now"] += 3.0
    lines = stream.getvalue().splitlines()
    assert lines[0] == "train 1/100  loss 2.5  accept len 1.23  GB 12"
    assert lines[1] == "train 5/100  loss 2.5  accept len 1.23  GB 12  eta 0:04:45"
    assert lines[-1] == "train 100/100  loss 2.5  accept len 1.23  GB 12"
    assert len(lines) == 26, "steps 1, 5, 9 ... 97 and the last"


def test_a_work_that_was_gone_on_with_is_timed_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"now": 0.0}
    monkeypatch.setattr(pipeline.console.time, "monotonic", lambda: clock["now"])
    stream = io.StringIO()
    with Console(stream) as say:
        say.progress("train", 5000, 9010)
        clock["now"] = 10.0
        say.progress("train", 5010, 9010)
    assert stream.getvalue().splitlines()[-1] == "train 5,010/9,010  eta 1:06:40"
