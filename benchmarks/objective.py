"""The dflash2 objective against one that holds all logits in float32, as ratios in the same run.

    python benchmarks/objective.py [--slots 4096] [--rounds 3]

Hidden size 576, vocabulary 49,152, float32. Forward and backward, up to the gradients of hidden states and selector, every slot
supervised: peak memory beyond the inputs, in a process each, and time.
"""

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from cache.head import TargetHead
from draft.model import new_draft
from draft.selector import CandidateSelector
from draft.sliced_head import slice_rows
from schemas.draft import DraftConfig
from train.loss import Slots, dflash2_loss

HIDDEN, VOCAB, BLOCK, LAYERS, MASK = 576, 49_152, 16, (1, 9, 17), 49_151


def config() -> DraftConfig:
    """A dflash2 draft for a target of SmolLM2-135M's sizes."""
    own = {"block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": LAYERS, "conv_kernel_size": 2,
           "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}  # fmt: skip
    return DraftConfig.model_validate(
        {
            "architectures": ("DFlash2DraftModel",), "vocab_size": VOCAB, "hidden_size": HIDDEN,
            "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 9, "num_key_value_heads": 3,
            "head_dim": 64, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "tie_word_embeddings": True,
            "layer_types": ("full_attention",) * 2, "max_window_layers": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}, "rope_theta": 1e5,
            "num_target_layers": 30, "block_size": BLOCK, "dflash_config": own,
        }
    )  # fmt: skip


def head() -> TargetHead:
    """A random tied head."""
    weight_VH = torch.empty(VOCAB, HIDDEN).normal_(0, 0.05, generator=torch.Generator().manual_seed(1))
    return TargetHead(weight_VH, weight_VH)


def slots_of(count: int) -> Slots:
    """Supervised slots with random states."""
    generator = torch.Generator().manual_seed(2)
    label_R, predecessor_R = torch.randint(0, VOCAB - 1, (2, count), generator=generator)
    weight_R = torch.rand(count, generator=generator)
    return Slots(torch.randn(count, HIDDEN, generator=generator), label_R, weight_R, predecessor_R)


def sliced(slots: Slots, target: TargetHead, selector: CandidateSelector) -> list[Tensor]:
    """Ours, up to the gradients of hidden states and selector of the loss over its denominators."""
    measured = dflash2_loss(slots, target, slice_rows(VOCAB, slots.hidden_RH.device, torch.float32), selector)
    hidden_RH = measured.slot_gradients["base_loss"].div_(measured.sums["base_weight"])
    kept = measured.sums["selector_weight"]
    hidden_RH.add_(measured.slot_gradients["selector_loss"].div_(kept))
    gradients = measured.parameter_gradients["selector_loss"]
    return [hidden_RH, *(gradients[parameter].div_(kept) for parameter in selector.parameters())]


def full(slots: Slots, target: TargetHead, selector: CandidateSelector) -> list[Tensor]:
    """The same by autograd over all logits in float32."""
    hidden_RH = slots.hidden_RH.detach().requires_grad_()
    loss = full_loss(hidden_RH, slots, target, selector)
    return list(torch.autograd.grad(loss, [hidden_RH, *selector.parameters()]))


def full_loss(hidden_RH: Tensor, slots: Slots, target: TargetHead, selector: CandidateSelector) -> Tensor:
    """Backbone and selector, from all logits."""
    logits_RV = target.logits(hidden_RH).float()
    loss_R = F.cross_entropy(logits_RV, slots.label_R, reduction="none")
    base = (loss_R * slots.weight_R).sum() / slots.weight_R.sum()
    unary_RK, candidate_RK = logits_RV.topk(selector.top_k, -1)
    scores_RK = selector.scores(hidden_RH, unary_RK, candidate_RK, slots.predecessor_R)
    match_RK = candidate_RK == slots.label_R[:, None]
    weight_R = slots.weight_R * match_RK.any(1)
    loss_R = F.cross_entropy(scores_RK, match_RK.int().argmax(1), reduction="none")
    return base + (loss_R * weight_R).sum() / weight_R.sum().clamp(min=1e-9)


def extra_memory(name: str, count: int) -> float:
    """MiB that one evaluation needs at its peak beyond what was there before it, in this process."""
    slots, target, selector = objective_inputs(count)
    # What the first call of a product sets up once is not the objective's.
    torch.mm(slots.hidden_RH[:8], target.lm_head_VH[:64].T)
    with open("/proc/self/statm") as statm:
        before = int(statm.read().split()[1]) * resource.getpagesize()
    {"sliced": sliced, "full": full}[name](slots, target, selector)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / 2**20


def objective_inputs(count: int) -> tuple[Slots, TargetHead, CandidateSelector]:
    """Slots, head and a selector that is past its neutral start."""
    selector = new_draft(config(), torch.Generator().manual_seed(0)).candidate_selector
    assert selector is not None
    with torch.no_grad():
        selector.successor_codebook.normal_(0, 0.02, generator=torch.Generator().manual_seed(3))
    return slots_of(count), head(), selector


def compare_memory(count: int) -> None:
    """A process each, so that neither finds memory that the other has left."""
    taken = {}
    for name in ("sliced", "full"):
        command = [sys.executable, __file__, "--one", name, "--slots", str(count)]
        taken[name] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(f"peak extra memory, {name:<6} {taken[name]:8.0f} MiB")
    print(f"sliced / full, memory    {taken['sliced'] / taken['full']:8.3f}")


def compare_time(count: int, rounds: int) -> None:
    """Alternately; the two products of the frozen head alone beside them."""
    slots, target, selector = objective_inputs(count)
    for one, two in zip(sliced(slots, target, selector), full(slots, target, selector), strict=True):
        assert (one - two).abs().max() <= 1e-4 * two.abs().max(), "the two do not compute the same"
    logits_RV = torch.zeros(256, VOCAB)

    def products() -> None:
        for hidden_rH in slots.hidden_RH.split(256):
            torch.mm(hidden_rH, target.lm_head_VH.T, out=logits_RV[: len(hidden_rH)])
            torch.mm(logits_RV[: len(hidden_rH)], target.lm_head_VH)

    works = {
        "sliced": lambda: sliced(slots, target, selector),
        "full": lambda: full(slots, target, selector),
        "products": products,
    }
    taken = alternately(works, rounds)
    for name in ("sliced", "products"):
        print(f"{name + ' / full, time':<24} {taken[name] / taken['full']:8.2f}")


def alternately(works: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of each, the least disturbed of several rounds."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            started = time.perf_counter()
            work()
            taken[name].append(time.perf_counter() - started)
    for name, seconds in taken.items():
        print(f"{name:<24} {min(seconds):8.2f} s")
    return {name: min(seconds) for name, seconds in taken.items()}


def main() -> None:
    """Print memory, then time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=["sliced", "full"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(extra_memory(arguments.one, arguments.slots))
        return
    compare_memory(arguments.slots)
    compare_time(arguments.slots, arguments.rounds)


if __name__ == "__main__":
    main()
