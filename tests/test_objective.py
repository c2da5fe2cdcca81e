"""The sums of a micro-batch: weights, metrics, slices, micro-batches and denominators, against loops and against the whole."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import MASK, VOCAB, full_objective, lively_draft, random_head, random_samples, small_config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draft.blocks import Blocks, PackedSamples, anchors_of, block_inputs, block_labels, block_valid, make_blocks
from draft.model import Draft
from draft.sliced_head import CPU_TILE, SlicedHead
from schemas.options import LossOptions
from train.objective import base_weight, objective, resolve_gamma, slot_weights, total_loss

LENGTHS = (13, 18, 11)
OPTIONS = LossOptions(gamma=2.0, selector_weight=0.7)


def micro_batch(prefix: bool = False) -> tuple[PackedSamples, Blocks]:
    samples = random_samples(LENGTHS)
    anchors = anchors_of(samples, 4)
    shown = torch.randint(1, 4, anchors.shape, generator=torch.Generator().manual_seed(2)) if prefix else None
    return samples, make_blocks(samples, anchors, 4, shown)


def gradients(draft: Draft, loss: Tensor) -> dict[str, Tensor]:
    draft.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in draft.named_parameters() if parameter.grad is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float = 2e-5) -> None:
    assert found.keys() == expected.keys()
    for key in found:
        assert (found[key] - expected[key]).abs().max() <= bound * expected[key].abs().max() + 1e-9, key


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0), (4, 2.0), (6, 3.0)])
def test_gamma_defaults_to_the_published_values(block_size: int, gamma: float) -> None:
    assert resolve_gamma(LossOptions(), block_size) == gamma
    assert resolve_gamma(LossOptions(gamma=1.5), block_size) == 1.5
    assert resolve_gamma(LossOptions(gamma=None), block_size) is None


def test_weights_decay_from_the_first_target_of_each_block() -> None:
    blocks = Blocks(torch.tensor([0, 9]), torch.tensor([0, 0]), torch.tensor([1, 3]), 5)
    weights = slot_weights(blocks, 2.0)
    for n, prefix in enumerate((1, 3)):
        for k in range(prefix, 5):
            assert weights[n, k].item() == pytest.approx(math.exp(-(k - prefix) / 2.0))
    assert (slot_weights(blocks, None) == 1).all()


@pytest.mark.parametrize("prefix", [False, True])
def test_metrics_are_the_definition(prefix: bool) -> None:
    draft, head = lively_draft(small_config(), 6), random_head()
    # Two tokens in the text and two that the head can choose, so that half of the slots are right and acceptance counts something.
    head.lm_head_VH[1] = -head.lm_head_VH[0]
    head.lm_head_VH[2:] = 0
    samples, blocks = micro_batch(prefix)
    samples = replace(samples, input_ids_T=samples.input_ids_T % 2)
    states = draft(samples.hidden_TLH, samples.lengths, head.embed(block_inputs(samples, blocks, MASK)), blocks)
    guesses, valid = head.logits(states).argmax(-1), block_valid(samples, blocks)
    labels = block_labels(samples, blocks)
    sums = objective(draft, head, samples, blocks, OPTIONS, MASK)
    hits = [[bool(valid[n, k]) and bool(guesses[n, k] == labels[n, k]) for k in range(4)] for n in range(len(labels))]
    accepted = 0
    for n in range(len(labels)):
        slots = [k for k in range(4) if valid[n, k]]
        accepted += bool(slots)
        for k in slots:
            if not hits[n][k]:
                break
            accepted += 1
    assert accepted > valid.any(1).sum() * 1.2 and sums["correct"] < valid.sum() * 0.8, "the batch shows nothing"
    assert sums["valid"] == valid.sum() and sums["blocks"] == valid.any(1).sum()
    assert sums["correct"] == sum(map(sum, hits)) and sums["accept_len"] == accepted
    weights = slot_weights(blocks, 2.0)
    assert sums["base_weight"].item() == pytest.approx((weights * valid).sum().item(), rel=1e-6)


def test_unsupervised_slots_neither_count_nor_stop() -> None:
    """With every slot right but an unsupervised one between, a block's acceptance is its supervised slots and the anchor."""
    from train.objective import block_metrics

    valid = torch.tensor([[False, True, False, True], [False, False, True, True], [False, False, False, False]])
    index = valid.flatten().nonzero()[:, 0]
    sums = block_metrics({"correct": torch.tensor([True, True, False, True])}, valid, index)
    assert {key: int(value) for key, value in sums.items()} == {
        "correct": 3,
        "valid": 4,
        "blocks": 2,
        "accept_len": 3 + 1,
    }


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
@pytest.mark.parametrize("scales", [{}, {"logit_scale": 0.5, "logit_softcap": 2.0}])
@given(rows=st.integers(1, 80), seed=st.integers(0, 3), prefix=st.booleans())
@settings(max_examples=8, deadline=None)
def test_slices_are_the_whole(kind: str, scales: dict[str, float], rows: int, seed: int, prefix: bool) -> None:
    """Value and gradient of the objective over all logits at once, by autograd alone, whatever the size of the slices."""
    draft, head = lively_draft(small_config(kind), seed), random_head(**scales)
    samples, blocks = micro_batch(prefix)
    expected_sums = full_objective(draft, head, samples, blocks, 2.0)
    loss = total_loss(expected_sums, expected_sums, OPTIONS)
    expected = gradients(draft, loss)
    sums = objective(draft, head, samples, blocks, OPTIONS, MASK, rows=rows)
    for key, value in expected_sums.items():
        assert sums[key].item() == pytest.approx(value.item(), rel=1e-5, abs=1e-6), key
        assert sums[key].dtype == value.dtype
    found = gradients(draft, total_loss(sums, sums, OPTIONS))
    assert_same(found, {name: expected[name] for name in found})
    assert found.keys() == expected.keys()


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_bfloat16_logits_are_as_near_as_their_rounding(kind: str) -> None:
    """Under autocast with a bfloat16 head, against autograd over all logits from the same states: a rounding is 1 in 256.

    The sums, in float32, within 0.5%; each gradient within 2% of its norm.
    """
    changes = {"selector_top_k": VOCAB} if kind == "dflash2" else {}  # no token is a candidate by a rounding only
    draft, head = lively_draft(small_config(kind, **changes)), random_head().to("cpu", torch.bfloat16)
    samples, blocks = micro_batch()
    with torch.autocast("cpu", torch.bfloat16):
        full = full_objective(draft, head, samples, blocks, 2.0)
        expected = gradients(draft, total_loss(full, full, OPTIONS))
        sums = objective(draft, head, samples, blocks, OPTIONS, MASK, rows=40)
    found = gradients(draft, total_loss(sums, sums, OPTIONS))
    for name, value in full.items():
        assert sums[name].dtype == torch.float32
        assert sums[name].item() == pytest.approx(value.item(), rel=0.005)
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32
        assert (gradient - expected[name]).norm() <= 0.02 * expected[name].norm(), name


