"""A draft's folder, config.json and model.safetensors in the published layout: written whole or not at all."""

import json
import os
import shutil
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from cache.whole import fsync_folder, write_whole
from cache.workspace import TEMPORARY
from draft.model import Draft, cast
from schemas.draft import DraftConfig
from schemas.errors import DraftError
from schemas.strict import parse

CONFIG, WEIGHTS = "config.json", "model.safetensors"
Dtype = Literal["bfloat16", "float32"]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def save_draft(folder: str | Path, draft: Draft, dtype: Dtype = "bfloat16") -> None:
    """Write a draft that serving engines load as it is.

    A reader, or a restart after a crash, finds the old draft or the new one, never a mixture and never none. Raises DraftError
    where `folder` holds anything but a draft of the same config.
    """
    folder = Path(folder)
    check_place(folder, draft.config, dtype)
    config = _config_bytes(draft.config, dtype)
    tensors = {key: value.detach().to("cpu", DTYPES[dtype]).contiguous() for key, value in draft.state_dict().items()}
    weights = save(tensors, metadata={"format": "pt"})
    # What a killed write left behind.
    for left in (*folder.glob(f"{TEMPORARY}*-{WEIGHTS}"), *folder.parent.glob(f"{TEMPORARY}*-{folder.name}")):
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    if (folder / CONFIG).is_file():
        # The config is the same to the byte, so replacing one file replaces the draft.
        write_whole(folder / WEIGHTS, [weights])
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f"{TEMPORARY}{os.getpid()}-{folder.name}")
    try:
        write_whole(temporary / CONFIG, [config])
        write_whole(temporary / WEIGHTS, [weights])
        os.rename(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fsync_folder(folder.parent)


def check_place(folder: Path, config: DraftConfig, dtype: Dtype) -> None:
    """DraftError where `save_draft` would refuse `folder`: it holds something else, or a draft of another config."""
    names = (
        {path.name for path in folder.iterdir() if not path.name.startswith(TEMPORARY)} if folder.is_dir() else set()
    )
    if not names:
        return
    if names != {CONFIG, WEIGHTS}:
        raise DraftError(
            f"{folder} holds {', '.join(sorted(names)[:3])}, not a draft alone: name another folder, or empty it"
        )
    if (folder / CONFIG).read_bytes() != _config_bytes(config, dtype):
        raise DraftError(f"{folder} holds a draft of another config: name another folder, or remove it")


def _config_bytes(config: DraftConfig, dtype: Dtype) -> bytes:
    return (json.dumps(config.model_copy(update={"dtype": dtype}).to_json(), indent=2) + "\n").encode()


def read_draft_config(folder: str | Path) -> DraftConfig:
    """The checked config.json of a draft's folder. Raises DraftError."""
    path = Path(folder) / CONFIG
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError) as fault:
        raise DraftError(
            f"{path} cannot be read ({fault}): give the folder of a draft that `dflash train` wrote"
        ) from None
    if isinstance(data, dict):
        # A note of the writing library's release, which decides nothing.
        data.pop("transformers_version", None)
    return parse(DraftConfig, data, str(path), DraftError)


def load_draft(folder: str | Path, device: torch.device | str = "cpu", dtype: Dtype | None = None) -> Draft:
    """The draft of a folder, in evaluation mode; `dtype` None is the file's own. Norm weights are float32 in any case.

    Raises DraftError where the config or the weights cannot be read, or the weights are not exactly the config's.
    """
    folder = Path(folder)
    config = read_draft_config(folder)
    path = folder / WEIGHTS
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as fault:
        raise DraftError(f"{path} cannot be read ({fault}): write the draft again, or give another folder") from None
    draft = Draft(config)
    _check_weights(path, tensors, draft.state_dict())
    draft.load_state_dict(tensors)
    return cast(draft, device, DTYPES[dtype or config.dtype]).eval()


def _check_weights(path: Path, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for what, names in (
        ("lacks", sorted(wanted.keys() - found.keys())),
        ("has unknown", sorted(found.keys() - wanted.keys())),
    ):
        if names:
            raise DraftError(
                f"{path} {what} {names[0]} ({len(names)} such weights): it does not belong to the config.json beside it"
            )
    for name, tensor in wanted.items():
        if found[name].shape != tensor.shape:
            raise DraftError(
                f"{path}: {name} is {list(found[name].shape)}, the config.json beside it says {list(tensor.shape)}: write the draft again"
            )
