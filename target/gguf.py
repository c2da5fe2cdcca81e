"""A GGUF file as a target: what transformers needs beside the weights, in a folder of its own.

llama.cpp packs config, tokenizer and weights into one file. Files of the original model that lie beside it (config.json, the
tokenizer's) come first: transformers does not carry over every rule of either.
"""

import atexit
import json
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedTokenizerFast
from transformers.integrations.gguf import read_gguf_metadata
from transformers.utils import is_accelerate_available, is_gguf_available

from schemas.errors import TargetError
from target.faults import reported

SUFFIX = ".gguf"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "generation_config.json"),
)
# Keys of a file's metadata that change what the model computes, and that transformers drops without a word.
SCALES = ("logit_scale", "embedding_scale", "residual_scale", "attention.scale")


def find_gguf(path: Path, weight_patterns: tuple[str, ...]) -> Path | None:
    """The GGUF file that `path` is, or that a folder without other weights holds; None where it is another target.

    Raises TargetError for a folder that holds several.
    """
    if path.is_file():
        return path if path.suffix == SUFFIX else None
    if not path.is_dir() or any(next(path.glob(pattern), None) for pattern in weight_patterns):
        return None
    found = sorted(path.glob(f"*{SUFFIX}"))
    if len(found) > 1:
        raise TargetError(
            f"target {str(path)!r}: the folder holds {len(found)} GGUF files ({found[0].name}, {found[1].name} ...): give the "
            "one to use"
        )
    return found[0] if found else None


def unpack_gguf(gguf: Path) -> Path:
    """A folder with config.json and tokenizer of the file, which lives as long as this process. Raises TargetError."""
    if not (is_gguf_available() and is_accelerate_available()):
        raise TargetError(
            f"target {str(gguf)!r}: reading GGUF files takes the packages gguf and accelerate: pip install "
            "'dflash-pipeline[demo]'"
        )
    folder = Path(tempfile.mkdtemp(prefix="dflash-gguf-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with reported(gguf.name, "read the GGUF file", "get the file again, or give the model's folder"):
        _write_config(gguf, folder / "config.json")
        if (gguf.parent / "tokenizer.json").is_file():
            for name in TOKENIZER_FILES:
                if (gguf.parent / name).is_file():
                    shutil.copy(gguf.parent / name, folder / name)
        else:
            # The automatic class would parse the whole file's config twice more, half a minute for a large vocabulary.
            PreTrainedTokenizerFast.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    return folder


def _write_config(gguf: Path, path: Path) -> None:
    if (gguf.parent / "config.json").is_file():
        shutil.copy(gguf.parent / "config.json", path)
        return
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    metadata, tensors = read_gguf_metadata(str(gguf))
    _check_carried(gguf.name, config, metadata, tensors)
    data = config.to_dict()
    # The hash of this file is a part of a cache's identity: it must not change with the library's version.
    for name in ("transformers_version", "_name_or_path", "quantization_config"):
        data.pop(name, None)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    data["architectures"] = None if model_class is None else [model_class.__name__]
    # transformers leaves these to the class, whose defaults are another model's: a wrong end would cut answers short.
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "padding")}
    ends = sorted({ids[name] for name in ("eos", "eot") if ids[name] is not None})
    data |= {"bos_token_id": ids["bos"], "pad_token_id": ids["padding"], "eos_token_id": ends or None}
    path.write_text(json.dumps(data, indent=2, sort_keys=True, default=str) + "\n", encoding="utf-8")


def _check_carried(name: str, config: Any, metadata: dict[str, Any], tensors: Collection[str]) -> None:
    kind = metadata["general.architecture"]
    rope = getattr(config, "rope_parameters", None) or {}
    scaled = metadata.get(f"{kind}.rope.scaling.type", "none") != "none" or "rope_freqs.weight" in tensors
    lost = [f"{kind}.{scale}" for scale in SCALES if metadata.get(f"{kind}.{scale}") is not None]
    if scaled and rope.get("rope_type", "default") == "default":
        lost.insert(0, f"{kind}.rope.scaling")
    if lost:
        raise TargetError(
            f"target {name!r}: transformers drops {', '.join(lost)} of the GGUF file, so the target would compute "
            "something else: put the original model's config.json beside it"
        )
