"""Kept measurements: of all held-out samples, of the weights that the run holds now, and shown as they are."""

import json
from pathlib import Path

import pytest
from reference import lively_draft, small_config

from draft.files import save_draft
from draft.model import Draft
from pipeline.compare import compare, count_parameters
from pipeline.measure_commands import figures_text
from pipeline.results import CACHE, DECODED, keep_result, read_result
from schemas.errors import DraftError

FIGURES = {"uniform": {"acceptance": 2.0}, "walk": {"acceptance": 1.5}}


def run_with_draft(run: Path) -> Draft:
    made = lively_draft(small_config())
    save_draft(run / "draft", made)
    return made


def test_a_measurement_is_kept_beside_the_draft_of_a_run(tmp_path: Path) -> None:
    made = run_with_draft(tmp_path / "run")
    assert read_result(str(tmp_path / "run"), CACHE) is None
    keep_result(str(tmp_path / "run"), CACHE, FIGURES)
    kept = read_result(str(tmp_path / "run"), CACHE)
    assert kept is not None and {name: kept[name] for name in FIGURES} == FIGURES
    (record,) = compare([str(tmp_path / "run")])
    assert (record["walk"], record["uniform"], record["decoded"], record["lossless"]) == (1.5, 2.0, None, None)
    assert record["params"] == sum(parameter.numel() for parameter in made.parameters())
    assert record["params"] == count_parameters(tmp_path / "run/draft/model.safetensors")
    before = sorted(path.name for path in (tmp_path / "run/draft").iterdir())
    keep_result(str(tmp_path / "run/draft"), DECODED, FIGURES)
    assert sorted(path.name for path in (tmp_path / "run/draft").iterdir()) == before


def test_figures_of_weights_that_were_replaced_are_refused(tmp_path: Path) -> None:
    """A run made longer holds another draft than the one that was measured."""
    made = run_with_draft(tmp_path / "run")
    keep_result(str(tmp_path / "run"), CACHE, FIGURES)
    save_draft(tmp_path / "run/draft", made)
    assert read_result(str(tmp_path / "run"), CACHE) is not None
    made.norm.weight.data += 1.0
    save_draft(tmp_path / "run/draft", made)
    with pytest.raises(DraftError, match=r"cache.json measured weights with weights_crc32c .* measure again"):
        compare([str(tmp_path / "run")])


def test_what_compare_cannot_read_is_an_error_of_ours(tmp_path: Path) -> None:
    run_with_draft(tmp_path / "run")
    (tmp_path / "run/evaluation").mkdir()
    (tmp_path / "run/evaluation/cache.json").write_text("{")
    with pytest.raises(DraftError, match=r"cache.json is not JSON"):
        compare([str(tmp_path / "run")])
    (tmp_path / "run/draft/model.safetensors").write_bytes(b"\x08\x00")
    with pytest.raises(DraftError, match="draft holds no readable draft"):
        compare([str(tmp_path / "run")])
    (tmp_path / "run/draft/config.json").write_text(json.dumps(list(small_config().to_json())))
    with pytest.raises(DraftError, match="draft holds no readable draft"):
        compare([str(tmp_path / "run")])


def test_a_figure_without_a_block_is_a_dash() -> None:
    """Answers of one token each have no block."""
    none = {"accepted": 0, "blocks": 0, "acceptance": None}
    some = {"accepted": 3, "blocks": 2, "acceptance": 2.5}
    text = figures_text({"draft": "run", "walk": none, "uniform": some, "backbone": {"walk": none, "uniform": some}})
    assert "walk            - tokens a block (0 drafted tokens accepted in 0 blocks)" in text
    assert "uniform         2.500 tokens a block" in text
    assert "walk -, uniform 2.500" in text
