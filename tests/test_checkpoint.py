"""Checkpoints: the bits come back, folders appear whole, torn ones are nothing, old ones go."""

import json
import os
from pathlib import Path

import pytest
import torch

from schemas.errors import DraftError, TrainFault
from train.checkpoint import (
    MODEL,
    STATE,
    Checkpoint,
    TrainState,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)


def checkpoint(step: int) -> Checkpoint:
    draw = torch.Generator().manual_seed(step)
    model = {"fc.weight": torch.randn(4, 3, generator=draw), "norm.weight": torch.tensor([1.0, -0.0, 1e-42, 3.4e38])}
    optimizer = {"exp_avg/fc.weight": torch.randn(4, 3, generator=draw), "step/fc.weight": torch.tensor(float(step))}
    return Checkpoint(
        model, optimizer, TrainState(step=step, epoch=1, position=7, sums={"base_loss": 0.1 + step, "valid": 3.0})
    )


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    saved = checkpoint(500)
    path = save_checkpoint(tmp_path, saved, keep=2)
    assert path.name == "step-000500" and sorted(p.suffix for p in path.iterdir()) == [
        ".json",
        ".safetensors",
        ".safetensors",
    ]
    loaded = load_checkpoint(path)
    assert loaded.state == saved.state
    for ours, theirs in ((saved.model, loaded.model), (saved.optimizer, loaded.optimizer)):
        assert ours.keys() == theirs.keys()
        assert all(ours[key].numpy().tobytes() == theirs[key].numpy().tobytes() for key in ours)


def test_the_newest_are_kept_and_ordered_by_step(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000, 1_000_010):
        save_checkpoint(tmp_path, checkpoint(step), keep=2)
    assert list(list_checkpoints(tmp_path)) == [1_000_000, 1_000_010]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_torn_checkpoint_is_nothing_and_is_removed(tmp_path: Path) -> None:
    torn = tmp_path / ".tmp-step-000020"
    torn.mkdir()
    (torn / MODEL).write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    assert list_checkpoints(tmp_path) == {}
    save_checkpoint(tmp_path, checkpoint(20), keep=1)
    assert not torn.exists() and list(list_checkpoints(tmp_path)) == [20] and (tmp_path / "notes.txt").exists()


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, checkpoint(10), keep=1)

    def refuse(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(TrainFault, match=r"step-000020.*No space left"):
        save_checkpoint(tmp_path, checkpoint(20), keep=1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000010"]


@pytest.mark.parametrize("broken", [MODEL, "optimizer.safetensors", STATE])
def test_an_unreadable_checkpoint_is_one_line(tmp_path: Path, broken: str) -> None:
    path = save_checkpoint(tmp_path, checkpoint(10), keep=1)
    (path / broken).write_bytes(b"{")
    with pytest.raises(DraftError, match="resume from another checkpoint"):
        load_checkpoint(path)
    (path / broken).unlink()
    with pytest.raises(DraftError, match="resume from another checkpoint"):
        load_checkpoint(path)


def test_unknown_keys_in_the_state_are_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, checkpoint(10), keep=1)
    state = json.loads((path / STATE).read_text())
    (path / STATE).write_text(json.dumps({**state, "rng": [1]}))
    with pytest.raises(DraftError, match="rng: unknown key"):
        load_checkpoint(path)
