"""`dflash evaluate` around its figures: which are kept, what has no effect, and whose target a cache is of."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from reference import lively_draft, small_config
from train_fixtures import Heard, options, train_cache

from draft.files import save_draft
from pipeline.cli import main
from pipeline.evaluate import evaluate
from pipeline.results import CACHE, read_result
from schemas.errors import DflashError, DraftError, OptionError
from schemas.options import EvaluateOptions
from schemas.say import Silent
from train.run import train


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return train_cache(tmp_path_factory.mktemp("evaluate") / "hs.zarr")


@pytest.fixture(scope="module")
def trained(cache: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "trained"
    train(options(run={"steps": 2}), cache, str(run), False, Silent())
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> str:
    return shutil.copytree(trained, str(tmp_path / "run"))


def test_all_held_out_samples_are_kept_and_a_part_is_not(cache: str, run: str, tmp_path: Path) -> None:
    for part in ({"limit": 1}, {"split": "train"}):
        heard = Heard()
        evaluate(EvaluateOptions(draft=run, cache=cache, **part), str(tmp_path / "a/b.json"), heard)
        assert read_result(run, CACHE) is None and any("not kept for `dflash compare`" in note for note in heard.notes)
    figures = evaluate(EvaluateOptions(draft=run, cache=cache), None, Heard())
    kept = read_result(run, CACHE)
    assert kept is not None and kept["walk"] == figures["walk"] and kept["split"] == "val"
    written = json.loads((tmp_path / "a/b.json").read_text())
    assert written["split"] == "train" and written["uniform"]["blocks"] > figures["uniform"]["blocks"]


def test_figures_are_shown_before_a_disk_can_refuse_them(
    cache: str, run: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, _: object) -> None:
        raise DflashError(f"cannot write {path}: No space left on device")

    monkeypatch.setattr("pipeline.results.write_whole", full)
    with pytest.raises(SystemExit) as caught:
        main(["evaluate", "--draft", run, "--cache", cache])
    out, err = capsys.readouterr()
    assert caught.value.code == 1 and "walk" in out and "No space left" in err


@pytest.mark.parametrize("place", [".", "taken/figures.json"])
def test_a_place_for_figures_that_cannot_be_is_refused_before_any_work(
    cache: str, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setattr("pipeline.evaluate._from_cache", lambda *_: pytest.fail("hours of work"))
    with pytest.raises(OptionError, match=r"is a folder|taken is no folder"):
        evaluate(EvaluateOptions(draft=run, cache=cache), str(tmp_path / place), Silent())


def test_an_option_of_another_way_of_evaluating_is_warned_of(cache: str, run: str) -> None:
    idle: dict[str, Any] = {"through_codec": False, "max_new_tokens": 9}
    heard = Heard()
    evaluate(EvaluateOptions(draft=run, cache=cache, **idle), None, heard)
    assert heard.warnings == [
        "through_codec=False has no effect without --target",
        "max_new_tokens=9 has no effect without --target",
    ]


def test_a_cache_of_another_target_of_the_same_shapes_is_warned_of(cache: str, run: str) -> None:
    heard = Heard()
    evaluate(EvaluateOptions(draft=run, cache=cache), None, heard)
    assert heard.warnings == []
    path = Path(run) / "provenance.json"
    provenance = json.loads(path.read_text())
    provenance["identity"]["target"] |= {"config_sha256": "0" * 64, "name": "other/target"}
    path.write_text(json.dumps(provenance))
    evaluate(EvaluateOptions(draft=run, cache=cache), None, heard)
    assert len(heard.warnings) == 1 and "was trained for other/target" in heard.warnings[0]


def test_a_cache_of_a_target_of_another_shape_is_refused(cache: str, tmp_path: Path) -> None:
    """Before its layers are asked for: those of the draft's own target may not be there."""
    save_draft(tmp_path / "draft", lively_draft(small_config(target_layer_ids=[1, 4])))
    with pytest.raises(DraftError, match=r"the draft's hidden size is 32, that of .* is 16: evaluate it on a cache"):
        evaluate(EvaluateOptions(draft=str(tmp_path / "draft"), cache=cache), None, Silent())
