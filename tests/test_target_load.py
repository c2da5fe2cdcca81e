"""Finding and loading targets: names, fingerprints, broken folders, a Hub that does not answer."""

import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from capture_fixtures import TINY_CHAT, copy_tokenizer, random_target
from safetensors.torch import load_file, save_file

from cache.device import resolve_device
from schemas.errors import OptionError, TargetError
from target.load import (
    config_sha256,
    eos_ids,
    load_target,
    load_tokenizer,
    read_config,
    resolve_dtype,
    resolve_target,
    weights_fingerprint,
)


def test_local_folder(tiny_chat):
    ref = resolve_target(tiny_chat + "/")
    assert ref.name == "tiny-chat"
    assert ref.is_local
    assert ref.revision == f"local-{weights_fingerprint(Path(tiny_chat))}"
    target = load_target(ref, "float32", "cpu")
    assert len(target.layers) == 6
    assert target.dtype == torch.float32
    assert not target.model.training
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert load_target(ref, device="cpu").dtype == torch.bfloat16, "auto is the config's own"


@pytest.mark.parametrize(
    "name", ["Qwen3-8B", "nobody/nothing", "./nowhere", "/no/such/folder", "a/b/c", " ", "~nobody"]
)
def test_unknown_target_is_one_quick_line(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begun = time.monotonic()
    with pytest.raises(TargetError) as caught:
        resolve_target(name)
    assert time.monotonic() - begun < 5
    assert repr(name) in str(caught.value)
    assert "give" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_bare_qwen_names_are_looked_for_at_qwen(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TargetError, match="'Qwen/Qwen3-8B'"):
        resolve_target("Qwen3-8B")
    with pytest.raises(TargetError, match="does not give 'gpt2'"):
        resolve_target("gpt2")


def test_hub_model_from_the_local_hub_cache(tmp_path, monkeypatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--Qwen--Qwen3-Tiny"
    random_target(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    ref = resolve_target("Qwen3-Tiny")
    assert (ref.name, ref.revision, ref.source) == ("Qwen/Qwen3-Tiny", commit, "Qwen/Qwen3-Tiny")
    assert not ref.is_local
    assert len(load_target(ref, device="cpu").layers) == 4


def test_fingerprint_follows_the_weights(tmp_path):
    folder = Path(random_target(tmp_path / "a"))
    before = weights_fingerprint(folder)
    shutil.copytree(folder, tmp_path / "b")
    assert weights_fingerprint(tmp_path / "b") == before
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][-1] += 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert weights_fingerprint(folder) != before


def test_fingerprint_of_large_files_samples_them(tmp_path):
    data = bytearray(6 << 20)
    (tmp_path / "model.safetensors").write_bytes(data)
    before = weights_fingerprint(tmp_path)
    data[-1] = 1
    (tmp_path / "model.safetensors").write_bytes(data)
    assert weights_fingerprint(tmp_path) != before


def test_missing_and_misshapen_weights_are_refused(tmp_path):
    folder = Path(random_target(tmp_path / "m"))
    weights = load_file(folder / "model.safetensors")
    lost = {name: tensor for name, tensor in weights.items() if "layers.2.mlp.up_proj" not in name}
    save_file(lost, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(TargetError, match=r"1 weights are missing.*layers\.2\.mlp\.up_proj"):
        load_target(resolve_target(str(folder)), device="cpu")
    weights["model.layers.2.mlp.up_proj.weight"] = torch.zeros(3, 3)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(TargetError, match=r"layers\.2\.mlp\.up_proj|cannot load its weights"):
        load_target(resolve_target(str(folder)), device="cpu")


@pytest.mark.parametrize(
    ("file", "content", "reader", "what"),
    [
        ("config.json", "{", read_config, "config"),
        ("config.json", '{"model_type": "no-such-model"}', read_config, "config"),
        ("generation_config.json", "[]", lambda ref: eos_ids(ref, None), r"generation_config\.json"),
        ("tokenizer.json", "not a tokenizer", load_tokenizer, "tokenizer"),
        ("model.safetensors", "torn", lambda ref: load_target(ref, device="cpu"), "weights"),
    ],
)
def test_broken_files_are_named(tmp_path, file, content, reader, what):
    folder = Path(random_target(tmp_path / "broken"))
    (folder / file).write_text(content)
    with pytest.raises(TargetError, match=f"target 'broken': cannot load its {what}") as caught:
        reader(resolve_target(str(folder)))
    assert "\n" not in str(caught.value)


def test_a_model_of_another_kind(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(TargetError, match="no vocab_size: give a causal language model"):
        read_config(resolve_target(str(tmp_path)))


def test_no_weights_no_template_no_config(tmp_path):
    copy_tokenizer(tmp_path / "empty")
    with pytest.raises(TargetError, match=r"no config\.json"):
        resolve_target(str(tmp_path / "empty"))
    shutil.copy(TINY_CHAT / "config.json", tmp_path / "empty")
    with pytest.raises(TargetError, match="cannot load its weights"):
        load_target(resolve_target(str(tmp_path / "empty")), device="cpu")
    (tmp_path / "empty" / "chat_template.jinja").unlink()
    with pytest.raises(TargetError, match="no chat template"):
        load_tokenizer(resolve_target(str(tmp_path / "empty")))


def test_eos_ids(tmp_path):
    copy_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    ref = resolve_target(str(tmp_path))
    tokenizer = load_tokenizer(resolve_target(str(TINY_CHAT)))
    assert eos_ids(ref, tokenizer) == (2,), "generation_config comes before config"
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    assert eos_ids(ref, tokenizer) == (2, 5, 7)
    (tmp_path / "generation_config.json").write_text("{}")
    assert eos_ids(ref, tokenizer) == (2, 9)
    (tmp_path / "config.json").write_text("{}")
    tokenizer.eos_token = None
    with pytest.raises(TargetError, match="no end-of-sequence token"):
        eos_ids(ref, tokenizer)
    (tmp_path / "config.json").write_text('{"eos_token_id": ["x"]}')
    with pytest.raises(TargetError, match=r"cannot load its config\.json"):
        eos_ids(ref, tokenizer)


def test_devices_and_dtypes(tiny_chat):
    assert resolve_device("cpu").type == "cpu"
    for device in ("meta", "cuda:99", "toaster"):
        with pytest.raises(OptionError, match=f"--device '{device}'"):
            resolve_device(device)
    config = read_config(resolve_target(tiny_chat))
    assert resolve_dtype("auto", config) == "bfloat16"
    assert resolve_dtype("float32", config) == "float32"
    with pytest.raises(OptionError, match="float8"):
        resolve_dtype("float8", config)


def test_config_sha256_is_the_files(tmp_path):
    folder = Path(random_target(tmp_path / "m"))
    before = config_sha256(resolve_target(str(folder)))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    assert config_sha256(resolve_target(str(folder))) != before
