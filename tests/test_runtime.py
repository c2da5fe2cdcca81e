"""The inventors' runtime loads what we write, answers as the target does, and accepts what our decoder accepts, block for block."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from trained import BLOCK, NEW_TOKENS, ROOT, TINY, answers, prompts, tiny_head, tiny_target, trained_draft

from draft.decode import decode_speculative
from draft.files import load_draft, save_draft

DRAFTS = [("dflash", None), ("dflash2", None), ("dflash2", 8)]
CASES = 6


def runtime_folder() -> Path:
    """Where the `dflash` package lies: `.runtime`, which `make setup` fills, or DFLASH_RUNTIME."""
    folder = Path(os.environ.get("DFLASH_RUNTIME") or ROOT / ".runtime")
    if not (folder / "dflash" / "model.py").is_file():
        pytest.fail(
            f"the inventors' runtime is not in {folder}: run `make setup` "
            "(pip install --no-deps --target .runtime dflash==0.1.0), or set DFLASH_RUNTIME"
        )
    return folder


@pytest.fixture(scope="module")
def exchange(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], dict[str, Any]]:
    """Our draft folders, and what the runtime made of them."""
    home = runtime_folder()
    folders = []
    for kind, window in DRAFTS:
        folders.append(tmp_path_factory.mktemp("drafts") / f"{kind}-{window}")
        save_draft(folders[-1], trained_draft(kind, window), "float32")
    request = {
        "target": str(TINY),
        "drafts": [str(folder) for folder in folders],
        "prompts": [ids for _, ids in prompts()[:CASES]],
        # The runtime shrinks a block that has less than a block's room left, so there is room beyond the answers.
        "max_new_tokens": NEW_TOKENS + BLOCK,
        "stop": [2],
    }
    process = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "runtime_driver.py")],
        input=json.dumps(request),
        env=os.environ | {"PYTHONPATH": str(home), "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path_factory.mktemp("elsewhere"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return folders, json.loads(process.stdout)


def produced_of(tokens: list[int], accepted: list[int]) -> list[int]:
    """Tokens that each block added to an answer: its accepted ones and the target's own next, unless the answer ended before."""
    left, produced = len(tokens) - 1, []
    for taken in accepted:
        produced.append(min(taken + 1, left))
        left -= produced[-1]
    assert left == 0
    return produced


def whole_blocks(produced: list[int]) -> int:
    """How many blocks came before the runtime began to shrink them, for want of room for a whole one."""
    anchors = [sum(produced[:index]) for index in range(len(produced))]
    return sum(1 for anchor in anchors if anchor + BLOCK <= NEW_TOKENS + BLOCK)


@pytest.mark.parametrize("index", range(len(DRAFTS)), ids=[f"{kind}-{window}" for kind, window in DRAFTS])
def test_the_runtime_loads_every_weight(exchange: tuple[list[Path], dict[str, Any]], index: int) -> None:
    folders, answer = exchange
    result = answer["results"][index]
    assert result["kind"] == {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}[DRAFTS[index][0]]
    assert result["loading"] == {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}
    assert result["inv_freq"] == load_draft(folders[index]).rotary.inv_freq_D.tolist()


@pytest.mark.parametrize("index", range(len(DRAFTS)), ids=[f"{kind}-{window}" for kind, window in DRAFTS])
def test_the_runtime_decodes_the_same_blocks(exchange: tuple[list[Path], dict[str, Any]], index: int) -> None:
    folders, answer = exchange
    draft, target = load_draft(folders[index]), tiny_target()
    seen: set[int] = set()
    for (_, ids), plain, theirs in zip(
        prompts()[:CASES], answers()[:CASES], answer["results"][index]["decoded"], strict=True
    ):
        ours = decode_speculative(draft, target, tiny_head(), ids, NEW_TOKENS + BLOCK, (2,))
        assert ours.tokens == theirs["tokens"]
        assert ours.tokens[: len(plain)] == plain
        whole = whole_blocks(theirs["produced"])
        assert produced_of(ours.tokens, ours.accepted)[:whole] == theirs["produced"][:whole]
        assert whole > 3
        seen.update(ours.accepted[:whole])
    assert len(seen) >= 4, f"accepted lengths {seen} vary too little to prove anything"
