"""--print-config: every option, explained once, and YAML that gives the same options back."""

import pytest
import yaml

from pipeline.cli import main
from pipeline.print_config import allowed_values, config_text, help_of
from schemas.errors import OptionError
from schemas.options import RunOptions, TrainOptions
from schemas.strict import parse
from train.objective import resolve_gamma
from train.optim import highest_rate
from train.resolve import KINDS_OF


def printed(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["train", "--print-config", *words])
    out, err = capsys.readouterr()
    assert caught.value.code == 0, err
    return out


def test_it_works_without_a_cache_and_reads_back(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys=capsys)
    assert parse(TrainOptions, yaml.safe_load(out), "x", OptionError) == TrainOptions()
    assert max(map(len, out.splitlines())) < 130


def test_every_option_has_a_description_and_stands_there_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys=capsys)
    words = " ".join(out.replace("#", "").split())
    for _, group in TrainOptions():
        for name, info in type(group).model_fields.items():
            assert info.description and f"\n  {name}: " in out, name
            assert " ".join(info.description.split()) in words, name
    assert words.count("; default ") == sum(len(type(group).model_fields) for _, group in TrainOptions())


def test_it_shows_what_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed("--draft", "dflash2", "--set", "data.sources={a.jsonl: 2}", "--set", "optim.lr=1e-3", capsys=capsys)
    options = parse(TrainOptions, yaml.safe_load(out), "x", OptionError)
    assert (options.draft.kind, options.data.sources, options.optim.lr) == ("dflash2", {"a.jsonl": 2.0}, 0.001)
    assert "null: 1e-2 with muon, the published 6e-4 with adamw <number, above 0, or null; default null>" in " ".join(
        out.replace("#", "").split()
    )


@pytest.mark.parametrize(
    ("group", "name", "words"),
    [
        ("draft", "kind", "one of dflash, dflash2, domino, jetspec"),
        ("draft", "head_dim", "integer, at least 2, or null"),
        ("loss", "gamma", "number, above 0, or auto, or null"),
        ("optim", "betas", "a list of 2, each number, at least 0, below 1"),
        ("run", "layers", "a list, each integer, or null"),
        ("run", "compile", "true or false"),
        ("data", "sources", "a mapping of text to number, above 0, or null"),
        ("log", "to", "a list, each one of tensorboard, wandb"),
    ],
)
def test_allowed_values_are_the_schemas(group: str, name: str, words: str) -> None:
    assert allowed_values(type(getattr(TrainOptions(), group)).model_fields[name]) == words


def test_the_defaults_are_the_published_hyper_parameters() -> None:
    options = TrainOptions()
    assert (options.draft.block_size, options.draft.num_layers, options.data.anchors) == (16, 5, 512)
    assert (options.optim.betas, options.optim.warmup, options.optim.clip) == ((0.9, 0.95), 0.04, 1.0)
    assert highest_rate(options.optim.model_copy(update={"name": "adamw"})) == 6e-4
    assert resolve_gamma(options.loss, 16) == 7 and resolve_gamma(options.loss, 8) == 4


def test_help_of_flags_is_the_fields_own() -> None:
    assert help_of(RunOptions, "steps") == "Optimizer steps."
    assert "condition on" in help_of(RunOptions, "layers")


def test_options_of_some_kinds_say_so() -> None:
    for key, kinds in KINDS_OF.items():
        group, name = key.split(".")
        description = type(getattr(TrainOptions(), group)).model_fields[name].description
        assert description is not None and description.startswith(f"{kinds[0]}: "), key


def test_a_text_of_other_options_differs() -> None:
    assert config_text(TrainOptions()) != config_text(TrainOptions(run=RunOptions(keep=3)))
