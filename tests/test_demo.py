"""`make demo` as a newcomer runs it: the table, what it must reach, and what a second run does."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def make(*words: str, cwd: Path) -> str:
    venv = ROOT / ".venv"
    # The packages count as made, so that nothing is ever installed from a copy.
    command = ["make", f"VENV={venv}", f"--old-file={venv}/installed", *words]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """The demo's inputs in a folder of their own; the packages are those of this checkout."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy2(ROOT / name, folder / name)
    shutil.copytree(ROOT / "demo", folder / "demo", copy_function=shutil.copy2)
    return folder


@pytest.mark.slow
def test_the_demo_reaches_its_table(clone):
    table = make("demo", cwd=clone)
    rows = {line.split()[0]: line for line in table.splitlines()[-2:]}
    assert list(rows) == ["dflash", "dflash2"]
    for row in rows.values():
        uniform, walk, decoded = re.findall(r" (\d\.\d{3})", row)
        assert walk == decoded, "the walk over the cache is decoding"
        assert uniform > walk, "uniform flatters"
        assert row.rstrip().endswith("48/48 prompts")
    assert float(re.findall(r" (\d\.\d{3})", rows["dflash2"])[2]) >= 1.8

    assert "dflash " not in make("demo", "--dry-run", cwd=clone)
    (clone / "demo" / "prompts.jsonl").touch()
    redone = make("demo", "--dry-run", cwd=clone)
    for stage in ("regenerate", "capture", "train", "evaluate", "compare"):
        assert f"dflash {stage}" in redone
    (clone / "work" / "demo" / "answers.jsonl").touch()
    redone = make(
        "demo", "--dry-run", f"--old-file={clone}/demo/prompts.jsonl", "--old-file=demo/prompts.jsonl", cwd=clone
    )
    assert "dflash capture" in redone
    assert "dflash regenerate" not in redone


def test_help_lists_every_target():
    listed = set(re.findall(r"make ([a-z0-9-]+)", make("help", cwd=ROOT)))
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE).group(1).split()
    assert listed == set(phony)


def test_the_two_drafts_of_the_demo_see_the_same_held_out_prompts():
    """48 of the prompts fall below the demo's fraction, by the rule of the index: the first 8 bytes of the prompt's sha256."""
    import hashlib
    import json

    fraction = float(re.search(r"^VAL_FRACTION := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE).group(1))
    prompts = [json.loads(line)["turns"][0] for line in (ROOT / "demo" / "prompts.jsonl").open()]
    held_out = [p for p in prompts if int.from_bytes(hashlib.sha256(p.encode()).digest()[:8], "big") / 2**64 < fraction]
    assert len(held_out) == 48
