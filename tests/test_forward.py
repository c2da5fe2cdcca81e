"""The forward passes of a shard against the target's own, sample by sample, with all hidden states asked for.

T positions of one sample, H hidden size, V vocabulary.
"""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from capture_fixtures import Recorder, capture_options, random_target, shipped_rows, write_jsonl
from torch import nn

from cache.codecs import HiddenCodec
from capture.forward import make_batch, run_shard, shard_plan, token_arrays
from capture.planning import plan_capture
from capture.settings import scan_data, settle
from schemas.errors import CaptureFault
from target.load import load_target

ROWS = 14


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_jsonl(tmp_path_factory.mktemp("data") / "rows.jsonl", shipped_rows(ROWS))


def setup(data, target_path, tmp_path, **options):
    settings = settle(capture_options(target_path, data, tmp_path / "out", **options), Recorder())
    manifest, shards, _ = plan_capture(settings, scan_data(settings.options, Recorder()), Recorder())
    table = pa.concat_tables(shards)
    return settings, manifest.identity, table, load_target(settings.ref, manifest.identity.dtype, "cpu")


def captured(settings, identity, table, target):
    """Every sample's rows of every array, gathered over the shards: sample_id -> name -> rows."""
    samples = {}
    for shard in range(max(table["shard"].to_pylist()) + 1):
        plan = shard_plan(table, shard, identity.shard_tokens)
        arrays = run_shard(target, settings.traits, identity, plan, lambda _tokens: None)
        named = np.zeros(identity.shard_tokens, dtype=bool)
        for sample_id, start, length in zip(plan.sample_ids, plan.start, plan.length, strict=True):
            rows = slice(int(start), int(start + length))
            named[rows] = True
            samples[sample_id] = {name: array[rows] for name, array in arrays.items()}
        assert all(not array[~named].any() for array in arrays.values()), "rows of no sample are zero"
    return samples


def reference(target, ids):
    """hidden_states of layers 0..n-2, and the last layer's output by a hook of the test's own."""
    last = []
    handle = target.model.model.layers[-1].register_forward_hook(lambda _m, _a, output: last.append(output))
    with torch.inference_mode():
        output = target.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    handle.remove()
    return [state[0] for state in output.hidden_states[1:-1]] + [last[0][0]], output.logits[0].float()


@pytest.mark.parametrize("batch_tokens", [1, 300, 4096])
@pytest.mark.parametrize("model", ["tiny-chat", "random"])
def test_f32_rows_are_the_targets_own(data, tiny_chat, tmp_path, model, batch_tokens):
    path = tiny_chat if model == "tiny-chat" else random_target(tmp_path / "m", layers=5)
    layers = tuple(range(6 if model == "tiny-chat" else 5))
    settings, identity, table, target = setup(data, path, tmp_path, layers=layers, batch_tokens=batch_tokens)
    samples = captured(settings, identity, table, target)
    assert len(samples) == ROWS
    for rows in samples.values():
        hidden, logits_TV = reference(target, rows["tokens/input_ids"].tolist())
        for layer in layers:
            error = np.abs(rows[f"hidden/{layer}"] - hidden[layer].numpy()).max()
            assert error <= 1e-5 * np.abs(hidden[layer].numpy()).max()
        # Rebuilt from the stored last layer, through the norm and the head.
        with torch.inference_mode():
            last_TH = torch.from_numpy(rows[f"hidden/{layers[-1]}"])
            rebuilt_TV = torch.log_softmax(target.lm_head(target.decoder.norm(last_TH)).double(), dim=-1)
        assert torch.allclose(rebuilt_TV, torch.log_softmax(logits_TV.double(), dim=-1), atol=1e-3)
        check_logits(rows, rebuilt_TV, identity.top_k)


