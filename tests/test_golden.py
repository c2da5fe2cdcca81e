"""The golden cases: loss, metrics, hidden states and gradients of an independent implementation, reproduced.

Cases are read from the folder in GOLDEN_DIR, else from tests/golden. S tokens of a row, T packed tokens, L layers, H hidden,
N blocks, B block size, V vocabulary.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cache.head import TargetHead
from draft.blocks import Blocks, PackedSamples, make_blocks
from draft.model import Draft
from schemas.draft import ARCHITECTURES, DraftConfig
from schemas.errors import DraftError
from schemas.options import LossOptions
from schemas.strict import parse
from train.objective import Sums, objective, total_loss

FOLDER = Path(os.environ.get("GOLDEN_DIR") or Path(__file__).parent / "golden")
CASES = sorted(path.parent for path in FOLDER.glob("*/case.json"))
COUNTS = {
    "valid_tokens": "valid",
    "correct_tokens": "correct",
    "accept_len_sum": "accept_len",
    "valid_blocks": "blocks",
    "base_correct_tokens": "base_correct",
    "base_accept_len_sum": "base_accept_len",
}
RATIOS = {
    "base_loss": ("base_loss", "base_weight"),
    "selector_loss": ("selector_loss", "selector_weight"),
    "accuracy": ("correct", "valid"),
    "accept_len": ("accept_len", "blocks"),
    "base_accuracy": ("base_correct", "valid"),
    "base_accept_len": ("base_accept_len", "blocks"),
    "candidate_recall": ("recalled", "valid"),
}


def test_cases_are_there() -> None:
    assert CASES, f"no golden case in {FOLDER}: set GOLDEN_DIR to a folder of cases, or unset it"


def draft_of(case: dict[str, Any], tensors: dict[str, Tensor]) -> Draft:
    own = dict(case["draft_config"]["dflash_config"])
    config = {
        "architectures": [ARCHITECTURES[case["kind"]]],
        "dtype": "float32",
        "max_window_layers": 0,
        "rope_theta": case["draft_config"]["rope_parameters"]["rope_theta"],
        **case["draft_config"],
        "dflash_config": own,
    }
    draft = Draft(parse(DraftConfig, config, "case.json", DraftError))
    draft.load_state_dict({key[len("draft.") :]: value for key, value in tensors.items() if key.startswith("draft.")})
    return draft


def samples_of(case: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[PackedSamples, Tensor]:
    """The rows (or their documents) laid end to end, and the packed row of each place [batch, S]."""
    ids = tensors["input_ids"]
    documents = tensors["seq_lens"].tolist() if "seq_lens" in tensors else [[ids.shape[1]]] * ids.shape[0]
    # Tokens behind a row's last document are a sample of their own, which no block is drawn from.
    filled = [[*row, ids.shape[1] - sum(row)] for row in documents]
    lengths = tuple(length for row in filled for length in row if length)
    layers = case["draft_config"]["dflash_config"]["target_layer_ids"]
    hidden = torch.stack([tensors[f"hidden.{layer}"] for layer in layers], 2)
    packed = PackedSamples(ids.flatten(), tensors["loss_mask"].flatten().bool(), hidden.flatten(0, 1), lengths)
    return packed, torch.arange(ids.numel()).view_as(ids)


def blocks_of(
    tensors: dict[str, Tensor], samples: PackedSamples, rows: Tensor, block_size: int
) -> tuple[Blocks, Tensor]:
    """The valid blocks in ascending order, and where each stands in the case's [batch, N], flattened."""
    anchors = rows.gather(1, tensors["anchors"].clamp(min=0)).flatten()
    kept = tensors["anchor_valid"].flatten().nonzero()[:, 0]
    kept = kept[anchors[kept].argsort(stable=True)]
    prefixes = tensors.get("prefix_lengths")
    prefix = None if prefixes is None else prefixes.flatten()[kept]
    return make_blocks(samples, anchors[kept], block_size, prefix), kept


def assert_close(found: Tensor, expected: Tensor, what: str) -> None:
    error, bound = (found - expected).abs().max().item(), 1e-5 * expected.abs().max().item()
    assert error <= bound, f"{what}: differs by {error:.3g}, allowed {bound:.3g}"


def assert_scalars(expect: dict[str, float], sums: Sums, loss: Tensor) -> None:
    assert loss.item() == pytest.approx(expect["loss"], rel=1e-5)
    assert sums["base_weight"].item() == pytest.approx(expect["loss_weight"], rel=1e-5)
    checked = {"loss", "loss_weight"}
    for name, key in COUNTS.items():
        if name in expect:
            assert sums[key].item() == expect[name], name
            checked.add(name)
    for name, (above, below) in RATIOS.items():
        if name in expect:
            assert (sums[above] / sums[below]).item() == pytest.approx(expect[name], rel=1e-5), name
            checked.add(name)
    assert checked == set(expect), f"expected figures that nothing checks: {set(expect) - checked}"


@pytest.mark.parametrize("sliced", [None, 5], ids=["default", "slices-of-5"])
@pytest.mark.parametrize("folder", CASES, ids=lambda folder: folder.name)
def test_golden_case(folder: Path, sliced: int | None) -> None:
    case = json.loads((folder / "case.json").read_text())
    if case["kind"] not in ARCHITECTURES:
        pytest.skip(f"kind {case['kind']!r} is not implemented")
    tensors = load_file(folder / "case.safetensors")
    draft = draft_of(case, tensors)
    block_size = draft.config.block_size
    samples, rows = samples_of(case, tensors)
    blocks, kept = blocks_of(tensors, samples, rows, block_size)
    own = draft.config.dflash_config
    scales = (own.input_embedding_scale or 1.0, own.output_multiplier or 1.0, own.final_logit_softcapping)
    head = TargetHead(tensors["target.embed_tokens.weight"], tensors["target.lm_head.weight"], *scales)
    options = LossOptions(gamma=case["options"]["gamma"], selector_weight=case["options"].get("sel_w", 1.0))

    captured: list[Tensor] = []
    handle = draft.register_forward_hook(lambda _module, _inputs, output: captured.append(output))
    sums = objective(draft, head, samples, blocks, options, draft.config.dflash_config.mask_token_id, sliced)
    handle.remove()
    loss = total_loss(sums, sums, options)
    loss.backward()

    assert_scalars(case["expect"], sums, loss)
    assert_close(captured[0], tensors["expect.draft_hidden"].flatten(0, 1)[kept], "draft_hidden")
    gradients = dict(draft.named_parameters())
    for key, expected in tensors.items():
        if key.startswith("expect.grad."):
            found = gradients[key[len("expect.grad.") :]].grad
            assert found is not None, f"{key}: no gradient"
            assert_close(found, expected, key)
