"""`--overwrite` on a terminal asks for the word; elsewhere it does what it says."""

import io
import os
import pty
import sys
from pathlib import Path

import pytest
from capture_fixtures import Recorder, capture_options, random_target, shipped_rows, write_jsonl

from cache.read import open_cache
from capture.run import capture
from pipeline.cli import main
from schemas.errors import OptionError
from schemas.manifest import Manifest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("confirm")
    random_target(folder / "tiny")
    write_jsonl(folder / "rows.jsonl", shipped_rows(6))
    capture(
        capture_options(str(folder / "tiny"), str(folder / "rows.jsonl"), folder / "hs.zarr", layers=(0, 2)), Recorder()
    )
    return folder


def command(folder: Path, layers: str) -> list[str]:
    words = "--codec f32 --dtype float32 --top-k 8 --max-length 256 --shard-tokens 1024 --batch-tokens 512 --val-fraction 0.2"
    return ["capture", "--target", str(folder / "tiny"), "--data", str(folder / "rows.jsonl"), "--out", str(folder / "hs.zarr"),
            "--layers", layers, "--overwrite", *words.split()]  # fmt: skip


def run(words: list[str]) -> int:
    try:
        main(words)
    except SystemExit as done:
        return int(done.code or 0)
    return 1


def on_a_terminal(words: list[str], answer: bytes) -> tuple[int, str]:
    """Run in a child whose streams are a pseudo-terminal; the answer is given when it is asked for."""
    child, terminal = pty.fork()
    if not child:
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))
        os._exit(run(words))
    shown, answered = b"", False
    while True:
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # the child has gone
            break
        shown += piece
        if not answered and b"to replace it: " in shown:
            answered = True
            os.write(terminal, answer)
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), " ".join(shown.decode().split())


@pytest.mark.parametrize("answer", [b"yes\n", b"\x04", b"Overwrite\n"])
def test_anything_but_the_word_keeps_the_cache(folder, answer):
    before = {path: path.stat().st_mtime_ns for path in (folder / "hs.zarr").rglob("*")}
    code, shown = on_a_terminal(command(folder, "1"), answer)
    assert code == 2
    assert "hs.zarr holds a finished cache of tiny, layers 0, 2: 6 samples, " in shown
    assert "type overwrite to replace it" in shown
    assert "is kept as it is: give another --out, or confirm --overwrite" in shown
    assert {path: path.stat().st_mtime_ns for path in (folder / "hs.zarr").rglob("*")} == before


def test_what_is_asked_about_is_what_would_be_lost(folder):
    options = capture_options(
        str(folder / "tiny"), str(folder / "rows.jsonl"), folder / "hs.zarr", layers=(3,), overwrite=True
    )
    asked: list[Manifest] = []

    def refuse(lost: Manifest) -> bool:
        asked.append(lost)
        return False

    with pytest.raises(OptionError, match="is kept as it is"):
        capture(options, Recorder(), confirm=refuse)
    assert asked == [open_cache(str(folder / "hs.zarr")).manifest]
    # The same cache is no loss: nothing is asked.
    same = options.model_copy(update={"layers": asked[0].identity.layers})
    capture(same, Recorder(), confirm=lambda _: pytest.fail("nothing is lost"))


def test_the_word_replaces_it_and_without_a_terminal_none_is_needed(folder, monkeypatch, capsys):
    code, shown = on_a_terminal(command(folder, "1"), b"overwrite\n")
    assert code == 0, shown
    assert open_cache(str(folder / "hs.zarr")).manifest.identity.layers == (1,)
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdin", io.StringIO())
        assert run(command(folder, "0,2")) == 0
    assert "type overwrite" not in capsys.readouterr().err
    assert open_cache(str(folder / "hs.zarr")).manifest.identity.layers == (0, 2)