def check_logits(rows, rebuilt_TV, top_k):
    mask = rows["tokens/loss_mask"]
    needed = np.append(mask[1:], 0).astype(bool)
    assert needed.sum() >= 2
    for t in np.flatnonzero(needed):
        ids, logprobs = rows["logits/topk_ids"][t].astype(np.int64), rows["logits/topk_logprobs"][t].astype(np.float64)
        expected = rebuilt_TV[t].numpy()
        assert len(set(ids.tolist())) == top_k
        np.testing.assert_allclose(logprobs, expected[ids], rtol=1e-3, atol=2e-4)
        others = np.delete(expected, ids)
        assert expected[ids].min() >= others.max() - 1e-4
        assert abs(rows["logits/rest_logprob"][t] - np.log(np.exp(others).sum())) < 1e-3
    for name in ("logits/topk_ids", "logits/topk_logprobs", "logits/rest_logprob"):
        assert not rows[name][~needed].any(), "the head is applied only where it is needed"


@pytest.mark.parametrize(("dtype", "batch_tokens"), [("float32", 1), ("float32", 2048), ("bfloat16", 1)])
def test_bf16_rows_are_within_one_ulp(data, tiny_chat, tmp_path, dtype, batch_tokens):
    layers = (0, 3, 5)
    options = {"layers": layers, "codec": "bf16", "dtype": dtype, "batch_tokens": batch_tokens}
    settings, identity, table, target = setup(data, tiny_chat, tmp_path, **options)
    for rows in captured(settings, identity, table, target).values():
        hidden, _ = reference(target, rows["tokens/input_ids"].tolist())
        for layer in layers:
            stored_TH = HiddenCodec("bf16").decode({"hidden": rows[f"hidden/{layer}"]}, layer).float()
            expected_TH = hidden[layer].float()
            # One unit in the last place of 8 bits: 2^-7 of the power of two at or below the value.
            ulp_TH = torch.exp2(torch.floor(torch.log2(expected_TH.abs().clamp(min=1e-30))) - 7)
            # A batch changes float32 sums in their last bits, which is more than the ulp of values near zero.
            rounding = 0 if batch_tokens == 1 else 1e-5 * expected_TH.abs().max()
            assert ((stored_TH - expected_TH).abs() <= ulp_TH + rounding).all()
            if dtype == "bfloat16":
                assert torch.equal(stored_TH, expected_TH), (
                    "alone in its batch, a bfloat16 target is stored bit for bit"
                )


def test_thirty_six_layers_in_a_folder_called_qwen3_8b(data, tmp_path):
    path = random_target(tmp_path / "Qwen3-8B", layers=36, hidden_size=16, head_dim=8, tie_word_embeddings=False)
    settings, identity, table, target = setup(data, path, tmp_path, layers=(1, 9, 17, 25))
    assert identity.target.name == "Qwen3-8B"
    for rows in captured(settings, identity, table, target).values():
        hidden, _ = reference(target, rows["tokens/input_ids"].tolist())
        for layer in (1, 9, 17, 25):
            assert np.abs(rows[f"hidden/{layer}"] - hidden[layer].numpy()).max() <= 1e-5 * hidden[layer].abs().max()


def test_only_what_is_stored_is_computed(data, tiny_chat, tmp_path):
    settings, identity, table, target = setup(data, tiny_chat, tmp_path, layers=(2,))
    plan = shard_plan(table, 0, identity.shard_tokens)
    calls, asked = [], []
    handles = [
        target.lm_head.register_forward_hook(lambda _m, args, _o: calls.append(args[0].shape)),
        target.decoder.register_forward_pre_hook(lambda _m, _a, kwargs: asked.append(kwargs), with_kwargs=True),
    ]
    run_shard(target, settings.traits, identity, plan, lambda _tokens: None)
    for handle in handles:
        handle.remove()
    needed = sum(int(mask[1:].sum()) for mask in np.split(plan.loss_mask, np.cumsum(plan.length)[:-1]))
    assert sum(shape[0] for shape in calls) == needed
    assert all(len(shape) == 2 for shape in calls)
    assert len(asked) == plan.batch.max() + 1
    assert all(set(kwargs) == {"input_ids", "use_cache"} for kwargs in asked)


