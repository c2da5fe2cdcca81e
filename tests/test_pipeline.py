"""The whole way, by the commands that users type: answer, capture, train, evaluate both ways, compare."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

DFLASH = str(Path(sys.executable).with_name("dflash"))
SMALL = ["--set", "draft.num_layers=1", "--set", "draft.block_size=4", "--set", "draft.intermediate_size=64",
         "--set", "data.batch_tokens=512", "--set", "data.anchors=16", "--set", "optim.name=muon", "--set", "optim.lr=3e-3",
         "--set", "draft.selector_rank=16"]  # fmt: skip


def dflash(*words: str, cwd: Path, code: int = 0) -> str:
    done = subprocess.run([DFLASH, *words], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_chat) -> Path:
    """A folder with answers of the tiny target to some prompts, and the cache of their hidden states in float32."""
    folder = tmp_path_factory.mktemp("pipeline")
    prompts = Path(tiny_chat).parent / "prompts.jsonl"
    (folder / "prompts.jsonl").write_text("".join(prompts.read_text().splitlines(keepends=True)[:120]))
    dflash(
        "regenerate",
        "--target",
        tiny_chat,
        "--dtype",
        "float32",
        "--prompts",
        "prompts.jsonl",
        "--out",
        "answers.jsonl",
        "--max-new-tokens",
        "24",
        cwd=folder,
    )
    capture = ["capture", "--target", tiny_chat, "--dtype", "float32", "--codec", "f32", "--layers", "1,2,4", "--data", "answers.jsonl",
               "--val-fraction", "0.1", "--max-length", "256", "--shard-tokens", "1024"]  # fmt: skip
    dry = dflash(*capture, "--dry-run", cwd=folder)
    assert "free disk" in dry
    assert not (folder / "hs.zarr").exists()
    dflash(*capture, cwd=folder)
    assert "nothing to do" in dflash(*capture, cwd=folder)
    return folder


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_from_answers_to_the_table(folder, kind, tiny_chat):
    run = f"runs/{kind}"
    dflash("train", "--cache", "hs.zarr", "--draft", kind, "--out", run, "--steps", "40", *SMALL, cwd=folder)
    dflash("evaluate", "--draft", run, "--cache", "hs.zarr", "--lengths", "--json", f"{kind}-cache.json", cwd=folder)
    dflash("evaluate", "--draft", run, "--cache", "hs.zarr", "--target", tiny_chat, "--dtype", "float32", "--max-new-tokens", "24",
           "--lengths", "--json", f"{kind}-decoded.json", cwd=folder)  # fmt: skip
    cached, decoded = (json.loads((folder / f"{kind}-{way}.json").read_text()) for way in ("cache", "decoded"))

    # On greedy answers in float32 the walk is decoding, block for block, and decoding loses nothing.
    assert cached["accepted_per_block"] == decoded["accepted_per_block"]
    assert cached["walk"] == decoded["decoded"]
    assert decoded["lossless"]["equal"] == decoded["lossless"]["prompts"] == len(decoded["accepted_per_block"]) > 5
    assert len({length for lengths in decoded["accepted_per_block"].values() for length in lengths}) > 1, (
        "a draft that accepts nothing proves nothing"
    )
    assert ("backbone" in cached) == ("candidate_recall" in cached) == (kind == "dflash2")
    assert len(cached["accuracy_per_slot"]) == 3
    for name in ("walk", "uniform"):
        figure = cached[name]
        assert figure["acceptance"] == pytest.approx(figure["accepted"] / figure["blocks"] + 1)

    table = dflash("compare", run, cwd=folder).splitlines()
    assert table[0].startswith("draft")
    assert f"{cached['walk']['acceptance']:.3f}" in table[2]
    assert {path.name for path in (folder / run).iterdir()} >= {
        "config.yaml",
        "provenance.json",
        "metrics.jsonl",
        "checkpoints",
        "draft",
        "evaluation",
    }


def test_decoding_prompts_of_a_file(folder, tiny_chat):
    dflash(
        "train", "--cache", "hs.zarr", "--draft", "dflash", "--out", "runs/short", "--steps", "5", *SMALL, cwd=folder
    )
    dflash("evaluate", "--draft", "runs/short", "--target", tiny_chat, "--dtype", "float32", "--prompts", "prompts.jsonl", "--limit", "3",
           "--max-new-tokens", "8", "--json", "file.json", cwd=folder)  # fmt: skip
    figures = json.loads((folder / "file.json").read_text())
    assert figures["lossless"] == {"equal": 3, "prompts": 3}
    assert figures["prompts"] == "prompts.jsonl"
    coarse = dflash("evaluate", "--draft", "runs/short", "--target", tiny_chat, "--dtype", "bfloat16", "--cache", "hs.zarr",
                    "--max-new-tokens", "48", "--limit", "9", cwd=folder)  # fmt: skip
    assert "hs.zarr was captured in float32, the target decodes in bfloat16" in coarse
    equal, prompts = map(int, re.search(r"lossless +(\d+) of (\d+) prompts", coarse).groups())
    assert (equal < prompts) == ("in bfloat16 a block of tokens rounds otherwise than one token" in coarse)
    idle = dflash(
        "evaluate", "--draft", "runs/short", "--cache", "hs.zarr", "--limit", "2", "--no-through-codec", cwd=folder
    )
    assert "through_codec=False has no effect without --target" in idle
    # A few prompts or samples are no measurement of the run.
    assert not (folder / "runs/short/evaluation").exists()


def test_training_opens_no_target_and_writes_nothing_into_the_cache(folder, tmp_path):
    shutil.copytree(folder / "hs.zarr", tmp_path / "hs.zarr")
    before = {path: path.read_bytes() for path in (tmp_path / "hs.zarr").rglob("*") if path.is_file()}
    os.chmod(tmp_path / "hs.zarr", 0o555)
    dflash("train", "--cache", "hs.zarr", "--draft", "dflash", "--out", "run", "--steps", "2", *SMALL, cwd=tmp_path)
    os.chmod(tmp_path / "hs.zarr", 0o755)
    assert before == {path: path.read_bytes() for path in (tmp_path / "hs.zarr").rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def qwen3_8b(tmp_path_factory, tiny_chat) -> Path:
    """A folder in which `Qwen3-8B` is a random model of Qwen3-8B's depth, narrow."""
    folder = tmp_path_factory.mktemp("literal")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=2048, hidden_size=32, intermediate_size=48, num_hidden_layers=36, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, max_position_embeddings=4096, tie_word_embeddings=False, eos_token_id=2, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "Qwen3-8B")
    AutoTokenizer.from_pretrained(tiny_chat).save_pretrained(folder / "Qwen3-8B")
    return folder


def test_the_two_commands_users_type_first(qwen3_8b):
    out = dflash("capture", "--target", "Qwen3-8B", "--layers", "1,9,17,25", cwd=qwen3_8b)
    assert "conversations shipped with the project" in out
    assert "layers 1, 9, 17, 25" in out

    # The defaults train for 6 epochs; a few steps show that it works, then a polite stop must save them.
    process = subprocess.Popen(
        [DFLASH, "train", "--cache", "./hs.zarr", "--draft", "dflash2"],
        cwd=qwen3_8b,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    run = qwen3_8b / "runs" / "hs-dflash2"
    deadline = time.monotonic() + 120
    while not (run / "config.yaml").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.2)
    time.sleep(5)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    assert "--resume" in err.strip().splitlines()[-1]
    assert list((run / "checkpoints").glob("step-*"))
