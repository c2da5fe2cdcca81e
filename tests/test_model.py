"""The draft as a module: its keys, its start, its rotary frequencies and its data types."""

from typing import Any

import pytest
import torch
from reference import MASK, VOCAB, assert_near, lively_draft, naive_norm, random_head, random_samples, small_config
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding, apply_rotary_pos_emb

from draft.blocks import block_inputs, make_blocks
from draft.model import cast, new_draft
from draft.norm import RMSNorm
from draft.rotary import Rotary, rotate
from schemas.errors import DraftError

TRUNK = {
    "fc.weight": (32, 64),
    "hidden_norm.weight": (32,),
    "norm.weight": (32,),
    **{
        f"layers.{layer}.{key}": shape
        for layer in range(2)
        for key, shape in {
            "input_layernorm.weight": (32,),
            "post_attention_layernorm.weight": (32,),
            "self_attn.q_proj.weight": (32, 32),
            "self_attn.k_proj.weight": (16, 32),
            "self_attn.v_proj.weight": (16, 32),
            "self_attn.o_proj.weight": (32, 32),
            "self_attn.q_norm.weight": (8,),
            "self_attn.k_norm.weight": (8,),
            "mlp.gate_proj.weight": (48, 32),
            "mlp.up_proj.weight": (48, 32),
            "mlp.down_proj.weight": (32, 48),
        }.items()
    },
}
DFLASH2 = {
    "candidate_selector.predecessor_codebook": (VOCAB, 6),
    "candidate_selector.successor_codebook": (VOCAB, 6),
    "candidate_selector.hidden_projection.weight": (6, 32),
    **{
        f"layers.{layer}.{conv}.{key}": shape
        for layer in range(2)
        for conv in ("attention_conv", "mlp_conv")
        for key, shape in {"base_kernel": (2, 2, 32), "kernel_projection.weight": (2 * 2 * 4, 32)}.items()
    },
}


@pytest.mark.parametrize(("kind", "keys"), [("dflash", TRUNK), ("dflash2", TRUNK | DFLASH2)])
def test_state_dict_is_the_published_layout(kind: str, keys: dict[str, tuple[int, ...]]) -> None:
    draft = new_draft(small_config(kind), torch.Generator())
    assert {key: tuple(value.shape) for key, value in draft.state_dict().items()} == keys
    assert {key for key, _ in draft.named_parameters()} == set(keys)


def test_a_start_is_a_function_of_its_generator_alone() -> None:
    state = torch.get_rng_state()
    first = new_draft(small_config("dflash2"), torch.Generator().manual_seed(4)).state_dict()
    torch.rand(3)
    second = new_draft(small_config("dflash2"), torch.Generator().manual_seed(4)).state_dict()
    other = new_draft(small_config("dflash2"), torch.Generator().manual_seed(5)).state_dict()
    torch.set_rng_state(state)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])


def test_building_draws_nothing_from_the_global_generator() -> None:
    state = torch.get_rng_state()
    new_draft(small_config("dflash2"), torch.Generator().manual_seed(4))
    assert torch.equal(state, torch.get_rng_state())


@torch.no_grad()
def test_dflash2_starts_as_dflash() -> None:
    """The convolutions are the identity and the selector is a no-op that can learn."""
    draft = new_draft(small_config("dflash2"), torch.Generator().manual_seed(1))
    plain = new_draft(small_config("dflash"), torch.Generator().manual_seed(2))
    plain.load_state_dict({key: value for key, value in draft.state_dict().items() if key in TRUNK})
    samples, head = random_samples((12, 9)), random_head()
    blocks = make_blocks(samples, torch.tensor([2, 7, 15]), 4)
    embeds = head.embed(block_inputs(samples, blocks, MASK))
    states = draft(samples.hidden_TLH, samples.lengths, embeds, blocks)
    assert torch.equal(states, plain(samples.hidden_TLH, samples.lengths, embeds, blocks))
    logits = head.logits(states[:, 1:])
    assert draft.candidate_selector is not None
    path, _ = draft.candidate_selector.walk(states[:, 1:], logits, samples.input_ids_T[blocks.anchor_N])
    assert torch.equal(path, logits.argmax(-1))
    codebook = draft.candidate_selector.predecessor_codebook
    assert 0 < codebook.std() < 0.1, "with both codebooks zero neither would ever get a gradient"


ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128},
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_is_the_target_librarys(rope: dict[str, Any], dtype: torch.dtype) -> None:
    config = small_config(rope_parameters=rope, rope_theta=rope["rope_theta"], head_dim=16)
    theirs = Qwen3RotaryEmbedding(Qwen3Config(head_dim=16, max_position_embeddings=512, rope_parameters=dict(rope)))
    positions, states = torch.tensor([[0, 1, 17, 300, 511]]), torch.randn(1, 3, 5, 16).to(dtype)
    expected, _ = apply_rotary_pos_emb(states, states, *theirs(states, positions))
    found = rotate(states.transpose(1, 2), *Rotary(config).angles(positions)).transpose(1, 2)
    assert found.dtype == dtype
    assert_near(found, expected, 1e-6 if dtype == torch.float32 else 0.01)


def test_frequencies_and_norms_stay_float32_under_a_cast() -> None:
    draft = cast(new_draft(small_config("dflash2"), torch.Generator()), "cpu", torch.bfloat16)
    assert draft.rotary.inv_freq_D.dtype == torch.float32
    for name, parameter in draft.named_parameters():
        assert parameter.dtype == (torch.float32 if "norm" in name else torch.bfloat16), name


def test_norm_is_qwen3s() -> None:
    states = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)) * 3
    ours, theirs = RMSNorm(16, 1e-6), Qwen3RMSNorm(16, 1e-6)
    weight = torch.rand(16, generator=torch.Generator().manual_seed(1)) + 0.5
    with torch.no_grad():
        ours.weight.copy_(weight)
        theirs.weight.copy_(weight)
    assert torch.equal(ours(states), theirs(states))
    assert_near(ours(states).detach(), naive_norm(states.double(), weight.double(), 1e-6), 1e-6)
    half = states.bfloat16()
    assert ours(half).dtype == torch.bfloat16
    assert torch.equal(ours(half), theirs.bfloat16()(half))


@torch.no_grad()
def test_bfloat16_and_autocast_are_near_float32() -> None:
    samples, head = random_samples((12, 9)), random_head()
    blocks = make_blocks(samples, torch.tensor([2, 7, 15]), 4)
    embeds = head.embed(block_inputs(samples, blocks, MASK))
    draft = lively_draft(small_config("dflash2"))
    exact = draft(samples.hidden_TLH, samples.lengths, embeds, blocks)
    with torch.autocast("cpu", torch.bfloat16):
        assert_near(draft(samples.hidden_TLH, samples.lengths, embeds, blocks), exact, 0.1)
    half = cast(draft, "cpu", torch.bfloat16)(samples.hidden_TLH, samples.lengths, embeds, blocks)
    assert half.dtype == torch.bfloat16
    assert_near(half, exact, 0.1)


def test_an_activation_we_lack_is_refused() -> None:
    with pytest.raises(DraftError, match="hidden_act 'gelu_new' is not one of silu"):
        new_draft(small_config(hidden_act="gelu_new"), torch.Generator())
