"""Option files as people edit them: what is meant is read, and what cannot be meant is refused in a line."""

import pytest

from pipeline.arguments import read_setting, read_yaml
from pipeline.grid import read_sweep
from pipeline.train_command import train_options
from schemas.errors import OptionError
from schemas.options import TrainOptions
from schemas.yaml_text import dump_yaml, load_yaml


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optim:\n  lr: 0.1\n  clip: 1.0\n  lr: 0.2\n", "'lr' is given twice"),
        ("optim: {lr: 0.1}\nrun: {}\noptim: {clip: 2.0}\n", "'optim' is given twice"),
        ("data: {sources: {0: 1, '0': 2}}\n", "'0' is given twice"),
        ("optim:\n  lr: 2020-13-45\n", "month must be in 1..12"),
        ("2020-01-01: 3\n", "keys must be str"),
        ("optim: &x\n  lr: *x\n", "Circular reference"),
        ("run: {steps: !!int many}\n", "invalid literal"),
        (f"draft: {'[' * 3000}{']' * 3000}\n", "nested too deeply"),
        ("false\n", "holds a bool"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_a_line(tmp_path, text, message):
    path = tmp_path / "edited.yaml"
    path.write_text(text)
    with pytest.raises(OptionError, match=message) as caught:
        train_options(str(path), [], [])
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_may_write_numbers_with_an_exponent_and_keep_no_line_of_a_section(tmp_path):
    path = tmp_path / "edited.yaml"
    path.write_text(
        "\ufeffoptim: &it\n  lr: 1e-3\n  min_lr: .5E-1\n  betas: [9e-1, 0.95]\nrun:\n  # all are defaults\n"
    )
    assert train_options(str(path), [], []) == TrainOptions.model_validate(
        {"optim": {"lr": 1e-3, "min_lr": 0.05, "betas": (0.9, 0.95)}}
    )
    assert train_options(str(path), [(["run", "steps"], 3)], []).run.steps == 3
    path.write_text("")
    assert read_yaml(str(path)) == {}
    path.write_text('optim: {lr: "1e-3"}\n')
    with pytest.raises(OptionError, match=r"optim.lr: Input should be a valid number \(got '1e-3'\)"):
        train_options(str(path), [], [])


def test_settings_and_sweeps_are_read_as_files_are():
    for text in ("optim.lr=2020-13-45", "optim.lr=&a [*a]", "data.sources={a: 1, a: 2}"):
        with pytest.raises(OptionError, match="is no YAML value"):
            read_setting(text)
        with pytest.raises(OptionError, match="is no list of YAML values"):
            read_sweep(text)
    assert read_setting("optim.betas=[9e-1, 0.95]") == (["optim", "betas"], [0.9, 0.95])


def test_what_is_written_is_read_back():
    held = {
        "name": "1e5",
        "sources": {"12e3": 2.0, "7": 0.5},
        "lr": 1e-05,
        "steps": 8,
        "text": "2020-01-01",
        "no": None,
    }
    assert load_yaml(dump_yaml(held)) == held
    assert list(load_yaml(dump_yaml(held))) == list(held)
