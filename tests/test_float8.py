"""`run.float8`: which products it takes, what it refuses, and that weights stay what they are under their own names."""

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from train_fixtures import options, train_cache

from draft.model import EAGER, Draft, new_draft
from schemas.draft import DraftConfig
from schemas.errors import OptionError
from schemas.say import Silent
from train.batch import read_batches
from train.compiling import compile_layers
from train.float8 import check_float8, float8_names, to_float8
from train.setup import prepare
from train.sharding import plain_draft
from train.step import accumulate
from train.stream import MicroBatch, StreamState

H100, A100, L4 = (9, 0), (8, 0), (8, 9)
CUDA = torch.device("cuda", 0)


def widened(config: DraftConfig, **sizes: int) -> DraftConfig:
    return config.model_copy(update=sizes)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("float8")
    chosen = options(draft={"num_layers": 2, "intermediate_size": 32}, run={"precision": "float32"})
    return prepare(chosen, train_cache(folder / "hs.zarr"), str(folder / "r"), False, Silent())


@pytest.mark.parametrize(
    ("device", "capability", "precision", "message"),
    [
        (
            torch.device("cpu"),
            None,
            "bfloat16",
            "float8=true needs a CUDA device of compute capability 8.9 or higher, and the run is on cpu",
        ),
        (CUDA, A100, "bfloat16", r"needs a CUDA device of compute capability 8.9 or higher, and cuda:0 has 8.0"),
        (CUDA, H100, "float32", "computes in bfloat16 around its products, and run.precision is float32"),
        (CUDA, L4, "bfloat16", r"needs torchao .*pip install 'dflash-pipeline\[float8\]'"),
    ],
)
def test_what_float8_cannot_do_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    capability: tuple[int, int] | None,
    precision: str,
    message: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(OptionError, match=message) as caught:
        check_float8(device, precision)
    assert "\n" not in str(caught.value) and "leave run.float8 false" in str(caught.value)


def test_only_a_layers_own_products_of_whole_tiles_are_taken(job: Any) -> None:
    draft = job.learner.draft
    every = {f"self_attn.{name}_proj" for name in "qkvo"} | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    taken, left = float8_names(draft)
    # 8 key-value channels are half a tile.
    assert set(left) == {f"layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "kv"}
    assert set(taken) == {f"layers.{layer}.{name}" for layer in (0, 1) for name in every} - set(left)


def test_a_draft_without_such_a_product_is_refused(job: Any) -> None:
    draft = new_draft(
        widened(job.learner.draft.config, hidden_size=24, intermediate_size=24, head_dim=2), torch.Generator()
    )
    with pytest.raises(OptionError, match=r"run.float8=true: .*multiples of 16.*leave run.float8 false"):
        to_float8(draft)


def test_evaluation_sees_the_plain_draft_of_the_same_weights(job: Any) -> None:
    compile_layers(job.learner, 1, "eager")
    plain = plain_draft(job.learner.draft, torch.device("cpu"))
    assert job.learner.draft.halves is not EAGER and plain.halves is EAGER
    weights = dict(job.learner.draft.named_parameters())
    for name, parameter in plain.named_parameters():
        assert parameter.data_ptr() == weights[name].data_ptr(), "copied, not shared"


def gradients(job: Any, draft: Draft) -> dict[str, torch.Tensor]:
    batches = list(read_batches(job.cache, job.draw, [MicroBatch(0, (4, 5, 6), StreamState(), False)]))
    accumulate(replace(job.learner, draft=draft), batches)
    return {name: parameter.grad for name, parameter in draft.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_emulated_float8_trains_the_same_weights_under_the_same_names(job: Any, backend: str | None) -> None:
    config = pytest.importorskip("torchao.float8").Float8LinearConfig
    plain = new_draft(job.learner.draft.config, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for number, parameter in enumerate(plain.parameters()):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    draft = plain_draft(plain, torch.device("cpu"))
    taken, _ = to_float8(draft, config(emulate=True))
    assert [name for name, module in draft.named_modules() if type(module).__name__ == "Float8Linear"] == taken
    assert type(draft.fc) is nn.Linear
    assert list(draft.state_dict()) == list(plain.state_dict())
    assert all(p.dtype == torch.float32 for p in draft.parameters())
    expected = gradients(job, plain)
    if backend is not None:
        compile_layers(replace(job.learner, draft=draft), 1, backend)
    found = gradients(job, draft)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = float((found[name] - gradient).norm() / gradient.norm())
        assert 0 < error < 0.3, name
    back = plain_draft(draft, torch.device("cpu"))
    assert all(type(m) is nn.Linear for m in back.modules() if isinstance(m, nn.Linear))
