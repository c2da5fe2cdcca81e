"""What a draft's config takes from its target's, and what it never does."""

from typing import Any

import pytest
from cache_fixtures import identity

from draft.shape import draft_config, rope_parameters
from schemas.errors import DraftError, OptionError
from schemas.manifest import Identity
from schemas.options import DraftOptions

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
    "vocab_size": 40,
}


def with_target(**changes: Any) -> Identity:
    base = identity()
    return base.model_copy(update={"target": base.target.model_copy(update=changes)})


def test_sizes_come_from_the_target_unless_options_say_otherwise() -> None:
    config = draft_config(QWEN3, identity(), (3, 0), DraftOptions(num_layers=2, block_size=8))
    sizes = (
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
    )
    assert sizes == (16, 48, 4, 2, 6)
    assert (config.rms_norm_eps, config.max_position_embeddings, config.vocab_size) == (1e-5, 4096, 40)
    assert (config.num_hidden_layers, config.block_size, config.num_target_layers) == (2, 8, 6)
    assert config.dflash_config.target_layer_ids == (0, 3) and config.dflash_config.mask_token_id == 39
    assert config.architectures == ("DFlashDraftModel",) and config.tie_word_embeddings
    own = DraftOptions(num_attention_heads=3, num_key_value_heads=1, head_dim=10, intermediate_size=20)
    config = draft_config(QWEN3, identity(), (0,), own)
    sizes = (
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
    )
    assert sizes == (16, 20, 3, 1, 10)


def test_dflash2_has_its_own_keys() -> None:
    options = DraftOptions(kind="dflash2", conv_group_size=4, selector_rank=7, selector_top_k=5)
    own = draft_config(QWEN3, identity(), (0, 2), options).dflash_config
    assert (own.conv_kernel_size, own.conv_group_size, own.selector_rank, own.selector_top_k) == (2, 4, 7, 5)
    assert draft_config(QWEN3, identity(), (0, 2), DraftOptions()).to_json()["dflash_config"].keys() == {
        "block_size",
        "mask_token_id",
        "target_layer_ids",
        "causal",
    }


def test_the_targets_scales_are_repeated_where_it_has_them() -> None:
    scaled = with_target(embedding_scale=4.0, logit_scale=0.25, logit_softcap=30.0)
    own = draft_config(QWEN3, scaled, (0,), DraftOptions()).to_json()["dflash_config"]
    assert (own["input_embedding_scale"], own["output_multiplier"], own["final_logit_softcapping"]) == (4.0, 0.25, 30.0)


def test_a_nested_text_config_is_the_decoders() -> None:
    nested = {"model_type": "vision", "text_config": QWEN3, "hidden_size": 999}
    assert draft_config(nested, identity(), (0,), DraftOptions()) == draft_config(
        QWEN3, identity(), (0,), DraftOptions()
    )


def test_a_window_slides_over_every_layer() -> None:
    config = draft_config(QWEN3, identity(), (0,), DraftOptions(num_layers=3, block_size=8, sliding_window=8))
    assert config.layer_types == ("sliding_attention",) * 3
    assert (config.use_sliding_window, config.sliding_window, config.max_window_layers) == (True, 8, 0)
    assert config.windows == (8, 8, 8)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        ),
        (
            {"rope_theta": 1e6, "max_position_embeddings": 512, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 512},
        ),
        (
            {"rope_theta": 1.0, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
            {"rope_type": "default", "rope_theta": 7.0},
        ),
        (
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                }
            },
            {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e7,
                    "partial_rotary_factor": 0.25,
                    "mrope_section": [1, 2],
                }
            },
            {"rope_type": "default", "rope_theta": 1e7},
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}},
            {"rope_type": "default", "rope_theta": 1e6},
        ),
    ],
)
def test_rotary_is_the_full_attentions_whole_head_one_axis(text: dict[str, Any], expected: dict[str, Any]) -> None:
    assert rope_parameters(text) == expected


def test_scaling_is_repeated_at_the_top_for_older_readers() -> None:
    scaled = QWEN3 | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}}
    data = draft_config(scaled, identity(), (0,), DraftOptions()).to_json()
    assert data["rope_theta"] == 1e6 and data["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert draft_config(QWEN3, identity(), (0,), DraftOptions()).to_json()["rope_scaling"] is None


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope", "proportional"])
def test_frequencies_that_change_with_length_are_refused(rope_type: str) -> None:
    with pytest.raises(DraftError, match=f"type '{rope_type}'.*choose another target"):
        rope_parameters({"rope_parameters": {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0}})


@pytest.mark.parametrize(
    ("config", "layers", "options", "error", "message"),
    [
        (QWEN3, (0, 5), {}, OptionError, r"layer 5 is the target's last.*choose among 0\.\.4"),
        (
            QWEN3,
            (0,),
            {"sliding_window": 8, "block_size": 16},
            OptionError,
            "sliding_window 8 is smaller than the block of 16",
        ),
        (QWEN3, (0,), {"num_attention_heads": 3}, OptionError, "3 attention heads do not divide into 2"),
        (QWEN3, (0,), {"kind": "dflash2", "conv_group_size": 5}, OptionError, "conv_group_size 5 does not divide"),
        (
            QWEN3,
            (0,),
            {"kind": "dflash2", "selector_top_k": 41},
            OptionError,
            "selector_top_k 41 is larger than the vocabulary of 40",
        ),
        (QWEN3, (0,), {"kind": "jetspec"}, OptionError, "draft kind 'jetspec' is not in this version"),
        (
            {k: v for k, v in QWEN3.items() if k != "intermediate_size"},
            (0,),
            {},
            DraftError,
            "no intermediate_size: set draft.interm",
        ),
        (
            {k: v for k, v in QWEN3.items() if k != "max_position_embeddings"},
            (0,),
            {},
            DraftError,
            "no max_position_embeddings: choose another target",
        ),
        ({k: v for k, v in QWEN3.items() if k != "rope_parameters"}, (0,), {}, DraftError, "no rope_theta"),
    ],
)
def test_what_does_not_fit_is_refused(
    config: dict[str, Any], layers: tuple[int, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        draft_config(config, identity(), layers, DraftOptions(**options))


def test_a_wrapper_leaves_to_transformers_what_it_does_not_say() -> None:
    """The text_config of google/gemma-3-4b-it names these keys alone; heads, theta and lengths are its class's own."""
    sparse = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    wrapped = {"model_type": "gemma3", "text_config": sparse}
    config = draft_config(wrapped, with_target(hidden_size=2560, vocab_size=262208), (0,), DraftOptions())
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 4, 256)
    assert config.rope_parameters == {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    assert (config.max_position_embeddings, config.hidden_act) == (131072, "gelu_pytorch_tanh")


def test_names_of_its_own_and_a_theta_that_is_not_used() -> None:
    kimi = {name: value for name, value in QWEN3.items() if name not in ("rope_parameters", "max_position_embeddings")}
    config = draft_config(
        kimi | {"model_type": "kimi_linear", "model_max_length": 77}, identity(), (0,), DraftOptions()
    )
    assert config.max_position_embeddings == 77
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
