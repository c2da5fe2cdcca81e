"""Training end to end on a tiny cache: what a run writes, and that the loss of a step is sums over sums."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from train_fixtures import fingerprint, options, stable_lines, tensor_files, train_cache

from cache import read as read_module
from cache.plain import PlainReader
from cache.read import open_cache
from draft.accept import evaluate_cache
from draft.files import load_draft
from schemas.errors import TrainFault
from schemas.options import TrainOptions
from schemas.say import Silent
from train.batch import read_batches
from train.checkpoint import list_checkpoints
from train.metrics import train_line
from train.run import train
from train.rundir import read_options, read_provenance
from train.setup import prepare
from train.step import accumulate, run_step
from train.stream import MicroBatch, StreamState, micro_batches


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return train_cache(tmp_path_factory.mktemp("train") / "hs.zarr")


@pytest.fixture(scope="module")
def finished(cache: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "finished"
    before = fingerprint(Path(cache))
    train(options(), cache, str(run), False, Silent())
    assert fingerprint(Path(cache)) == before, "a cache is only read"
    return run


# What a run writes


def test_a_run_holds_config_provenance_metrics_checkpoints_and_a_draft(finished: Path, cache: str) -> None:
    assert sorted(entry.name for entry in finished.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "draft",
        "metrics.jsonl",
        "provenance.json",
    ]
    config = yaml.safe_load((finished / "config.yaml").read_text())
    assert config["run"]["layers"] == [0, 2, 3] and config["loss"]["gamma"] == 2.0
    assert (config["run"]["device"], config["run"]["precision"], config["run"]["attention"]) == (
        "cpu",
        "float32",
        "split",
    )
    assert all(config[group].keys() == fields.keys() for group, fields in TrainOptions().model_dump().items())
    assert read_options(finished).model_dump(mode="json") == config
    provenance = read_provenance(finished)
    manifest = open_cache(cache).manifest
    assert (provenance.cache, provenance.identity, provenance.totals) == (cache, manifest.identity, manifest.totals)
    assert provenance.versions["torch"] == torch.__version__


def test_the_draft_is_the_last_checkpoint_in_bfloat16(finished: Path) -> None:
    checkpoints = list_checkpoints(finished / "checkpoints")
    assert list(checkpoints) == [3, 6, 9, 12, 14]
    master = load_file(checkpoints[14] / "model.safetensors")
    assert {tensor.dtype for tensor in master.values()} == {torch.float32}
    draft = load_draft(finished / "draft", dtype="float32").state_dict()
    assert draft.keys() == master.keys()
    assert all(torch.equal(draft[name], tensor.bfloat16().float()) for name, tensor in master.items())


def test_metrics_are_sums_over_all_micro_batches_since_the_line_before(finished: Path) -> None:
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [4, 8, 12, 14]
    names = "loss accuracy accept_len base_loss selector_loss base_accuracy base_accept_len candidate_recall tokens_per_s data_wait lr grad_norm"
    for line in lines:
        assert {f"train/{name}" for name in names.split()} <= line.keys()
        assert line["train/loss"] == pytest.approx(line["train/base_loss"] + line["train/selector_loss"])
        assert 1 <= line["train/accept_len"] <= 4 and 0 <= line["train/data_wait"] <= 1


def test_a_line_divides_sums_by_sums() -> None:
    sums = {
        "base_loss": 30.0,
        "base_weight": 10.0,
        "selector_loss": 6.0,
        "selector_weight": 4.0,
        "correct": 5.0,
        "valid": 20.0,
    }
    sums |= {
        "blocks": 8.0,
        "accept_len": 12.0,
        "base_correct": 4.0,
        "base_accept_len": 10.0,
        "recalled": 15.0,
        "steps": 2.0,
    }
    sums |= {"grad_norm": 3.0, "tokens": 100.0, "seconds": 4.0, "waited": 1.0, "without_anchor": 7.0}
    line = train_line(40, 3, 0.5, sums, selector_weight=2.0)
    expected = {
        "loss": 6.0,
        "accuracy": 0.25,
        "accept_len": 1.5,
        "base_loss": 3.0,
        "selector_loss": 1.5,
        "base_accuracy": 0.2,
    }
    expected |= {"base_accept_len": 1.25, "candidate_recall": 0.75, "tokens_per_s": 25.0, "data_wait": 0.25, "lr": 0.5}
    expected |= {"grad_norm": 1.5, "without_anchor": 7.0}
    assert line == {"step": 40, "epoch": 3} | {f"train/{name}": value for name, value in expected.items()}


def test_a_line_covers_every_step_since_the_line_before(cache: str, tmp_path: Path, finished: Path) -> None:
    train(options(run={"log_every": 1}), cache, str(tmp_path / "r"), False, Silent())
    each = [line["train/grad_norm"] for line in stable_lines(tmp_path / "r")]
    for line, (start, stop) in zip(stable_lines(finished), [(0, 4), (4, 8), (8, 12), (12, 14)], strict=True):
        assert line["train/grad_norm"] == pytest.approx(sum(each[start:stop]) / (stop - start))


def test_held_out_lines_are_the_evaluation_of_the_draft_as_it_is(cache: str, tmp_path: Path) -> None:
    chosen = options(run={"steps": 5, "eval_every": 3, "eval_share": 10, "draft_dtype": "float32", "export": "last"})
    train(chosen, cache, str(tmp_path / "r"), False, Silent())
    lines = [line for line in stable_lines(tmp_path / "r") if "val/loss" in line]
    assert [line["step"] for line in lines] == [3, 5]
    report = evaluate_cache(load_draft(tmp_path / "r/draft"), open_cache(cache, [0, 2, 3]), "val")
    assert lines[-1]["val/walk"] == lines[-1]["val/accept_len"] == report["walk"]["acceptance"]
    assert lines[-1]["val/uniform"] == report["uniform"]["acceptance"]
    assert lines[-1]["val/loss"] == pytest.approx(report["loss"], rel=1e-6)
    assert lines[-1]["val/base_accuracy"] == report["backbone"]["accuracy"]
    assert lines[-1]["val/loss"] == pytest.approx(lines[-1]["val/base_loss"] + lines[-1]["val/selector_loss"])
    assert lines[-1]["val/selector_loss"] > 0


def test_dflash_has_no_figures_of_a_selector(cache: str, tmp_path: Path) -> None:
    summary = train(options(draft={"kind": "dflash"}, run={"steps": 2}), cache, str(tmp_path / "r"), False, Silent())
    (line,) = stable_lines(tmp_path / "r")
    assert line.keys() == {"step", "epoch"} | {
        f"train/{n}" for n in ("loss", "accuracy", "accept_len", "lr", "grad_norm", "without_anchor")
    }
    assert summary.steps == 2 and summary.metrics["train/loss"] == line["train/loss"]
    assert summary.parameters == sum(t.numel() for t in load_file(tmp_path / "r/draft/model.safetensors").values())


@pytest.mark.parametrize(("kind", "name"), [("dflash", "adamw"), ("dflash2", "adamw"), ("dflash2", "muon")])
def test_training_learns(cache: str, tmp_path: Path, kind: str, name: str) -> None:
    chosen = options(
        draft={"kind": kind},
        optim={"name": name, "lr": 0.02},
        run={"steps": None, "epochs": 10, "log_every": 5, "checkpoint_every": 1000},
    )
    train(chosen, cache, str(tmp_path / "r"), False, Silent())
    lines = stable_lines(tmp_path / "r")
    assert lines[-1]["epoch"] == 9 and lines[-1]["train/loss"] < 0.8 * lines[0]["train/loss"]


def test_a_run_repeats_to_the_bit(cache: str, tmp_path: Path, finished: Path) -> None:
    train(options(), cache, str(tmp_path / "r"), False, Silent())
    assert stable_lines(tmp_path / "r") == stable_lines(finished)
    assert tensor_files(tmp_path / "r") == tensor_files(finished)


def test_plain_zarr_gives_the_same_run_to_the_bit(cache: str, tmp_path: Path, finished: Path, monkeypatch) -> None:
    def plain(store, specs, buffers):
        return {spec.name: PlainReader(store, spec, buffers) for spec in specs}

    monkeypatch.setattr(read_module, "_readers", plain)
    assert len(open_cache(cache).notes) == len(open_cache(cache).arrays), "no array takes the fast path"
    train(options(), cache, str(tmp_path / "r"), False, Silent())
    assert stable_lines(tmp_path / "r") == stable_lines(finished)
    assert tensor_files(tmp_path / "r") == tensor_files(finished)


def test_the_seed_changes_the_run(cache: str, tmp_path: Path, finished: Path) -> None:
    train(options(data={"seed": -1}), cache, str(tmp_path / "r"), False, Silent())
    assert stable_lines(tmp_path / "r") != stable_lines(finished)


def test_float32_weights_for_the_draft_on_request_and_bfloat16_arithmetic(
    cache: str, tmp_path: Path, finished: Path
) -> None:
    chosen = options(run={"precision": "bfloat16", "draft_dtype": "float32"})
    train(chosen, cache, str(tmp_path / "r"), False, Silent())
    master = load_file(tmp_path / "r/checkpoints/step-000014/model.safetensors")
    written = load_file(tmp_path / "r/draft/model.safetensors")
    assert all(torch.equal(written[name], tensor) and tensor.dtype == torch.float32 for name, tensor in master.items())
    for ours, theirs in zip(stable_lines(tmp_path / "r"), stable_lines(finished), strict=True):
        assert (
            ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=0.05)
            and ours["train/loss"] != theirs["train/loss"]
        )


# The loss of a step


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_a_step_is_the_same_however_its_samples_are_cut_into_micro_batches(
    cache: str, tmp_path: Path, kind: str
) -> None:
    rows = (0, 1, 2, 4, 5, 8)
    seen = []
    for number, cuts in enumerate([[rows], [rows[:1], rows[1:3], (), rows[3:]], [(row,) for row in rows]]):
        job = prepare(options(draft={"kind": kind}), cache, str(tmp_path / f"{kind}{number}"), False, Silent())
        window = list(read_batches(job.cache, job.draw, [MicroBatch(0, cut, StreamState(), False) for cut in cuts]))
        sums = run_step(job.learner, window, 0.01)
        seen.append((sums, {name: p.detach() for name, p in job.learner.optimizers.parameters.items()}))
    for sums, weights in seen[1:]:
        assert sums == pytest.approx(seen[0][0], rel=1e-5)
        # Adam divides a gradient by itself, so weights whose gradient is nearly 0 may differ: compare momentum's input, the norm, above.
        for name, weight in weights.items():
            assert (weight - seen[0][1][name]).abs().median() < 1e-6, name


def test_the_loss_of_accumulated_micro_batches_has_the_gradient_of_their_sum(cache: str, tmp_path: Path) -> None:
    gradients = []
    for number, cuts in enumerate([[(0, 1, 2, 4, 5)], [(0,), (1, 2), (4, 5)]]):
        job = prepare(options(), cache, str(tmp_path / str(number)), False, Silent())
        with torch.no_grad():
            for parameter in job.learner.draft.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        accumulate(
            job.learner,
            list(read_batches(job.cache, job.draw, [MicroBatch(0, cut, StreamState(), False) for cut in cuts])),
        )
        gradients.append({name: p.grad for name, p in job.learner.optimizers.parameters.items()})
    for name, gradient in gradients[0].items():
        assert gradient is not None and gradient.abs().max() > 0
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))


def test_the_last_partial_window_of_an_epoch_steps_too(cache: str, tmp_path: Path) -> None:
    one = prepare(options(run={"steps": None, "epochs": 2}), cache, str(tmp_path / "1"), False, Silent())
    two = prepare(
        options(run={"steps": None, "epochs": 2}, optim={"accumulate": 2}), cache, str(tmp_path / "2"), False, Silent()
    )
    assert one.steps > two.steps >= one.steps / 2
    train(
        options(run={"steps": None, "epochs": 2, "log_every": 1}, optim={"accumulate": 3}),
        cache,
        str(tmp_path / "3"),
        False,
        Silent(),
    )
    lines = stable_lines(tmp_path / "3")
    assert {line["epoch"] for line in lines} == {0, 1}


def test_samples_without_an_anchor_are_counted_and_a_step_without_any_changes_nothing(tmp_path: Path) -> None:
    masks = {row: [0, 1] for row in range(8) if row != 1}
    cache = train_cache(tmp_path / "c", shards=2, masks=masks)
    chosen = options(data={"batch_tokens": 2}, run={"steps": None, "epochs": 1, "log_every": 1, "checkpoint_every": 1})
    train(chosen, cache, str(tmp_path / "r"), False, Silent())
    lines = stable_lines(tmp_path / "r")
    assert sum(line["train/without_anchor"] for line in lines) == 5 and len(lines) == 6
    weights = [fingerprint(path)["model.safetensors"] for path in list_checkpoints(tmp_path / "r/checkpoints").values()]
    changed = [index for index in range(1, 6) if weights[index] != weights[index - 1]]
    updates = [index for index, line in enumerate(lines) if line["train/grad_norm"] > 0]
    assert len(updates) == 1 and changed == [index for index in updates if index]
    assert all(("train/loss" in line) == (line["train/grad_norm"] > 0) for line in lines)


def test_a_loss_that_is_not_finite_stops_before_the_step_and_names_the_samples(tmp_path: Path) -> None:
    cache = train_cache(tmp_path / "c", poison=5)
    name = open_cache(cache).index["sample_id"][5].as_py()
    chosen = options(data={"batch_tokens": 2}, run={"steps": 40, "checkpoint_every": 1})
    with pytest.raises(TrainFault, match=rf"step \d+: the base_loss is nan.*{name}.*not-finite.json") as caught:
        train(chosen, cache, str(tmp_path / "r"), False, Silent())
    report = json.loads((tmp_path / "r/not-finite.json").read_text())
    (batch,) = report["batches"]
    assert batch["rows"] == [5] and batch["sample_ids"] == [name] and report["what"] == "base_loss"
    assert f"in micro-batch {batch['position']} of epoch {batch['epoch']}; samples {name}:" in str(caught.value)
    # The place is the stream's: whoever looks it up there finds the sample.
    job = prepare(chosen, cache, str(tmp_path / "again"), False, Silent())
    assert micro_batches(job.order, batch["epoch"])[batch["position"]].tolist() == [5]
    assert report["step"] == max(list_checkpoints(tmp_path / "r/checkpoints"), default=0) + 1
    for path in list_checkpoints(tmp_path / "r/checkpoints").values():
        assert all(tensor.isfinite().all() for tensor in load_file(path / "model.safetensors").values())
    assert not (tmp_path / "r/draft").exists()
