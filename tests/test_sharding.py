"""A draft that is spread over the ranks: the gradients, runs and files of a whole one."""

import signal
from pathlib import Path

import pytest
import torch
from ranks_fixtures import KINDS, RankDriver, alike, chosen_for
from safetensors.torch import load_file
from train_fixtures import stable_lines


@pytest.mark.parametrize("kind", KINDS)
def test_a_spread_draft_has_the_same_gradients(
    rank_driver: RankDriver, uneven_cache: str, tmp_path: Path, kind: str
) -> None:
    seen = []
    for shard in (False, True):
        file = tmp_path / f"{shard}.safetensors"
        chosen = chosen_for(kind, 2, shard=shard)
        codes, said = rank_driver.run(2, chosen, uneven_cache, tmp_path / str(shard), gradients=str(file))
        assert codes == [0, 0], said
        seen.append(load_file(file))
    for name, gradient in seen[0].items():
        torch.testing.assert_close(seen[1][name], gradient, rtol=1e-4, atol=2e-6 * float(gradient.abs().max()))


@pytest.mark.parametrize(("kind", "world"), [("dflash", 2), ("dflash2", 2), ("dflash2", 4)])
def test_a_spread_draft_is_trained_as_a_whole_one(
    rank_driver: RankDriver, uneven_cache: str, by_one_rank: dict[str, Path], tmp_path: Path, kind: str, world: int
) -> None:
    codes, said = rank_driver.run(world, chosen_for(kind, 4 // world, shard=True), uneven_cache, tmp_path / "r")
    assert codes == [0] * world, said
    alike(tmp_path / "r", by_one_rank[kind])


def test_a_spread_draft_goes_on_by_one_rank_and_back(
    rank_driver: RankDriver, uneven_cache: str, by_one_rank: dict[str, Path], tmp_path: Path
) -> None:
    run, parts = tmp_path / "r", [(2, 2, True), (1, 4, False), (2, 2, True)]
    for number, (world, accumulate, shard) in enumerate(parts):
        chosen = chosen_for("dflash2", accumulate, shard=shard)
        signals = [[0, 2, signal.SIGTERM]] if number < 2 else []
        codes, said = rank_driver.run(world, chosen, uneven_cache, run, resume=number > 0, signals=signals)
        assert codes == ([143] if number < 2 else [0]) * world, said
    alike(run, by_one_rank["dflash2"])


def test_muon_trains_a_spread_draft(rank_driver: RankDriver, uneven_cache: str, tmp_path: Path) -> None:
    """To the rounding of bfloat16, in which Muon makes its matrices orthogonal."""
    runs = []
    for shard in (False, True):
        chosen = chosen_for("dflash2", 2, shard=shard)
        chosen = chosen.model_copy(update={"optim": chosen.optim.model_copy(update={"name": "muon"})})
        runs.append(tmp_path / str(shard))
        codes, said = rank_driver.run(2, chosen, uneven_cache, runs[-1])
        assert codes == [0, 0], said
    for one, other in zip(*map(stable_lines, runs), strict=True):
        for key in ("train/loss", "train/grad_norm"):
            assert key not in one or one[key] == pytest.approx(other[key], rel=5e-3)
