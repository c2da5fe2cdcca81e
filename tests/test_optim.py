"""The optimizers against updates computed by hand, the schedule against its definition, and their state there and back."""

import math

import pytest
import torch
from torch import nn

from schemas.errors import DraftError
from schemas.options import OptimOptions
from train.optim import Optimizers, learning_rate, make_optimizers


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    draw = torch.Generator().manual_seed(seed)
    shapes = {
        "fc.weight": (6, 12),
        "norm.weight": (6,),
        "layers.0.mlp.up_proj.weight": (9, 6),
        "layers.0.mlp_conv.base_kernel": (2, 2, 6),
        "candidate_selector.predecessor_codebook": (11, 4),
    }
    return {name: nn.Parameter(torch.randn(shape, generator=draw)) for name, shape in shapes.items()}


def run(optimizers: Optimizers, steps: int, lr: float, seed: int = 1) -> None:
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in optimizers.parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        optimizers.step(lr)
        optimizers.zero_grad()


def test_adamw_is_the_published_update_and_only_matrices_and_tables_decay() -> None:
    options = OptimOptions(name="adamw", weight_decay=0.1, betas=(0.8, 0.9))
    trained, lr = parameters(), 0.01
    expected = {name: p.detach().double().clone() for name, p in trained.items()}
    run(make_optimizers(trained, options), 3, lr)
    draw = torch.Generator().manual_seed(1)
    mean, square = ({name: torch.zeros_like(p) for name, p in expected.items()} for _ in range(2))
    for step in range(1, 4):
        for name, value in expected.items():
            gradient = torch.randn(value.shape, generator=draw).double()
            mean[name] = 0.8 * mean[name] + 0.2 * gradient
            square[name] = 0.9 * square[name] + 0.1 * gradient**2
            if value.ndim == 2:
                value *= 1 - lr * 0.1
            value -= lr * (mean[name] / (1 - 0.8**step)) / ((square[name] / (1 - 0.9**step)).sqrt() + 1e-8)
    for name, value in expected.items():
        torch.testing.assert_close(trained[name].detach().double(), value, rtol=1e-5, atol=1e-6)


def test_muon_turns_matrices_by_an_orthogonal_step_of_adamws_size_and_leaves_the_rest_to_adamw() -> None:
    before, muon, adamw = parameters(), parameters(), parameters()
    run(make_optimizers(muon, OptimOptions(name="muon")), 1, 0.01)
    run(make_optimizers(adamw, OptimOptions(name="adamw")), 1, 0.01)
    for name, start in before.items():
        step = (muon[name] - start).detach()
        if name in ("fc.weight", "layers.0.mlp.up_proj.weight"):
            size = 0.01 * 0.2 * math.sqrt(max(start.shape))
            singular = torch.linalg.svdvals(step) / size
            assert singular.min() > 0.5 and singular.max() < 1.4, name
        else:
            assert torch.equal(muon[name], adamw[name]), name


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_goes_there_and_back_bit_for_bit(name: str) -> None:
    options = OptimOptions(name=name, weight_decay=0.01)  # type: ignore[arg-type]
    straight = parameters()
    whole = make_optimizers(straight, options)
    run(whole, 3, 0.01, seed=1)
    run(whole, 2, 0.01, seed=2)
    stopped = parameters()
    first = make_optimizers(stopped, options)
    run(first, 3, 0.01, seed=1)
    resumed = {key: nn.Parameter(value.detach().clone()) for key, value in stopped.items()}
    second = make_optimizers(resumed, options)
    second.load({key: value.clone() for key, value in first.state().items()}, "checkpoint")
    run(second, 2, 0.01, seed=2)
    assert all(torch.equal(straight[key], resumed[key]) for key in straight)
    assert whole.state().keys() == second.state().keys()


def test_state_of_another_draft_is_refused() -> None:
    state = {"exp_avg/fc.weight": torch.zeros(3, 3)}
    with pytest.raises(DraftError, match=r"exp_avg/fc.weight \[3, 3\]"):
        make_optimizers(parameters(), OptimOptions(name="adamw")).load(state, "step-000010")


def test_clipping_scales_all_gradients_by_their_common_norm() -> None:
    optimizers = make_optimizers(parameters(), OptimOptions(name="adamw"))
    for parameter in optimizers.parameters.values():
        parameter.grad = torch.full_like(parameter, 2.0)
    count = sum(p.numel() for p in optimizers.parameters.values())
    norm = optimizers.gradient_norm()
    assert norm.item() == pytest.approx(2 * math.sqrt(count))
    optimizers.clip(100.0, norm)
    assert optimizers.gradient_norm().item() == pytest.approx(norm.item())
    optimizers.clip(1.0, norm)
    assert optimizers.gradient_norm().item() == pytest.approx(1.0, rel=1e-5)


def test_schedules() -> None:
    def rates(steps: int, **options: object) -> list[float]:
        chosen = OptimOptions(lr=2.0, **options)  # type: ignore[arg-type]
        return [learning_rate(step, steps, chosen) for step in range(steps)]

    cosine = rates(100, warmup=0.1, min_lr=0.25)
    assert cosine[:10] == pytest.approx([0.2 * step for step in range(1, 11)])
    assert cosine[10] == 2.0
    assert cosine[55] == pytest.approx(0.5 + 0.75)  # half way down: the mean of lr and the minimum
    assert cosine[10:] == sorted(cosine[10:], reverse=True) and 0.5 < cosine[-1] < 0.501
    linear = rates(50, warmup=0.0, schedule="linear", min_lr=0.0)
    assert linear == pytest.approx([2.0 * (50 - step) / 50 for step in range(50)])
    assert rates(20, warmup=0.1, schedule="constant") == [1.0] + [2.0] * 19
    wsd = rates(20, warmup=0.1, schedule="wsd", decay=0.25, min_lr=0.0)
    assert wsd == pytest.approx([1.0] + [2.0] * 14 + [2.0, 1.6, 1.2, 0.8, 0.4])
    assert rates(20, warmup=4, schedule="constant")[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates(3, warmup=6, schedule="wsd") == pytest.approx([2 / 6, 4 / 6, 1.0]), "a warm-up longer than the run"
    assert rates(1) == [2.0]
