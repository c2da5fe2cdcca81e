"""The optimizers of a draft and their learning rate: AdamW for all, or Muon for the matrices and AdamW for the rest."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from schemas.errors import DraftError
from schemas.options import OptimOptions
from train.sharding import like

MUON_MOMENTUM = 0.95
# AdamW's is the published one. Muon's was the best of several on two targets (docs/train.md).
RATES = {"adamw": 6e-4, "muon": 1e-2}


def highest_rate(options: OptimOptions) -> float:
    """The learning rate after the warm-up."""
    return RATES[options.name] if options.lr is None else options.lr


def learning_rate(step: int, steps: int, options: OptimOptions) -> float:
    """The rate of step `step` (from 0) of `steps`: a linear warm-up, then by the schedule down to `min_lr` times `lr`.

    The first step already moves (lr / warm-up steps); the last is one step short of the minimum. `wsd` (warm-up, stable, decay;
    MiniCPM, arXiv 2404.06395) falls linearly over the last `decay` of the steps, so that before them a step's rate does not
    depend on how many follow, where the warm-up is a number of steps.
    """
    highest, warmup = highest_rate(options), warmup_steps(options, steps)
    if step < warmup:
        return highest * (step + 1) / warmup
    left = 1.0 - (step - warmup) / max(1, steps - warmup)
    match options.schedule:
        case "cosine":
            share = 0.5 * (1.0 + math.cos(math.pi * (1.0 - left)))
        case "linear":
            share = left
        case "wsd":
            share = min(1.0, (steps - step) / math.ceil(options.decay * steps))
        case "constant":
            return highest
    return highest * (options.min_lr + (1.0 - options.min_lr) * share)


def warmup_steps(options: OptimOptions, steps: int) -> int:
    """The steps of the warm-up: a share of all steps, or from 1 on a number of them."""
    return int(options.warmup) if options.warmup >= 1 else math.ceil(options.warmup * steps)


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter multiplies vectors: Muon's orthogonal update means nothing to norms, kernels and look-up tables."""
    return parameter.ndim == 2 and not name.endswith("codebook")


@dataclass(frozen=True)
class Optimizers:
    """The parameters by name and the optimizers that share them out among themselves."""

    parameters: Mapping[str, nn.Parameter]
    parts: tuple[Optimizer, ...]

    def step(self, lr: float) -> None:
        """One update of every parameter from its gradient, at that rate."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step()

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def gradient_norm(self) -> Tensor:
        """The 2-norm of all gradients together, a scalar; spread over the ranks where they are."""
        return nn.utils.get_total_norm([p.grad for p in self.parameters.values() if p.grad is not None])

    def clip(self, most: float, norm: Tensor) -> None:
        """Scale all gradients, whose norm is `norm`, down to a norm of `most` where it is more."""
        nn.utils.clip_grads_with_norm_(self.parameters.values(), most, norm)

    def state(self) -> dict[str, Tensor]:
        """All that the optimizers remember, by `<slot>/<parameter>`: exp_avg/fc.weight."""
        return {
            f"{slot}/{name}": value
            for name, parameter in self.parameters.items()
            for part in self.parts
            for slot, value in part.state.get(parameter, {}).items()
        }

    def load(self, state: Mapping[str, Tensor], where: str) -> None:
        """Remember what `state` held; DraftError where it does not belong to these parameters and optimizers."""
        part_of = {p: part for part in self.parts for group in part.param_groups for p in group["params"]}
        for key, value in state.items():
            slot, name = key.split("/", 1)
            parameter = self.parameters.get(name)
            if parameter is None or (value.ndim and value.shape != parameter.shape):
                raise DraftError(
                    f"{where}: {key} {list(value.shape)} belongs to no parameter of this draft: resume with the run's own options"
                )
            part_of[parameter].state[parameter][slot] = (
                like(parameter, value) if value.ndim else value.to(parameter.device)
            )


def make_optimizers(parameters: Mapping[str, nn.Parameter], options: OptimOptions) -> Optimizers:
    """Optimizers for a draft's parameters, by `optim.name`. Only what has two dimensions decays.

    Muon's update is scaled to the root mean square of AdamW's, so that one `lr` serves both (Liu et al. 2025, Muon is scalable).
    """
    matrices = [p for name, p in parameters.items() if is_matrix(name, p)] if options.name == "muon" else []
    taken = set(matrices)
    rest = [p for p in parameters.values() if p not in taken]
    groups = [
        {"params": [p for p in rest if p.ndim == 2], "weight_decay": options.weight_decay},
        {"params": [p for p in rest if p.ndim != 2], "weight_decay": 0.0},
    ]
    lr = highest_rate(options)
    adamw = AdamW([g for g in groups if g["params"]], lr=lr, betas=options.betas, fused=True)
    if not matrices:
        return Optimizers(parameters, (adamw,))
    muon = Muon(
        matrices,
        lr=lr,
        weight_decay=options.weight_decay,
        momentum=MUON_MOMENTUM,
        adjust_lr_fn="match_rms_adamw",
    )
    return Optimizers(parameters, (muon, adamw))
