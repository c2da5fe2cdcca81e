"""config.json of a draft: the published DFlash layout, which serving engines read as it is (docs/design.md, section 5)."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from schemas.errors import DraftError
from schemas.strict import Strict

LayerType = Literal["full_attention", "sliding_attention"]
ARCHITECTURES: dict[str, Literal["DFlashDraftModel", "DFlash2DraftModel"]] = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
}
# Rotary types whose frequencies are one fixed set; "dynamic" and "longrope" change theirs with the sequence's length.
FIXED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class DFlashConfig(Strict):
    """The draft's own part of its config. The last three repeat the target's arithmetic, where it has any."""

    block_size: int = Field(ge=2)
    mask_token_id: int = Field(ge=0)
    target_layer_ids: tuple[int, ...] = Field(min_length=1)
    causal: Literal[False] = False
    conv_kernel_size: int | None = Field(None, ge=1)
    conv_group_size: int | None = Field(None, ge=1)
    selector_rank: int | None = Field(None, ge=1)
    selector_top_k: int | None = Field(None, ge=1)
    output_multiplier: float | None = None
    final_logit_softcapping: float | None = None
    input_embedding_scale: float | None = None

    @property
    def dflash2(self) -> bool:
        """Whether the keys of the convolution and the selector are there (all of them: `DraftConfig` checks)."""
        return self.selector_rank is not None


class DraftConfig(Strict):
    """The whole of config.json. It is also a plain Qwen3 config, so that unaware readers understand the trunk's shape."""

    architectures: tuple[Literal["DFlashDraftModel", "DFlash2DraftModel"]]
    model_type: Literal["qwen3"] = "qwen3"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    vocab_size: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_hidden_layers: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2, multiple_of=2)
    hidden_act: str = "silu"
    rms_norm_eps: float = Field(gt=0)
    max_position_embeddings: int = Field(ge=1)
    initializer_range: float = Field(0.02, gt=0)
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    attention_bias: Literal[False] = False
    attention_dropout: float = Field(0.0, ge=0, le=0)
    tie_word_embeddings: bool
    is_causal: Literal[False] = False
    layer_types: tuple[LayerType, ...]
    use_sliding_window: bool = False
    sliding_window: int | None = Field(None, ge=2)
    max_window_layers: int = Field(ge=0)
    rope_parameters: dict[str, Any]
    rope_theta: float
    rope_scaling: dict[str, Any] | None = None
    num_target_layers: int = Field(ge=1)
    block_size: int = Field(ge=2)
    dflash_config: DFlashConfig

    @property
    def kind(self) -> Literal["dflash", "dflash2"]:
        """Which draft this is."""
        return "dflash2" if self.architectures[0] == "DFlash2DraftModel" else "dflash"

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's sliding window in tokens, None where it attends to the whole context."""
        return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in self.layer_types)

    @model_validator(mode="after")
    def _consistent(self) -> "DraftConfig":
        own = self.dflash_config
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} attention heads do not divide into {self.num_key_value_heads} key-value heads"
            )
        if self.block_size != own.block_size:
            raise ValueError(f"block_size {self.block_size} differs from dflash_config.block_size {own.block_size}")
        if own.mask_token_id >= self.vocab_size:
            raise ValueError(f"mask_token_id {own.mask_token_id} is no row of a vocabulary of {self.vocab_size}")
        if (
            list(own.target_layer_ids) != sorted(set(own.target_layer_ids))
            or own.target_layer_ids[-1] >= self.num_target_layers
        ):
            raise ValueError(
                f"target_layer_ids {list(own.target_layer_ids)} must be ascending and below {self.num_target_layers}"
            )
        _check_layers(self)
        _check_rope(self.rope_parameters)
        if self.kind == "dflash2":
            _check_dflash2(own, self.hidden_size, self.vocab_size)
        elif own.dflash2:
            raise ValueError("dflash_config has a selector, which DFlashDraftModel has not")
        return self

    def to_json(self) -> dict[str, Any]:
        """The JSON object to write: optional keys of `dflash_config` only where they are set."""
        data = self.model_dump(mode="json")
        data["dflash_config"] = self.dflash_config.model_dump(mode="json", exclude_none=True)
        return data


def _check_layers(config: DraftConfig) -> None:
    if len(config.layer_types) != config.num_hidden_layers:
        raise ValueError(
            f"layer_types names {len(config.layer_types)} layers, num_hidden_layers is {config.num_hidden_layers}"
        )
    sliding = "sliding_attention" in config.layer_types
    if sliding != config.use_sliding_window or sliding != (config.sliding_window is not None):
        raise ValueError("layer_types, use_sliding_window and sliding_window disagree on whether a window slides")
    if config.sliding_window is not None and config.sliding_window < config.block_size:
        raise ValueError(
            f"sliding_window {config.sliding_window} is smaller than the block of {config.block_size}; give at least the block size"
        )


def _check_rope(parameters: dict[str, Any]) -> None:
    rope_type = parameters.get("rope_type")
    if rope_type not in FIXED_ROPE_TYPES:
        raise ValueError(f"rope_type {rope_type!r} is not one of {', '.join(FIXED_ROPE_TYPES)}")
    if not isinstance(parameters.get("rope_theta"), int | float):
        raise ValueError(f"rope_parameters.rope_theta must be a number (got {parameters.get('rope_theta')!r})")


def _check_dflash2(own: DFlashConfig, hidden_size: int, vocab_size: int) -> None:
    for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        if getattr(own, name) is None:
            raise ValueError(f"dflash_config.{name} is missing, which DFlash2DraftModel needs")
    assert own.conv_group_size is not None and own.selector_top_k is not None
    if hidden_size % own.conv_group_size:
        raise ValueError(f"conv_group_size {own.conv_group_size} does not divide the hidden size {hidden_size}")
    if own.selector_top_k > vocab_size:
        raise ValueError(f"selector_top_k {own.selector_top_k} is larger than the vocabulary of {vocab_size}")


def draft_folder(path: str | Path) -> Path:
    """The draft's own folder, given it or the run that holds it in `draft/`. Raises DraftError where neither has a config.json."""
    for folder in (Path(path), Path(path) / "draft"):
        if (folder / "config.json").is_file():
            return folder
    raise DraftError(
        f"--draft {path}: neither it nor its draft/ holds a config.json: give a finished run's folder or a draft's"
    )
