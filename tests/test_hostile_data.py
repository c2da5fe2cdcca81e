"""Broken data files: each gets its one-line error, with file and line where a line is to blame, and nothing is written.

tests/hostile/data/NAME.jsonl are the files; expected.json holds how each one's message goes on after the file's name, or,
of files that only look broken, how many rows are kept and under which reasons the others are counted.
"""

import json
from pathlib import Path

import pytest
from capture_fixtures import TINY_CHAT, Recorder, capture_options

from capture import regenerate as regenerate_module
from capture import run as run_module
from capture.regenerate import regenerate
from capture.run import capture, dry_run
from schemas.errors import UserError
from schemas.options import RegenerateOptions
from target.load import resolve_target
from target.tokens import tokenizer_sha256

FOLDER = Path(__file__).parent / "hostile" / "data"
EXPECTED = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))
REFUSED = [name for name, wanted in EXPECTED.items() if "error" in wanted]
KEPT = [name for name, wanted in EXPECTED.items() if "kept" in wanted]


def test_every_file_has_its_error_or_result():
    assert sorted(path.stem for path in FOLDER.glob("*.jsonl")) == sorted(EXPECTED)


@pytest.mark.parametrize("name", REFUSED)
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


@pytest.mark.parametrize("name", KEPT)
def test_rows_are_kept_or_counted_under_a_reason(name, tmp_path):
    data, wanted = FOLDER / f"{name}.jsonl", EXPECTED[name]
    options = capture_options(
        str(TINY_CHAT), str(data), tmp_path / "out", layers=(1,), skip_bad_rows=wanted.get("skip_bad_rows", False)
    )
    say = Recorder()
    (source,) = dry_run(options, say).manifest.sources
    assert (source.kept, source.skipped) == (wanted["kept"], wanted["skipped"])
    assert source.rows == source.kept + sum(source.skipped.values())
    for reason, why in wanted.get("first", {}).items():
        assert any(note.startswith(f"first {reason}: {data}{why}") for note in say.notes), say.notes


def test_a_row_of_a_million_tokens_is_cut(tmp_path):
    row = {"messages": [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "7 " * 500_000}]}
    data = tmp_path / "long.jsonl"
    data.write_text(json.dumps(row) + "\n", encoding="utf-8")
    plan = dry_run(capture_options(str(TINY_CHAT), str(data), tmp_path / "out", layers=(1,)), Recorder())
    assert (plan.manifest.totals.tokens, plan.truncated) == (256, 1)


def test_broken_containers(tmp_path):
    (tmp_path / "empty").mkdir()
    files = {
        "torn.json": (b'[{"messages": []},\n{"mess', ":2: not valid JSON"),
        "latin.json": (b'[\n{"text": "caf\xe9"}]', ":2: not UTF-8"),
        "marked.json": (b'\xef\xbb\xbf[{"text": "tea"}]', ":1: begins with a byte order mark"),
        "deep.json": (b"[" * 100_000, ":1: not valid JSON (nested too deeply)"),
        "numbers.json": (b"[1, 2]", ":1: a row must be a JSON object, not int"),
        "half.json": (b'[{"text": "\\ud83d and more"}]', ":1: '\\ud83d' is half of a surrogate pair"),
        "nothing.json": (b"[]", ":1: the file is empty"),
        "torn.parquet": (b"PAR1 and then nothing", ": no Parquet file that can be read"),
        "empty": (None, ": the folder holds no .jsonl"),
        "gone.jsonl": (None, ": no such file"),
    }
    for name, (data, error) in files.items():
        if data is not None:
            (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError) as caught:
            dry_run(capture_options(str(TINY_CHAT), str(tmp_path / name), tmp_path / "out", layers=(1,)), Recorder())
        assert str(caught.value).startswith(f"{tmp_path / name}{error}"), str(caught.value)
        assert "\n" not in str(caught.value)