def test_batches_are_padded_on_the_right(data, tiny_chat, tmp_path):
    _, identity, table, _ = setup(data, tiny_chat, tmp_path, batch_tokens=1024)
    plan = shard_plan(table, 0, identity.shard_tokens)
    ids = token_arrays(plan, identity.shard_tokens)["tokens/input_ids"]
    seen = []
    for number in range(plan.batch.max() + 1):
        batch = make_batch(plan, number, ids)
        for row, sample in enumerate(batch.samples):
            start, length = int(plan.start[sample]), int(plan.length[sample])
            assert batch.ids_bm[row, :length].tolist() == ids[start : start + length].tolist()
            assert not batch.ids_bm[row, length:].any()
            seen.append(int(sample))
        assert batch.ids_bm.reshape(-1)[batch.place_R].tolist() == ids[batch.row_R].tolist()
    assert sorted(seen) == list(range(len(plan.sample_ids)))


class Spoil(nn.Module):
    """A decoder layer whose output is replaced at one token id."""

    def __init__(self, layer, change):
        super().__init__()
        self.layer, self.change = layer, change

    def forward(self, hidden, **kwargs):
        return self.change(self.layer(hidden, **kwargs))


def spoiled(target, layer, change):
    layers = nn.ModuleList(target.layers)
    layers[layer] = Spoil(layers[layer], change)
    target.decoder.layers = layers
    return replace(target, layers=layers)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_named(data, tiny_chat, tmp_path, value):
    settings, identity, table, target = setup(data, tiny_chat, tmp_path, layers=(1, 2, 4))
    plan = shard_plan(table, 0, identity.shard_tokens)
    victim = int(np.flatnonzero(plan.batch == 0)[1])

    def change(hidden):
        if hidden.shape[1] == plan.length[plan.batch == 0].max():
            hidden = hidden.clone()
            hidden[1, 7, 3] = value
        return hidden

    with pytest.raises(CaptureFault, match=rf"layer 2: .*not finite \(sample {plan.sample_ids[victim]}, position 7\)"):
        run_shard(spoiled(target, 2, change), settings.traits, identity, plan, lambda _tokens: None)


def test_a_layer_of_zeros_is_named(data, tiny_chat, tmp_path):
    settings, identity, table, target = setup(data, tiny_chat, tmp_path, layers=(1, 5))
    plan = shard_plan(table, 0, identity.shard_tokens)
    with pytest.raises(CaptureFault, match="layer 5: all hidden states are zero") as caught:
        run_shard(spoiled(target, 5, lambda hidden: hidden * 0), settings.traits, identity, plan, lambda _tokens: None)
    assert caught.value.exit_code == 1


def test_a_distribution_that_is_not_finite_is_named(data, tiny_chat, tmp_path):
    settings, identity, table, target = setup(data, tiny_chat, tmp_path, layers=(1,))
    plan = shard_plan(table, 0, identity.shard_tokens)
    # Layer 1 is fine; a later one, which is not captured, is not.
    with pytest.raises(CaptureFault, match="next-token distribution is not finite"):
        run_shard(
            spoiled(target, 5, lambda hidden: hidden * float("nan")),
            settings.traits,
            identity,
            plan,
            lambda _tokens: None,
        )


def test_values_to_the_right_cannot_reach_a_row(data, tiny_chat, tmp_path):
    settings, identity, table, target = setup(
        data, tiny_chat, tmp_path, layers=(4,), batch_tokens=4096, shard_tokens=4096
    )
    plan = shard_plan(table, 0, identity.shard_tokens)
    plain = run_shard(target, settings.traits, identity, plan, lambda _tokens: None)
    embed = target.decoder.embed_tokens
    noisy = nn.Embedding.from_pretrained(embed.weight.clone())
    noisy.weight[0] = 50.0  # the padding id; no sample holds it
    assert 0 not in plan.input_ids
    target.decoder.embed_tokens = noisy
    loud = run_shard(target, settings.traits, identity, plan, lambda _tokens: None)
    assert np.array_equal(plain["hidden/4"], loud["hidden/4"])