def test_a_measurement_is_for_one_backward_pass() -> None:
    draft, head = lively_draft(small_config("dflash2")), random_head()
    sums = objective(draft, head, *micro_batch(), OPTIONS, MASK)
    loss = total_loss(sums, sums, OPTIONS)
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="used up"):
        loss.backward()


def test_only_supervised_slots_reach_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    draft, head = lively_draft(small_config("dflash2")), random_head()
    samples, blocks = micro_batch()
    seen: list[int] = []
    real = SlicedHead.multiply

    def watched(self: SlicedHead, hidden_rH: Tensor) -> None:
        seen.append(len(hidden_rH))
        real(self, hidden_rH)

    monkeypatch.setattr(SlicedHead, "multiply", watched)
    monkeypatch.setattr(type(head), "logits", None)
    objective(draft, head, samples, blocks, OPTIONS, MASK, rows=10)
    assert sum(seen) == int(block_valid(samples, blocks).sum()) and max(seen) <= 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_logits_exist_for_one_slice_at_a_time(kind: str, dtype: torch.dtype) -> None:
    """Forward and backward: nothing holds more entries along the vocabulary than a slice's, and each slice uses the same memory.

    Beside products in another type there are float32 logits of a tile of them alone.
    """
    draft, head = lively_draft(small_config(kind)), random_head().to("cpu", dtype)
    samples, blocks = micro_batch()
    places: dict[torch.dtype, set[int]] = {}
    rows = {dtype: CPU_TILE + 8, torch.float32: CPU_TILE + 8 if dtype == torch.float32 else CPU_TILE}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            output = function(*args, **(kwargs or {}))
            for tensor in output if isinstance(output, tuple) else (output,):
                if (
                    isinstance(tensor, Tensor)
                    and tensor.dim() > 1
                    and tensor.shape[-1] == VOCAB
                    and tensor.shape[0] != 32
                ):
                    assert tensor.numel() <= rows[tensor.dtype] * VOCAB, f"{function} made {tuple(tensor.shape)}"
                    places.setdefault(tensor.dtype, set()).add(tensor.untyped_storage().data_ptr())
            return output

    with Watch():
        sums = objective(draft, head, samples, blocks, OPTIONS, MASK, rows=rows[dtype])
        total_loss(sums, sums, OPTIONS).backward()
    assert sums["valid"] > rows[dtype] > CPU_TILE
    assert {kind: len(each) for kind, each in places.items()} == dict.fromkeys(rows, 1), (
        "logits, probabilities and their gradients share a buffer"
    )


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_micro_batches_add_up_to_the_step(kind: str) -> None:
    """A step of three samples is the same as three micro-batches of one, with the denominators known before."""
    draft, head = lively_draft(small_config(kind)), random_head()
    samples, blocks = micro_batch()
    whole = objective(draft, head, samples, blocks, OPTIONS, MASK)
    loss = total_loss(whole, whole, OPTIONS)
    expected = gradients(draft, loss)
    parts = []
    for index, (start, length) in enumerate(zip((0, 13, 31), LENGTHS, strict=True)):
        rows = slice(start, start + length)
        part = PackedSamples(samples.input_ids_T[rows], samples.loss_mask_T[rows], samples.hidden_TLH[rows], (length,))
        parts.append((part, make_blocks(part, blocks.anchor_N[blocks.sample_N == index] - start, 4)))
    sums = [objective(draft, head, *part, OPTIONS, MASK) for part in parts]
    totals = {key: torch.stack([each[key].detach() for each in sums]).sum() for key in sums[0]}
    assert totals["base_weight"].item() == pytest.approx(sum(base_weight(*part, OPTIONS).item() for part in parts))
    shares = [total_loss(each, totals, OPTIONS) for each in sums]
    assert sum(share.item() for share in shares) == pytest.approx(loss.item(), rel=1e-5)
    assert_same(gradients(draft, torch.stack(shares).sum()), expected)


