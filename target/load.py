"""Finding and loading the frozen target: a local folder or a model of the Hub, its config, tokenizer and weights."""

import hashlib
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils.quantization_config import GgufConfig

from cache.device import resolve_device
from schemas.errors import OptionError, TargetError
from target.architecture import Architecture, architecture, check_attention, check_quantised, decoder_and_head
from target.faults import first_line, reported
from target.gguf import find_gguf, unpack_gguf
from target.layers import find_layers

# What planning needs of a Hub model: everything but the weights.
SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
WEIGHT_FILES = ("*.safetensors", "*.bin")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SAMPLED_BYTES = 1 << 16
SAMPLES_PER_FILE = 64


@dataclass(frozen=True)
class TargetRef:
    """A target that was found: `folder` holds config and tokenizer, `source` is what the weights are loaded from.

    `revision` is the Hub's commit, or for local weights "local-" and a fingerprint of their files. For a GGUF file `gguf` is
    its name, `source` the folder that it lies in, and `folder` holds what was unpacked from it.
    """

    name: str
    revision: str
    folder: Path
    source: str
    trust_remote_code: bool = False
    gguf: str | None = None

    @property
    def is_local(self) -> bool:
        """Whether the weights lie on this machine's disk, under a path that the user gave."""
        return self.gguf is not None or self.source == str(self.folder)


@dataclass(frozen=True)
class Target:
    """The loaded target, frozen: evaluation mode, no gradients.

    `decoder` is the text model without the head, its output is after the final norm; `config` is the text model's;
    `layers` are its decoder layers, in order.
    """

    model: Any
    decoder: nn.Module
    lm_head: Any
    config: Any
    layers: nn.ModuleList
    dtype: torch.dtype
    device: torch.device


def resolve_target(name: str, trust_remote_code: bool = False) -> TargetRef:
    """Find a target: a local folder or GGUF file of that name, else the Hub's model ("Qwen3-8B" means "Qwen/Qwen3-8B").

    Of a Hub model only the small files are fetched. Raises TargetError, at once where there is no network.
    """
    folder = Path(name).expanduser()
    if (gguf := find_gguf(folder, WEIGHT_FILES)) is not None:
        revision = f"local-{_fingerprint([gguf])}"
        return TargetRef(gguf.stem, revision, unpack_gguf(gguf), str(gguf.parent), trust_remote_code, gguf.name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise TargetError(
                f"target {name!r}: the folder has no config.json, so it is no model; give the folder that holds "
                "config.json and the weights"
            )
        return TargetRef(
            folder.absolute().name or folder.resolve().name,
            f"local-{weights_fingerprint(folder)}",
            folder,
            str(folder),
            trust_remote_code,
        )
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1 or not name.strip():
        raise TargetError(f"target {name!r}: no such folder; give the folder of a model or the name of one on the Hub")
    repository = f"Qwen/{name}" if "/" not in name and name.startswith("Qwen") else name
    folder = _fetch_small_files(name, repository)
    return TargetRef(repository, folder.name, folder, repository, trust_remote_code)


def _fetch_small_files(name: str, repository: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repository, allow_patterns=list(SMALL_FILES)))
    except Exception as fault:  # the Hub client raises a dozen kinds, from half a dozen modules
        raise TargetError(
            f"target {name!r}: there is no local folder of that name, and the Hub does not give {repository!r} "
            f"({first_line(fault)}); "
            "give a model's folder, or correct the name or the connection"
        ) from None
    if not (folder / "config.json").is_file():
        raise TargetError(
            f"target {name!r}: {repository!r} on the Hub has no config.json, so it is no transformers model; name "
            "another"
        )
    return folder


def weights_fingerprint(folder: Path) -> str:
    """16 hexadecimal digits over the names, sizes and evenly spaced pieces of the weight files.

    Reading every byte of a large model would cost minutes before planning starts; training moves every piece of every
    matrix.
    """
    return _fingerprint(sorted(path for pattern in WEIGHT_FILES for path in folder.glob(pattern)))


