"""The next-token distribution: against a full log-softmax in float64, and the model's own logits."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from capture_fixtures import random_target
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load
from torch import nn

from schemas.errors import TargetError
from target.head import HeadTraits, _distribution, check_head, head_file, head_traits, largest, topk_of
from target.load import load_target, resolve_target


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(resolve_target(random_target(tmp_path_factory.mktemp("topk") / "m")), "float32", "cpu")


@pytest.mark.parametrize("traits", [HeadTraits(), HeadTraits(1.0, 0.25, None), HeadTraits(1.0, 3.0, 2.0)])
@pytest.mark.parametrize("slice_rows", [None, 1, 3])
def test_topk_and_rest(target, traits, slice_rows):
    hidden_RH = torch.randn(7, 32, generator=torch.Generator().manual_seed(1))
    parts = list(topk_of(hidden_RH, target, traits, 5, slice_rows))
    assert [part[0] for part in parts] == [
        slice(i, min(i + (slice_rows or 7), 7)) for i in range(0, 7, slice_rows or 7)
    ]
    ids_RK, logprobs_RK, rest_R = (torch.cat([part[i] for part in parts]) for i in (1, 2, 3))
    assert (ids_RK.dtype, logprobs_RK.dtype, rest_R.dtype) == (torch.int32, torch.float16, torch.float32)
    logits_RV = hidden_RH.double() @ target.lm_head.weight.double().T * traits.logit_scale
    if traits.logit_softcap is not None:
        logits_RV = torch.tanh(logits_RV / traits.logit_softcap) * traits.logit_softcap
    expected_RV = logits_RV - logits_RV.exp().sum(dim=1, keepdim=True).log()
    for row in range(7):
        order = np.argsort(-expected_RV[row].numpy(), kind="stable")
        assert set(ids_RK[row].tolist()) == set(order[:5].tolist())
        expected = expected_RV[row, ids_RK[row].long()]
        assert torch.allclose(logprobs_RK[row].double(), expected, rtol=1e-3, atol=0)
        assert (logprobs_RK[row].diff() <= 0).all()
        rest = expected_RV[row, torch.from_numpy(order[5:])].exp().sum().log()
        assert abs(rest_R[row].item() - rest.item()) < 1e-5


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 9), st.integers(2, 1000), st.integers(0, 2**31))
def test_largest_is_topk(width, count, levels, seed):
    """Few levels make many ties: then the places may differ, but not the values."""
    count = min(count, width)
    values_RV = torch.randint(levels, (3, width), generator=torch.Generator().manual_seed(seed)).float()
    top_RK, places_RK = largest(values_RV, count)
    assert torch.equal(top_RK, values_RV.topk(count, dim=-1).values)
    assert torch.equal(values_RV.gather(1, places_RK), top_RK)
    assert all(len(set(row)) == count for row in places_RK.tolist())


def test_nothing_is_left_where_all_else_is_impossible(target):
    logits_RV = torch.full((2, 2048), -torch.inf)
    logits_RV[:, :3] = torch.tensor([2.0, 1.0, 0.0])
    ids_RK, logprobs_RK, rest_R = _distribution(logits_RV.clone(), 3)
    assert ids_RK.tolist() == [[0, 1, 2]] * 2
    assert rest_R.tolist() == [-torch.inf] * 2
    torch.testing.assert_close(logprobs_RK.float(), logits_RV[:, :3].log_softmax(-1), atol=1e-3, rtol=0)


def test_rest_is_accurate_where_almost_nothing_is_left(target):
    head = nn.Linear(2, 4, bias=False)
    head.weight = nn.Parameter(torch.tensor([[30.0, 0], [0, 0], [0, 0], [-1.0, 0]]), requires_grad=False)
    sure = replace(target, lm_head=head)
    ((_, ids_RK, logprobs_RK, rest_R),) = topk_of(torch.tensor([[1.0, 0.0]]), sure, HeadTraits(), 1)
    # 1 - exp(logprob) would be 0 in float32; the truth is log(2 + 1/e) - 30.
    assert ids_RK.tolist() == [[0]]
    assert logprobs_RK.tolist() == [[0.0]]
    assert abs(rest_R.item() - (np.log(2 + np.exp(-1)) - 30)) < 1e-4
    ((_, _, _, nothing_R),) = topk_of(torch.tensor([[1.0, 0.0]]), sure, HeadTraits(), 4)
    assert nothing_R.item() == -np.inf


@pytest.mark.parametrize(
    ("config", "traits"),
    [
        ({"model_type": "qwen3"}, HeadTraits()),
        ({"model_type": "gemma2", "final_logit_softcapping": 30.0}, HeadTraits(8.0, 1.0, 30.0)),
        ({"model_type": "granite", "embedding_multiplier": 12.0, "logits_scaling": 8.0}, HeadTraits(12.0, 0.125, None)),
        (
            {"model_type": "hyperclovax", "embedding_multiplier": 10.0, "logits_scaling": 0.125},
            HeadTraits(10.0, 0.125, None),
        ),
        ({"model_type": "cohere", "logit_scale": 0.0625}, HeadTraits(1.0, 0.0625, None)),
    ],
)
def test_traits(config, traits):
    assert head_traits(SimpleNamespace(hidden_size=64, **config)) == traits


@pytest.mark.parametrize("name", ["Gemma2", "Granite", "Cohere"])
def test_traits_give_the_architectures_own_logits(name):
    import transformers

    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    extra = {
        "Granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0},
        "Cohere": {"logit_scale": 0.5},
        "Gemma2": {},
    }
    config = getattr(transformers, f"{name}Config")(
        vocab_size=64, **shape, **extra[name], pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    if name == "Gemma2":
        model.lm_head.weight.data.mul_(40)  # into the soft cap's bend
    loaded = SimpleNamespace(
        model=model,
        decoder=model.get_decoder(),
        lm_head=model.lm_head,
        config=config,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    check_head(loaded, head_traits(config))
    wrong = HeadTraits(1.0, 0.9, None)
    with pytest.raises(TargetError, match="logits in a way that is not known"):
        check_head(loaded, wrong)


def test_head_file(target, tmp_path):
    tensors = load(head_file(target, True))
    assert sorted(tensors) == ["embed_tokens.weight", "norm.weight"]
    assert torch.equal(tensors["embed_tokens.weight"], target.model.model.embed_tokens.weight)
    assert torch.equal(tensors["norm.weight"], target.model.model.norm.weight)
    with pytest.raises(TargetError, match="tie_word_embeddings False"):
        head_file(target, False)
    untied = load_target(
        resolve_target(random_target(tmp_path / "untied", tie_word_embeddings=False)), "bfloat16", "cpu"
    )
    tensors = load(head_file(untied, False))
    assert torch.equal(tensors["lm_head.weight"], untied.lm_head.weight)
    assert tensors["lm_head.weight"].dtype == torch.bfloat16
    biased = replace(untied, lm_head=nn.Linear(32, 2048))
    with pytest.raises(TargetError, match="has a bias"):
        head_file(biased, False)


def test_a_head_that_stays_quantised_is_refused(target):
    packed = nn.Linear(32, 2048, bias=False)
    packed.weight = nn.Parameter(packed.weight.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(TargetError, match=r"the head of Qwen3ForCausalLM is still quantised \(torch\.float8_e4m3fn\)"):
        head_file(replace(target, lm_head=packed), False)