def test_a_denominator_is_the_valid_slots_weight_however_steep_the_decay() -> None:
    """exp((l - k) / gamma) of a slot before a long prefix overflows: it is no target and must not reach the sum."""
    draft, head = lively_draft(small_config()), random_head()
    samples, blocks = micro_batch(prefix=True)
    steep = LossOptions(gamma=0.02)
    weight_NB = slot_weights(blocks, steep.gamma if isinstance(steep.gamma, float) else None)
    assert not weight_NB.isfinite().all(), "nothing overflows: the test shows nothing"
    counted = base_weight(samples, blocks, steep)
    assert counted.item() == objective(draft, head, samples, blocks, steep, MASK)["base_weight"].item()
    assert counted.isfinite()


def test_a_batch_without_a_valid_slot_has_no_loss() -> None:
    draft, head = lively_draft(small_config("dflash2")), random_head()
    samples, blocks = micro_batch()
    silent = replace(samples, loss_mask_T=torch.zeros_like(samples.loss_mask_T))
    sums = objective(draft, head, silent, blocks, OPTIONS, MASK)
    assert all(value.item() == 0 for value in sums.values())
    loss = total_loss(sums, sums, OPTIONS)
    assert loss.item() == 0 and all((gradient == 0).all() for gradient in gradients(draft, loss).values())


def test_a_slots_input_is_the_targets_row_times_its_embedding_scale() -> None:
    draft, plain = lively_draft(small_config()), random_head()
    scaled = replace(plain, embedding_scale=3.0)
    multiplied = replace(plain, embed_VH=plain.embed_VH * 3.0)
    samples, blocks = micro_batch()
    losses = [
        objective(draft, head, samples, blocks, OPTIONS, MASK)["base_loss"].item()
        for head in (plain, scaled, multiplied)
    ]
    assert losses[1] == pytest.approx(losses[2], rel=1e-6) and losses[1] != pytest.approx(losses[0], rel=1e-3)


def test_the_target_gets_no_gradient() -> None:
    draft, head = lively_draft(small_config("dflash2")), random_head()
    head.lm_head_VH.requires_grad_(False)
    samples, blocks = micro_batch()
    sums = objective(draft, head, samples, blocks, OPTIONS, MASK)
    total_loss(sums, sums, OPTIONS).backward()
    assert head.embed_VH.grad is None and head.lm_head_VH.grad is None
    assert all(parameter.grad is not None for parameter in draft.parameters())