def _fingerprint(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        pieces = SAMPLES_PER_FILE if size > SAMPLED_BYTES * SAMPLES_PER_FILE else 1
        with path.open("rb") as file:
            for piece in range(pieces):
                file.seek(piece * (size - SAMPLED_BYTES) // (SAMPLES_PER_FILE - 1) if pieces > 1 else 0)
                digest.update(file.read(SAMPLED_BYTES if pieces > 1 else size))
    return digest.hexdigest()[:16]


def read_config(ref: TargetRef) -> Any:
    """The target's whole transformers config; `.get_text_config()` of it is the decoder's. Raises TargetError."""
    _check_trusted(ref, "config.json", "AutoConfig", "model_type")
    with _reported(ref, "config"):
        config = AutoConfig.from_pretrained(ref.folder, trust_remote_code=ref.trust_remote_code)
        raw = json.loads((ref.folder / "config.json").read_text(encoding="utf-8"))
    # A wrapper's weights are tied where the wrapper says so, also where the text model is taken out of it.
    if "tie_word_embeddings" in raw:
        config.get_text_config().tie_word_embeddings = config.tie_word_embeddings
    for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
        if not isinstance(getattr(config.get_text_config(), name, None), int):
            raise TargetError(f"target {ref.name!r}: its config has no {name}: give a causal language model")
    return config


def load_tokenizer(ref: TargetRef) -> Any:
    """The target's tokenizer. Raises TargetError where there is none, or none with a chat template."""
    _check_trusted(ref, "tokenizer_config.json", "AutoTokenizer", None)
    with _reported(ref, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(ref.folder, trust_remote_code=ref.trust_remote_code)
    if not isinstance(tokenizer.chat_template, str):
        raise TargetError(
            f"target {ref.name!r}: its tokenizer has no chat template; take the chat (instruct) model or add "
            "chat_template.jinja to its folder"
        )
    return tokenizer


def eos_ids(ref: TargetRef, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end an answer: generation_config's, else the config's, and the tokenizer's; ascending.

    Raises TargetError where no file names one: an answer would have no end.
    """
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = ref.folder / name
        if found or not path.is_file():
            continue
        with _reported(ref, name):
            ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            found.update([ids] if isinstance(ids, int) else [int(i) for i in ids or []])
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    if not found:
        raise TargetError(
            f"target {ref.name!r}: no end-of-sequence token in generation_config.json, config.json or the tokenizer; "
            "add eos_token_id"
        )
    return tuple(sorted(found))


def config_sha256(ref: TargetRef) -> str:
    """The hash of config.json's bytes."""
    return hashlib.sha256((ref.folder / "config.json").read_bytes()).hexdigest()


def resolve_dtype(dtype: str, config: Any) -> str:
    """The data type that the target runs in; "auto" is the one its config names, float32 where it names none."""
    if dtype == "auto":
        named = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None) or "float32"
        dtype = str(named).removeprefix("torch.")
    if dtype not in DTYPES:
        raise OptionError(f"dtype {dtype!r} is none of {', '.join(DTYPES)}: choose one with --dtype")
    return dtype


def load_target(ref: TargetRef, dtype: str = "auto", device: str = "auto", attn: str = "auto", tp: int = 1) -> Target:
    """Load the weights, frozen, on one device, or this process's part of them where `tp` > 1 (target/parallel.py).

    `attn` is a transformers attention name ("sdpa", "eager", "flash_attention_2"; "auto" is its default). Raises
    TargetError where weights are missing from the files, of another shape, or unreadable: transformers would fill them
    in at random.
    """
    config = read_config(ref)
    name, place = resolve_dtype(dtype, config), resolve_device(device)
    check_quantised(ref.name, config)
    check_attention(attn, name, place)
    with _reported(ref, "weights" if attn == "auto" else f"weights with --attn {attn}"):
        known = architecture(ref.name, config, ref.trust_remote_code)
        model, info = known.auto.from_pretrained(
            ref.source,
            **_loading_arguments(ref, known, DTYPES[name], attn),
            distributed_config=DistributedConfig(tp_size=tp, tp_plan="auto") if tp > 1 else None,
        )
    if tp == 1:
        model.to(place)
    return _as_target(ref, config, model, info, DTYPES[name], place)


def _loading_arguments(ref: TargetRef, known: Architecture, dtype: torch.dtype, attn: str) -> dict[str, Any]:
    arguments = {
        "config": known.config,
        "revision": None if ref.is_local else ref.revision,
        "dtype": dtype,
        "attn_implementation": None if attn == "auto" else attn,
        "trust_remote_code": ref.trust_remote_code,
        "output_loading_info": True,
    }
    if ref.gguf is not None:
        # Packed weights would need a kernel of the Hub, and a head that training can use is wanted anyway.
        arguments |= {"gguf_file": ref.gguf, "quantization_config": GgufConfig(dequantize=True)}
    return arguments


def _as_target(
    ref: TargetRef, config: Any, model: Any, info: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> Target:
    # Taken apart and frozen. What only other parts lack (a vision tower, in a checkpoint of the text model) is not missed.
    decoder, head = decoder_and_head(ref.name, model)
    ours = tuple(f"{name}." for name, module in model.named_modules() if module is decoder or module is head)
    lost = [str(key) for key in info["missing_keys"] if str(key).startswith(ours)]
    if bad := sorted(lost) + sorted(str(key) for key in info["mismatched_keys"]):
        raise TargetError(
            f"target {ref.name!r}: {len(bad)} weights are missing or of another shape, such as {bad[0]}; get the "
            "model's files again"
        )
    model.eval().requires_grad_(False)
    text = config.get_text_config()
    return Target(model, decoder, head, text, find_layers(decoder, text.num_hidden_layers), dtype, device)


def _check_trusted(ref: TargetRef, file: str, auto: str, known_by: str | None) -> None:
    """TargetError where only code that comes with the target can read `file`, and the user did not say it may run."""
    path = ref.folder / file
    if ref.trust_remote_code or not path.is_file():
        return
    with _reported(ref, file):
        data = json.loads(path.read_text(encoding="utf-8"))
        own = data.get("auto_map") or {}
        code = own.get(auto) if isinstance(own, dict) else own
    if code and not (known_by and data.get(known_by) in CONFIG_MAPPING):
        code = next(part for part in ([code] if isinstance(code, str) else code) if part)
        raise TargetError(
            f"target {ref.name!r}: it brings its own code ({code.split('--')[-1].rsplit('.', 1)[0]}.py), which was not run: "
            "read it, then allow it with --trust-remote-code"
        )


def _reported(ref: TargetRef, what: str) -> AbstractContextManager[None]:
    return reported(
        ref.name, f"load its {what}", f"check the files in {ref.folder if ref.gguf is None else ref.source}"
    )
