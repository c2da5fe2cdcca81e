"""Checkpoints on a thread: what was asked for is what is written, one at a time, and a fault is the trainer's."""

import os
import threading
from pathlib import Path

import pytest
import torch

import train.writer
from schemas.errors import TrainFault
from train.checkpoint import Best, Checkpoint, TrainState, list_checkpoints, load_checkpoint, save_checkpoint
from train.writer import CheckpointWriter


def checkpoint(step: int, best: int | None = None) -> Checkpoint:
    state = TrainState(step=step, best=None if best is None else Best(step=best, walk=1.5))
    return Checkpoint({"fc.weight": torch.full((3, 4), float(step)).T}, {"exp_avg/fc.weight": torch.ones(4, 3)}, state)


class Gate:
    """Holds writes back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.writing = threading.Event(), 0

        def slow(folder: Path, each: Checkpoint, keep: int) -> Path:
            self.writing += 1
            assert self.open.wait(10)
            assert self.writing == 1, "two at a time"
            path = save_checkpoint(folder, each, keep)
            self.writing -= 1
            return path

        monkeypatch.setattr(train.writer, "save_checkpoint", slow)


def test_training_goes_on_while_it_is_written_and_changes_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, given = Gate(monkeypatch), checkpoint(5)
    with CheckpointWriter(tmp_path, 2) as writer:
        writer.save(given)
        given.model["fc.weight"].fill_(-1.0)
        given.optimizer["exp_avg/fc.weight"].zero_()
        assert list_checkpoints(tmp_path) == {}
        gate.open.set()
    loaded = load_checkpoint(tmp_path / "step-000005")
    assert bool((loaded.model["fc.weight"] == 5).all()) and bool((loaded.optimizer["exp_avg/fc.weight"] == 1).all())


def test_writes_come_one_after_the_other_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    threading.Timer(0.05, gate.open.set).start()
    with CheckpointWriter(tmp_path, 9) as writer:
        for step in range(1, 6):
            writer.save(checkpoint(step))
    assert list(list_checkpoints(tmp_path)) == [1, 2, 3, 4, 5]


def test_the_best_is_kept_beside_the_newest(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, 2) as writer:
        for step, best in [(1, 1), (2, 1), (3, 1), (4, 4), (5, 4)]:
            writer.save(checkpoint(step, best))
    assert list(list_checkpoints(tmp_path)) == [4, 5]
    save_checkpoint(tmp_path, checkpoint(6, 4), 1)
    assert list(list_checkpoints(tmp_path)) == [4, 6]


def test_a_full_disk_is_met_at_the_next_write_or_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with CheckpointWriter(tmp_path, 2) as writer:
        writer.save(checkpoint(1))
        with pytest.raises(TrainFault, match=r"step-000001.*No space left"):
            writer.save(checkpoint(2))
    with pytest.raises(TrainFault, match=r"step-000003.*No space left"), CheckpointWriter(tmp_path, 2) as writer:
        writer.save(checkpoint(3))
    assert list_checkpoints(tmp_path) == {}


def test_leaving_with_another_fault_waits_and_does_not_hide_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the loop's own"), CheckpointWriter(tmp_path, 2) as writer:  # noqa: PT012
        writer.save(checkpoint(1))
        raise ValueError("the loop's own")
    assert list(list_checkpoints(tmp_path)) == [1]


def test_a_device_without_room_copies_to_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensor: torch.Tensor, **_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch.Tensor, "clone", full)
    given = checkpoint(7)
    with CheckpointWriter(tmp_path, 2) as writer:
        writer.save(given)
        given.model["fc.weight"].fill_(-1.0)
    assert bool((load_checkpoint(tmp_path / "step-000007").model["fc.weight"] == 7).all())
