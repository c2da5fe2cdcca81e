"""The face: help, options, and one `error:` line with the right exit code for each mistake."""

import json
import signal
import subprocess
import sys
import time
import weakref

import pytest
from cache_fixtures import make_cache

from pipeline.arguments import layer_list, merge, read_setting
from pipeline.cli import main, with_resume_value
from pipeline.compare import compare_text
from pipeline.signals import none_lost, stop
from pipeline.train_command import flags_of, train_options
from schemas.errors import Interrupted, OptionError


def run(*words: str, code: int, capsys) -> tuple[str, str]:
    with pytest.raises(SystemExit) as caught:
        main(words)
    out, err = capsys.readouterr()
    assert caught.value.code == code, err
    return out, err


def error_line(*words: str, capsys, code: int = 2) -> str:
    _, err = run(*words, code=code, capsys=capsys)
    lines = err.strip().splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:], err
    assert "Traceback" not in err
    return lines[-1]


def test_importing_the_cli_does_not_import_torch():
    script = "import sys, pipeline.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize(
    "command", ["capture", "merge", "regenerate", "train", "evaluate", "inspect", "verify", "compare"]
)
def test_every_command_has_help(command, capsys):
    out, _ = run(command, "--help", code=0, capsys=capsys)
    assert "Usage: dflash" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["capture"], "--target"),
        (["capture", "--target", "x", "--layerz", "1"], "--layerz"),
        (["capture", "--target", "x", "--top-k", "many"], "--top-k"),
        (["capture", "--target", "x", "--layers", "1,two"], "'two' is no layer number"),
        (["capture", "--target", "x", "--codec", "float16"], "--codec: "),
        (["capture", "--target", "x", "--top-k", "0"], "--top-k: "),
        (["capture", "--target", "x", "--val-fraction", "1"], "--val-fraction: "),
        (
            ["regenerate", "--target", "x", "--prompts", "p", "--out", "o", "--max-new-tokens", "0"],
            "--max-new-tokens: ",
        ),
        (["capture", "--target", "x", "--append", "--overwrite"], "error: --append keeps"),
        (["capture", "--target", "x", "--tp", "2", "--nproc", "3", "--dry-run"], "--nproc 3 is no multiple of --tp 2"),
        (["capture", "--target", "no/such/model/at/all"], "no/such/model/at/all"),
        (["train"], "--cache"),
        (["train", "--cache", "nowhere.zarr"], "nowhere.zarr is no hidden-state cache"),
        (["train", "--cache", "x", "--set", "optim.lr"], "section.key=value"),
        (["train", "--cache", "x", "--set", "optim.speed=3"], "optim.speed: unknown key"),
        (["train", "--cache", "x", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["train", "--cache", "x", "--draft", "eagle"], "--draft: Input should be 'dflash'"),
        (["evaluate", "--draft", "x"], "evaluate needs --cache"),
        (["evaluate", "--draft", "nowhere", "--cache", "y"], "nowhere"),
        (["evaluate", "--draft", "x", "--target", "t"], "--prompts or --cache"),
        (["inspect", "nowhere.zarr"], "nowhere.zarr"),
        (["compare", "nowhere"], "nowhere"),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(words, message, capsys):
    assert message in error_line(*words, capsys=capsys)


def test_a_dry_run_is_one_process_and_speaks_once(capsys, monkeypatch):
    planned = []
    monkeypatch.setattr("pipeline.capture_commands.launch", lambda *_: pytest.fail("processes for a plan"))
    monkeypatch.setattr("capture.run.dry_run", lambda options, _: planned.append(options.tp))
    run("capture", "--target", "x", "--tp", "2", "--dry-run", code=0, capsys=capsys)
    assert planned == [2]
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    run("capture", "--target", "x", "--tp", "2", "--dry-run", code=0, capsys=capsys)
    assert planned == [2]


def test_debug_shows_the_traceback(capsys):
    _, err = run("inspect", "nowhere.zarr", "--debug", code=2, capsys=capsys)
    assert "Traceback" in err
    assert err.strip().splitlines()[-1].startswith("error: ")


def test_a_fault_of_the_disk_is_one_line(capsys, monkeypatch):
    fault = PermissionError(13, "Permission denied", "hs.zarr/zarr.json")
    monkeypatch.setattr("cache.store.Path.read_bytes", lambda _: (_ for _ in ()).throw(fault))
    assert "hs.zarr/zarr.json: Permission denied" in error_line("inspect", "hs.zarr", code=1, capsys=capsys)


def test_layers_are_numbers():
    assert layer_list("1, 9,17") == (1, 9, 17)
    assert layer_list(None) is None
    for text in ("", "1,,2", "-1", "1.5", "²"):
        with pytest.raises(OptionError):
            layer_list(text)


def test_settings_are_yaml_values():
    assert read_setting("optim.lr=1e-3") == (["optim", "lr"], 0.001)
    assert read_setting("loss.gamma=null") == (["loss", "gamma"], None)
    assert read_setting("optim.betas=[0.9, 0.99]") == (["optim", "betas"], [0.9, 0.99])
    assert read_setting("draft.kind=dflash2") == (["draft", "kind"], "dflash2")
    assert merge({"optim": {"lr": 1, "clip": 2}}, [(["optim", "lr"], 3)]) == {"optim": {"lr": 3, "clip": 2}}


def test_options_of_a_run_in_order_of_precedence(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("draft: {kind: dflash, num_layers: 3}\nrun: {epochs: 4, log_every: 7}\noptim: {lr: 0.002}\n")
    settings = [read_setting(text) for text in ("optim.lr=1e-3", "run.log_every=9", "draft.kind=dflash")]
    options = train_options(str(path), settings, flags_of("dflash2", (1, 3), 50, None, None))
    assert (options.draft.kind, options.draft.num_layers) == ("dflash2", 3)
    assert (options.optim.lr, options.run.log_every) == (0.001, 9)
    assert (options.run.steps, options.run.epochs, options.run.layers) == (50, None, (1, 3))


def test_a_wrong_value_is_blamed_on_where_it_was_given(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("run: {epochs: 4}\noptim: {lr: fast}\n")

    def blamed(*texts, flags=(), swept=(), config=str(path)):
        settings = [read_setting(text) for text in texts]
        with pytest.raises(OptionError) as caught:
            train_options(config, settings, flags, swept)
        return str(caught.value)

    assert blamed().startswith(f"{path}: optim.lr: Input should be a valid number (got 'fast')")
    assert blamed("optim.lr=1e-3", "run.precision=bf16").startswith("--set run.precision: Input should be 'auto'")
    assert blamed("optim.lr=1e-3", "optim.betas=[1, x]").startswith("--set optim.betas: Input should be less than 1")
    assert blamed("nope.x=1", config=None) == "nope: unknown key; remove it or correct its name"
    assert blamed(flags=flags_of("foo", None, None, None, None), config=None).startswith("--draft: Input should be")
    assert blamed(flags=flags_of(None, None, 0, None, None), config=None).startswith("--steps: Input should be")
    assert blamed(swept=[(["optim", "lr"], "x")]).startswith("--sweep optim.lr: Input should be a valid number")
    both = blamed("optim.lr=1e-3", "run.steps=3")
    assert both == "run: steps and epochs are two ways to say how long: give one"


def test_resume_may_stand_without_a_value():
    assert with_resume_value(["train", "--resume", "--cache", "x"]) == ["train", "--resume", "newest", "--cache", "x"]
    assert with_resume_value(["train", "--resume"]) == ["train", "--resume", "newest"]
    assert with_resume_value(["train", "--resume", "step-000005"]) == ["train", "--resume", "step-000005"]


def test_inspect_shows_manifest_sizes_and_writes_json(tmp_path, capsys, tiny_chat):
    writer = make_cache(tmp_path / "hs.zarr")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        with open(f"{tiny_chat}/{name}", "rb") as file:
            writer.put_file(f"target/{name}", file.read())
    out, _ = run("inspect", str(tmp_path / "hs.zarr"), "--json", str(tmp_path / "m.json"), code=0, capsys=capsys)
    assert "12, of which 3 held out" in out
    assert "3 of 64 rows" in out
    assert "0, 2, 3 of 6" in out
    assert "⟦" in out
    assert json.loads((tmp_path / "m.json").read_text())["totals"]["samples"] == 12
    assert "is a folder" in error_line("inspect", str(tmp_path / "hs.zarr"), "--json", str(tmp_path), capsys=capsys)
    assert "holds samples 0 to 11" in error_line("inspect", str(tmp_path / "hs.zarr"), "--sample", "12", capsys=capsys)


@pytest.mark.parametrize("text", [None, "{"])
def test_inspect_refuses_a_cache_whose_tokenizer_is_damaged(text, tmp_path, capsys, tiny_chat):
    writer = make_cache(tmp_path / "hs.zarr")
    for name in ("tokenizer_config.json", "config.json"):
        with open(f"{tiny_chat}/{name}", "rb") as file:
            writer.put_file(f"target/{name}", file.read())
    if text is not None:
        writer.put_file("target/tokenizer.json", text.encode())
    line = error_line("inspect", str(tmp_path / "hs.zarr"), code=1, capsys=capsys)
    assert "target holds no tokenizer that can be read" in line


def test_compare_prints_the_table():
    record = {
        "run": "runs/a",
        "kind": "dflash",
        "params": 1234567,
        "uniform": 1.6834,
        "walk": 1.4,
        "decoded": None,
        "speedup": None,
        "lossless": None,
    }
    full = {**record, "kind": "dflash2", "decoded": 1.8, "speedup": 1.25, "lossless": {"equal": 47, "prompts": 48}}
    lines = compare_text([record, full]).splitlines()
    assert lines[0].split("   ")[0] == "draft"
    assert "acceptance, from the cache" in lines[0]
    assert lines[2].split() == ["dflash", "1,234,567", "1.683", "1.400", "-", "-", "-"]
    assert lines[3].split() == ["dflash2", "1,234,567", "1.683", "1.400", "1.800", "1.25x", "47/48", "prompts"]
    assert lines[1].index("uniform") == lines[2].index("1.683")
    assert lines[1].index("walk") == lines[2].index("1.400")
    assert lines[0].index("decoded") == lines[3].index("1.800")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_capture_that_is_stopped_says_how_to_go_on(tmp_path, tiny_chat, number, code):
    # A test that runs in the background of a shell ignores Ctrl-C, and so would what it starts.
    code_of_main = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from pipeline.cli import main; main()"
    )
    command = [sys.executable, "-c", code_of_main, "capture", "--target", tiny_chat, "--layers", "1,2",
               "--shard-tokens", "2048", "--max-length", "512", "--out", str(tmp_path / "hs.zarr")]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "hs.zarr" / "shards").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert err.strip().splitlines()[-1].startswith("error: ")
    assert "the same command goes on" in err
    assert not list((tmp_path / "hs.zarr").glob(".tmp-*/*")), "no unfinished object is left"


@pytest.mark.parametrize(
    ("number", "handler", "kind"),
    [(signal.SIGTERM, stop, Interrupted), (signal.SIGINT, signal.default_int_handler, KeyboardInterrupt)],
)
def test_a_signal_that_comes_while_something_is_freed_is_not_lost(number, handler, kind, capsys):
    """What raises there is printed and forgotten: the command went on."""

    class Freed:
        pass

    seen = []

    def work():
        freed = Freed()
        weakref.finalize(freed, lambda: (seen.append(1), signal.raise_signal(number)))
        del freed
        assert seen, "it was raised, and nothing happened yet"
        time.sleep(30)

    before = signal.signal(number, handler)
    try:
        with pytest.raises(kind), none_lost():
            work()
    finally:
        signal.signal(number, before)
    assert "Exception ignored" not in capsys.readouterr().err
