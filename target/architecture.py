"""Which transformers class a target becomes, and whether it can be used: decided before any weight is loaded."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)
from transformers.quantizers.auto import AutoHfQuantizer

from schemas.errors import OptionError, TargetError
from target.faults import reported
from target.layers import final_norm, find_layers

# Text models first: some wrappers have one of their own, which loads without the vision part.
AUTO_CLASSES = (
    (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING),
    (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
)


@dataclass(frozen=True)
class Architecture:
    """`auto` is the class whose `from_pretrained` loads the target; `config` is what its model is built from.

    That is the whole config, or its text part where transformers drops the wrapper around a text model.
    """

    auto: Any
    config: Any

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding: what the config that the model is built from says."""
        return bool(getattr(self.config, "tie_word_embeddings", False))


def architecture(name: str, config: Any, trust_remote_code: bool) -> Architecture:
    """How the target `name` of this whole config is loaded. Raises TargetError where transformers has no class for it."""
    own_code = getattr(config, "auto_map", None) or {}
    for auto, mapping in AUTO_CLASSES:
        if trust_remote_code and auto.__name__ in own_code:
            return Architecture(auto, config)
        found = mapping.get(type(config), None)
        if found is not None:
            text_class = config.sub_configs.get("text_config")
            if text_class is None or getattr(found, "config_class", None) != text_class:
                return Architecture(auto, config)
            text = config.get_text_config()
            if (quantised := getattr(config, "quantization_config", None)) is not None:
                text.quantization_config = quantised
            return Architecture(auto, text)
    hint = "; it brings its own code, which --trust-remote-code runs" if own_code else ""
    raise TargetError(
        f"target {name!r}: transformers has no language model for model type {config.model_type!r}{hint}: give a causal "
        "language model"
    )


def check_usable(name: str, config: Any, trust_remote_code: bool, attn: str, dtype: str, device: torch.device) -> None:
    """All that can be said against a target without its weights: no class, not causal, no way to read its quantised
    weights here, an attention that cannot be had, decoder layers, final norm or head that cannot be found.

    The model is built without memory (on the meta device), as loading builds it. Raises TargetError, and OptionError for
    `attn`.
    """
    known = architecture(name, config, trust_remote_code)
    text = config.get_text_config()
    _check_causal(name, text)
    check_quantised(name, config)
    check_attention(attn, dtype, device)
    how = "" if attn == "auto" else f" with --attn {attn}"
    with reported(name, f"build it{how}", "choose another --attn or target"), torch.device("meta"):
        model = known.auto.from_config(
            copy.deepcopy(known.config),
            attn_implementation=None if attn == "auto" else attn,
            trust_remote_code=trust_remote_code,
        )
    decoder, _ = decoder_and_head(name, model)
    find_layers(decoder, text.num_hidden_layers)
    final_norm(decoder)


def decoder_and_head(name: str, model: Any) -> tuple[nn.Module, Any]:
    """The text model without its head, and the head. Raises TargetError where either cannot be found."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    if decoder is model:
        # transformers finds none under a usual name, and takes the whole for it.
        decoder = getattr(model, "model", None)
    if head is None:
        raise TargetError(
            f"target {name!r}: {type(model).__name__} has no language-model head: give a causal language model"
        )
    if decoder is None or any(module is head for module in decoder.modules()):
        raise TargetError(
            f"target {name!r}: {type(model).__name__} has no decoder apart from its head: this architecture is not supported"
        )
    return decoder, head


def _check_causal(name: str, text: Any) -> None:
    # Gemma 4 says "vision" where only an image's tokens see one another; True and "all" mean text too.
    if getattr(text, "use_bidirectional_attention", None) in (True, "all") or getattr(text, "is_causal", True) is False:
        raise TargetError(
            f"target {name!r}: its layers are not causal (its config says so): what comes later changes a token's hidden "
            "state, so no draft can be trained on it; give a causal language model"
        )


def check_quantised(name: str, config: Any) -> None:
    """TargetError where the weights are quantised in a way that transformers cannot load here, with its reason."""
    found = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(), "quantization_config", None
    )
    if found is None:
        return
    data = found if isinstance(found, dict) else found.to_dict()
    method = data.get("quant_method")
    advice = "install what it names, or give the unquantised model"
    with reported(name, f"read weights quantised with {method}", advice):
        if not AutoHfQuantizer.supports_quant_method(data):
            raise ValueError("transformers does not know this method")
        AutoHfQuantizer.from_config(dict(data), pre_quantized=True).validate_environment(device_map=None)


def check_attention(attn: str, dtype: str, device: torch.device) -> None:
    """OptionError for an attention that computes something else here than the target's own."""
    if attn.startswith("paged"):
        raise OptionError(
            f"--attn {attn}: paged attention needs a server's cache, and without one sees later tokens: choose another, "
            "such as sdpa or eager"
        )
    if attn.startswith("flash_attention") and (device.type == "cpu" or dtype == "float32"):
        raise OptionError(
            f"--attn {attn}: it runs on a GPU in bfloat16 or float16 (here: {device.type}, {dtype}): choose --attn sdpa or "
            "another --device or --dtype"
        )
