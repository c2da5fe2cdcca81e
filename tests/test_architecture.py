"""What is said against a target before its weights load, and what a few tokens prove of it afterwards."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as tf
from capture_fixtures import Recorder, capture_options, copy_tokenizer, shipped_rows, write_jsonl
from target_fixtures import FLAT, KINDS, make_model, make_target
from torch import nn

from capture.run import capture, dry_run
from schemas.errors import OptionError, TargetError
from target.head import HeadTraits, check_head, head_traits
from target.layers import final_norm, find_layers
from target.load import Target, load_target, resolve_target
from target.probe import check_decoder
from target.traits import norm_flavour

MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
MANY_HEADS = FLAT | {"num_key_value_heads": 2}
# Architectures with scales of their own, each named as its config names them.
SCALED = {
    "falcon_h1": (
        tf.FalconH1Config(**FLAT | MAMBA, embedding_multiplier=3.0, lm_head_multiplier=0.5),
        HeadTraits(3.0, 0.5, None),
    ),
    "hyperclovax": (
        tf.HyperCLOVAXConfig(**FLAT, embedding_multiplier=3.0, logits_scaling=0.25),
        HeadTraits(3.0, 0.25, None),
    ),
    "minicpm3": (
        tf.MiniCPM3Config(**MANY_HEADS | LATENT, scale_emb=12, dim_model_base=16),
        HeadTraits(12.0, 0.5, None),
    ),
    "cohere2": (tf.Cohere2Config(**FLAT | {"tie_word_embeddings": True}), HeadTraits(1.0, 0.0625, None)),
    "afmoe": (
        tf.AfmoeConfig(**FLAT, mup_enabled=True, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2),
        HeadTraits(32**0.5, 1.0, None),
    ),
    "gemma2": (tf.Gemma2Config(**FLAT | {"tie_word_embeddings": True}), HeadTraits(32**0.5, 1.0, 30.0)),
}


def loaded(config):
    model = make_model(config)
    decoder = model.get_decoder()
    layers = find_layers(decoder, config.num_hidden_layers)
    return Target(model, decoder, model.lm_head, config, layers, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("kind", SCALED)
def test_scales_by_many_names(kind):
    config, traits = SCALED[kind]
    target = loaded(config)
    assert head_traits(config) == traits
    check_head(target, traits)
    check_decoder(target, traits)
    with pytest.raises(TargetError, match=r"more to its embedding rows before the first layer than times"):
        check_decoder(target, replace(traits, embedding_scale=traits.embedding_scale * 1.01))
    with pytest.raises(TargetError, match="logits in a way that is not known"):
        check_head(target, replace(traits, logit_scale=traits.logit_scale * 1.1))


class Norm(nn.Module):
    def __init__(self, compute):
        super().__init__()
        self.weight, self.compute = nn.Parameter(torch.rand(16)), compute

    def forward(self, x):
        return self.compute(x, self.weight)


@pytest.mark.parametrize(
    ("norm", "flavour"),
    [
        (nn.RMSNorm(16), "rms, weight"),
        (nn.LayerNorm(16, bias=False), "layer, weight"),
        (Norm(lambda x, w: nn.functional.rms_norm(x, (16,)) * (1 + w)), "rms, 1 + weight"),
        (Norm(lambda x, w: nn.functional.layer_norm(x, (16,)) * (1 + w)), "layer, 1 + weight"),
        (Norm(lambda x, w: x * w), "Norm"),
    ],
)
def test_a_norms_flavour_is_told_by_what_it_computes(norm, flavour):
    before = norm.weight.clone()
    assert norm_flavour(norm, 16) == flavour
    assert torch.equal(norm.weight, before)


# Refusals


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_jsonl(tmp_path_factory.mktemp("rows") / "rows.jsonl", shipped_rows(4))


@pytest.fixture
def no_weights(monkeypatch):
    monkeypatch.setattr("capture.run.load_target", lambda *_: pytest.fail("the weights are not needed"))


def config_only(folder, config):
    config.save_pretrained(folder)
    copy_tokenizer(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        (tf.Gemma3TextConfig(**FLAT, use_bidirectional_attention=True), "layers are not causal"),
        (tf.BertConfig(vocab_size=2048, hidden_size=32, num_attention_heads=2, eos_token_id=2), "no final norm"),
        (tf.T5GemmaConfig(vocab_size=2048), r"no hidden_size|no language model|no num_hidden_layers"),
        (tf.Wav2Vec2Config(vocab_size=2048), "no language model for model type 'wav2vec2'"),
        (tf.HrmTextConfig(vocab_size=2048), "no list of .* decoder layers"),
        (tf.OlmoConfig(**FLAT), "no final norm of a known name with a weight"),
    ],
    ids=["bidirectional", "encoder", "encoder-decoder", "speech", "recurrent", "no weight"],
)
def test_what_is_no_causal_language_model_of_layers(no_weights, data, tmp_path, config, rule):
    target = config_only(tmp_path / "m", config)
    for work in (capture, dry_run):
        with pytest.raises(TargetError, match=rule) as caught:
            work(capture_options(target, data, tmp_path / "c"), Recorder())
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "c").exists()


def test_decoder_layers_that_are_not_found(no_weights, data, tmp_path, monkeypatch):
    target = config_only(tmp_path / "m", tf.LlamaConfig(**FLAT))
    build = tf.LlamaModel.__init__

    def hidden(self, config):
        build(self, config)
        self.stack = nn.Sequential(*self.layers)
        del self.layers

    monkeypatch.setattr(tf.LlamaModel, "__init__", hidden)
    with pytest.raises(
        TargetError, match="LlamaModel has no list of 4 decoder layers: this architecture is not supported"
    ):
        capture(capture_options(target, data, tmp_path / "c"), Recorder())


@pytest.mark.parametrize(
    ("kind", "options", "error", "rule"),
    [
        ("qwen3", {"attn": "paged|eager"}, OptionError, r"--attn paged\|eager: .*sees later tokens"),
        (
            "qwen3",
            {"attn": "flash_attention_2"},
            OptionError,
            "runs on a GPU in bfloat16 or float16 .here: cpu, float32",
        ),
        ("qwen3", {"attn": "no-such-attention"}, TargetError, "with --attn no-such-attention .*is not supported"),
        ("gpt-oss", {"attn": "sdpa"}, TargetError, "with --attn sdpa .*does not support"),
        ("gpt-oss", {"attn": "sdpa", "prefill_chunk": 64}, TargetError, "with --attn sdpa .*does not support"),
        ("qwen3", {"attn": "paged|sdpa", "prefill_chunk": 8}, OptionError, r"--attn paged\|sdpa"),
    ],
)
def test_an_attention_that_cannot_be_had(no_weights, data, tmp_path, kind, options, error, rule):
    target = config_only(tmp_path / "m", KINDS[kind]())
    with pytest.raises(error, match=rule) as caught:
        capture(capture_options(target, data, tmp_path / "c", device="cpu", **options), Recorder())
    assert "\n" not in str(caught.value)


def test_an_attention_that_fails_when_it_runs_is_one_line(data, tmp_path, monkeypatch):
    """Some raise in the first forward alone, such as flex attention with sinks on a CPU."""
    target = make_target("qwen3", tmp_path / "m")

    def fail(*_args, **_kwargs):
        raise ValueError("sinks cannot be run here.\nPlease switch.")

    monkeypatch.setattr("transformers.models.qwen3.modeling_qwen3.Qwen3Attention.forward", fail)
    with pytest.raises(TargetError, match=r"cannot run a few tokens .*sinks.*choose another --attn") as caught:
        capture(capture_options(target, data, tmp_path / "c"), Recorder())
    assert "\n" not in str(caught.value) and not (tmp_path / "c").exists()


def test_a_target_that_sees_later_tokens_as_it_runs(tmp_path):
    target = load_target(resolve_target(make_target("qwen3", tmp_path / "m")), "float32", "cpu")
    check_decoder(target, HeadTraits())
    target.model.set_attn_implementation("paged|eager")
    with pytest.raises(TargetError, match="is not causal as it runs here"):
        check_decoder(target, HeadTraits())


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        (
            tf.Gemma3nTextConfig(
                **FLAT | {"tie_word_embeddings": True},
                hidden_size_per_layer_input=8,
                vocab_size_per_layer_input=2048,
                num_kv_shared_layers=0,
                layer_types=["full_attention"] * 4,
                laurel_rank=8,
                activation_sparsity_pattern=[0.0] * 4,
            ),
            r"states of shape \(4, 1, 8, 32\) for 8 tokens",
        ),
        (tf.GPT2Config(vocab_size=2048, n_embd=32, n_layer=2, n_head=2, eos_token_id=2), "more to its embedding rows"),
    ],
    ids=["four streams", "learned positions"],
)
def test_states_and_embeddings_that_a_draft_cannot_use(data, tmp_path, config, rule):
    make_model(config).save_pretrained(tmp_path / "m")
    copy_tokenizer(tmp_path / "m")
    with pytest.raises(TargetError, match=rule):
        capture(capture_options(str(tmp_path / "m"), data, tmp_path / "c"), Recorder())
    assert not (tmp_path / "c").exists()


def test_a_norm_needs_a_name_that_is_known():
    decoder = nn.Module()
    decoder.norm_f = nn.LayerNorm(4)
    assert final_norm(decoder) is decoder.norm_f
    with pytest.raises(TargetError, match="no final norm"):
        final_norm(nn.Module())


def test_a_wrappers_word_on_tied_weights_counts(tmp_path):
    folder = Path(make_target("qwen3.5-wrapped", tmp_path / "m"))
    config = json.loads((folder / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"]) == (False, True)
    target = load_target(resolve_target(str(folder)), "float32", "cpu")
    assert type(target.model).__name__ == "Qwen3_5ForCausalLM", "without the vision part"
    assert target.lm_head.weight.data_ptr() != target.model.get_input_embeddings().weight.data_ptr()
