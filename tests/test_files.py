"""The draft's folder: what is in it, that it comes back, that it is whole or not there, and what is refused."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import lively_draft, small_config
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import draft.files
from draft.files import load_draft, read_draft_config, save_draft
from draft.model import Draft
from schemas.draft import draft_folder
from schemas.errors import DraftError


def saved(folder: Path, kind: str = "dflash2") -> Draft:
    made = lively_draft(small_config(kind))
    save_draft(folder, made, "float32")
    return made


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_draft_comes_back(tmp_path: Path, kind: str, dtype: Any) -> None:
    made = lively_draft(small_config(kind, 6))
    save_draft(tmp_path / "draft", made, dtype)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["config.json", "draft", "model.safetensors"]
    stored = load_file(tmp_path / "draft" / "model.safetensors")
    assert {value.dtype for value in stored.values()} == {getattr(torch, dtype)}
    found = load_draft(tmp_path / "draft", dtype="float32")
    for key, value in made.state_dict().items():
        assert torch.equal(found.state_dict()[key], value.to(getattr(torch, dtype)).float()), key
    assert found.config == made.config.model_copy(update={"dtype": dtype})
    kinds = {
        parameter.dtype for name, parameter in load_draft(tmp_path / "draft").named_parameters() if "norm" not in name
    }
    assert kinds == {getattr(torch, dtype)}


def test_config_is_a_plain_qwen3_config_and_has_the_contracts_keys(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    config = small_config("dflash2", 6, rope_parameters=rope, rope_theta=1e6, rope_scaling=scaling)
    save_draft(tmp_path / "draft", lively_draft(config))
    data = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert (
        data["architectures"] == ["DFlash2DraftModel"] and data["model_type"] == "qwen3" and data["dtype"] == "bfloat16"
    )
    assert data["is_causal"] is False and data["dflash_config"]["causal"] is False and data["attention_bias"] is False
    assert (
        data["layer_types"] == ["sliding_attention"] * 2
        and data["sliding_window"] == 6
        and data["use_sliding_window"] is True
    )
    assert data["block_size"] == data["dflash_config"]["block_size"] == 4
    assert data["dflash_config"] == {
        "block_size": 4,
        "mask_token_id": 40,
        "target_layer_ids": [1, 3],
        "causal": False,
        "conv_kernel_size": 2,
        "conv_group_size": 8,
        "selector_rank": 6,
        "selector_top_k": 5,
    }
    theirs = AutoConfig.from_pretrained(tmp_path / "draft")
    assert type(theirs).__name__ == "Qwen3Config"
    assert theirs.rope_parameters == rope
    assert theirs.sliding_window == 6 and theirs.layer_types == ["sliding_attention"] * 2
    for key in ("hidden_size", "intermediate_size", "head_dim", "num_key_value_heads", "rms_norm_eps", "vocab_size"):
        assert getattr(theirs, key) == data[key]


def test_a_newer_draft_replaces_the_older_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "draft"
    first = saved(folder)
    second = lively_draft(small_config("dflash2"), seed=9)

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", die)
        with pytest.raises(KeyboardInterrupt):
            save_draft(folder, second, "float32")
    assert torch.equal(load_draft(folder).fc.weight, first.fc.weight)
    save_draft(folder, second, "float32")
    assert torch.equal(load_draft(folder).fc.weight, second.fc.weight)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["config.json", "draft", "model.safetensors"]


def test_a_first_write_that_dies_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = draft.files.write_whole, []

    def die_on_weights(path: Path, parts: Any) -> Any:
        calls.append(path.name)
        if path.name == "model.safetensors":
            raise OSError("disk full")
        return real(path, parts)

    monkeypatch.setattr(draft.files, "write_whole", die_on_weights)
    with pytest.raises(OSError, match="disk full"):
        saved(tmp_path / "draft")
    assert calls == ["config.json", "model.safetensors"]
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_write_left_is_removed(tmp_path: Path) -> None:
    made = saved(tmp_path / "draft")
    (tmp_path / "draft/.tmp-1-model.safetensors").write_bytes(b"half")
    (tmp_path / ".tmp-1-draft").mkdir()
    (tmp_path / ".tmp-1-draft/config.json").write_text("{")
    (tmp_path / ".tmp-1-other").mkdir()
    save_draft(tmp_path / "draft", made, "float32")
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        ".tmp-1-other",
        "config.json",
        "draft",
        "model.safetensors",
    ]


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DraftError, match=r"holds notes.txt, not a draft alone"):
        saved(tmp_path)
    saved(tmp_path / "draft", "dflash")
    with pytest.raises(DraftError, match="holds a draft of another config"):
        saved(tmp_path / "draft", "dflash2")
    assert load_draft(tmp_path / "draft").config.kind == "dflash"


def test_a_run_folder_stands_for_its_draft(tmp_path: Path) -> None:
    saved(tmp_path / "run" / "draft")
    assert draft_folder(tmp_path / "run") == draft_folder(tmp_path / "run" / "draft") == tmp_path / "run" / "draft"
    with pytest.raises(DraftError, match=r"neither it nor its draft/ holds a config\.json"):
        draft_folder(tmp_path)


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    data = json.loads(path.read_text())
    own = {key: changes.pop(key) for key in list(changes) if key in data["dflash_config"] and key != "block_size"}
    data["dflash_config"] |= own
    path.write_text(json.dumps(data | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, r"fc.weight is \[32, 64\], the config.json beside it says \[64, 128\]"),
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, "lacks layers.2.attention_conv.base_kernel"),
        ({"architectures": ["DFlashDraftModel"]}, "has a selector, which DFlashDraftModel has not"),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures.0"),
        ({"block_size": 8}, "block_size 8 differs from dflash_config.block_size 4"),
        ({"mask_token_id": 41}, "mask_token_id 41 is no row of a vocabulary of 41"),
        ({"target_layer_ids": [3, 1]}, "must be ascending"),
        ({"num_key_value_heads": 3}, "4 attention heads do not divide into 3"),
        ({"wobble": 1}, "wobble: unknown key"),
        ({"is_causal": True}, "is_causal"),
        ({"selector_rank": None}, "selector_rank is missing"),
        ({"conv_group_size": 5}, "conv_group_size 5 does not divide the hidden size 32"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope_type 'dynamic' is not one of"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta must be a number"),
        ({"use_sliding_window": True}, "disagree on whether a window slides"),
        (
            {"use_sliding_window": True, "sliding_window": 3, "layer_types": ["sliding_attention"] * 2},
            "sliding_window 3 is smaller than the block of 4",
        ),
    ],
)
def test_a_wrong_config_is_refused_in_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    saved(tmp_path / "draft")
    edit(tmp_path / "draft", **changes)
    with pytest.raises(DraftError, match=message) as fault:
        load_draft(tmp_path / "draft")
    assert "\n" not in str(fault.value)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    made = saved(tmp_path / "draft")
    weights = tmp_path / "draft" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(DraftError, match="cannot be read"):
        load_draft(tmp_path / "draft")
    save_file({**made.state_dict(), "extra": torch.ones(1)}, weights)
    with pytest.raises(DraftError, match="has unknown extra"):
        load_draft(tmp_path / "draft")
    weights.unlink()
    with pytest.raises(DraftError, match="cannot be read"):
        load_draft(tmp_path / "draft")
    (tmp_path / "draft" / "config.json").write_text("{")
    with pytest.raises(DraftError, match="cannot be read"):
        read_draft_config(tmp_path / "draft")
