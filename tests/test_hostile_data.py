"""Broken data files: each gets its one-line error, with file and line where a line is to blame, and nothing is written.

tests/hostile/data/NAME.jsonl are the files; expected.json holds how each one's message goes on after the file's name.
"""

import json
from pathlib import Path

import pytest
from capture_fixtures import TINY_CHAT, Recorder, capture_options

from capture import regenerate as regenerate_module
from capture import run as run_module
from capture.regenerate import regenerate
from capture.run import capture
from schemas.errors import UserError
from schemas.options import RegenerateOptions
from target.load import resolve_target
from target.tokens import tokenizer_sha256

FOLDER = Path(__file__).parent / "hostile" / "data"
EXPECTED = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))


def test_every_file_has_its_error():
    assert sorted(path.stem for path in FOLDER.glob("*.jsonl")) == sorted(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_broken_file(name, tmp_path, monkeypatch):
    for module in (run_module, regenerate_module):
        monkeypatch.setattr(module, "load_target", lambda *_: pytest.fail("refused before the weights are loaded"))
    data = tmp_path / f"{name}.jsonl"
    own = tokenizer_sha256(resolve_target(str(TINY_CHAT))).encode()
    data.write_bytes((FOLDER / data.name).read_bytes().replace(b"TOKENIZER", own))
    out = tmp_path / "out"
    if EXPECTED[name]["kind"] == "prompts":
        options = RegenerateOptions(target=str(TINY_CHAT), prompts=str(data), out=str(out))
        with pytest.raises(UserError) as caught:
            regenerate(options, Recorder())
    else:
        with pytest.raises(UserError) as caught:
            capture(capture_options(str(TINY_CHAT), str(data), out, layers=(1,)), Recorder())
    message, error = str(caught.value), EXPECTED[name]["error"]
    assert message.startswith(f"{data}{error}") if error.startswith(":") else error in message
    assert caught.value.exit_code == 2
    assert "\n" not in message
    assert len(message) < 500
    assert sorted(path.name for path in tmp_path.iterdir()) == [data.name], "nothing is written"
