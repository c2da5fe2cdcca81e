"""Long samples in pieces: the same rows as the whole forward, in the memory of a piece, or a refusal.

m tokens of one sample, H hidden size.
"""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
import transformers as tf
from capture_fixtures import Recorder, capture_options, copy_tokenizer, shipped_rows, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st
from target_fixtures import make_target
from torch import nn

from cache.read import open_cache
from cache.write import CacheWriter
from capture.forward import run_shard, shard_plan
from capture.planning import plan_capture
from capture.recheck import recheck
from capture.run import capture
from capture.settings import scan_data, settle
from schemas.errors import OptionError, TargetError
from target import prefill
from target.load import load_target, resolve_target
from target.prefill import check_pieces, even_ends, forward_pieces

LINEAR = ("qwen3.5", "kimi-linear")
CUT = (*LINEAR, "qwen3", "gemma3", "llama", "gpt-oss")


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cut")
    return {kind: load_target(resolve_target(make_target(kind, folder / kind)), "float32", "cpu") for kind in CUT}


@pytest.mark.parametrize("kind", CUT)
@settings(max_examples=8, deadline=None)
@given(width=st.integers(2, 40), data=st.data())
def test_pieces_are_the_whole_to_rounding(targets, kind, width, data):
    target = targets[kind]
    ends = sorted({*data.draw(st.lists(st.integers(1, width - 1), max_size=5)), width})
    ids_bm = torch.randint(3, 2000, (2, width), generator=torch.Generator().manual_seed(width))
    with torch.inference_mode():
        whole_bmH = target.decoder(input_ids=ids_bm, use_cache=False).last_hidden_state
        cut_bmH = torch.cat(list(forward_pieces(target.decoder, target.config, ids_bm, ends)), dim=1)
    error_bm = (cut_bmH - whole_bmH).norm(dim=-1) / whole_bmH.norm(dim=-1)
    # Linear attention norms states that may be near zero, in a float32 recurrence: rounding grows at a few positions.
    assert error_bm.max() <= (1e-3 if kind in LINEAR else 2e-5)
    assert error_bm.median() <= 2e-6


@pytest.mark.parametrize(
    ("width", "piece", "ends"), [(7, 3, [3, 6, 7]), (6, 3, [3, 6]), (2, 3, [2]), (3, 1, [1, 2, 3])]
)
def test_even_ends(width, piece, ends):
    assert even_ends(width, piece) == ends


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_jsonl(tmp_path_factory.mktemp("rows") / "rows.jsonl", shipped_rows(12))


@pytest.mark.parametrize("chunk", [5, 64, 10_000])
def test_shards_are_the_same_and_no_forward_sees_more(data, tiny_chat, tmp_path, chunk):
    settled = settle(capture_options(tiny_chat, data, tmp_path / "c", layers=(0, 4), batch_tokens=700), Recorder())
    manifest, shards, _ = plan_capture(settled, scan_data(settled.options, Recorder()), Recorder())
    table = pa.concat_tables(shards)
    target = load_target(settled.ref, "float32", "cpu")
    seen, done = [], []
    target.decoder.register_forward_pre_hook(
        lambda _m, _a, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    for shard in range(2):
        plan = shard_plan(table, shard, manifest.identity.shard_tokens)
        whole = run_shard(target, settled.traits, manifest.identity, plan, lambda _tokens: None)
        seen.clear()
        done.clear()
        cut = run_shard(target, settled.traits, manifest.identity, plan, done.append, chunk)
        rows = {number: int((plan.batch == number).sum()) for number in range(plan.batch.max() + 1)}
        assert all(width <= chunk and sequences in rows.values() for sequences, width in seen)
        assert sum(done) == plan.length.sum()
        assert whole.keys() == cut.keys()
        for name, array in whole.items():
            if name.startswith("hidden/"):
                assert np.abs(cut[name] - array).max() <= 2e-5 * np.abs(array).max()
            elif name.startswith("tokens/"):
                assert np.array_equal(cut[name], array)
        supervised = whole["logits/topk_logprobs"][:, 0] != 0
        assert np.array_equal(supervised, cut["logits/topk_logprobs"][:, 0] != 0)
        # A unit of float16, and what rounding leaves of a logarithm near 0.
        assert np.allclose(cut["logits/topk_logprobs"], whole["logits/topk_logprobs"], rtol=2e-3, atol=1e-5)
        assert np.allclose(cut["logits/rest_logprob"], whole["logits/rest_logprob"], atol=1e-3)


def test_a_capture_in_pieces_is_recorded_and_rechecked_in_pieces(data, tiny_chat, tmp_path, monkeypatch):
    out = tmp_path / "c"
    capture(capture_options(tiny_chat, data, out, layers=(1,), prefill_chunk=33), Recorder())
    assert open_cache(str(out)).manifest.record["prefill_chunk"] == "33"
    asked = []
    monkeypatch.setattr("capture.recheck.run_shard", lambda *a: asked.append(a[5]) or run_shard(*a))
    assert recheck(str(out), tiny_chat, 3, "cpu", False, Recorder()) == []
    assert asked == [33] * 3


def test_going_on_with_other_pieces_warns_and_ends(data, tiny_chat, tmp_path, monkeypatch):
    out, commit = tmp_path / "c", CacheWriter.commit_shard

    class StoppedError(Exception):
        pass

    def stop(self, shard, arrays):
        if shard == 1:
            raise StoppedError
        return commit(self, shard, arrays)

    with monkeypatch.context() as patch:
        patch.setattr(CacheWriter, "commit_shard", stop)
        with pytest.raises(StoppedError):
            capture(capture_options(tiny_chat, data, out, layers=(1,)), Recorder())
    say = Recorder()
    assert capture(capture_options(tiny_chat, data, out, layers=(1,), prefill_chunk=40), say).complete
    assert any("begun with --prefill-chunk none, now it is 40" in text and "rounding" in text for text in say.warnings)
    say = Recorder()
    capture(capture_options(tiny_chat, data, out, layers=(1,), prefill_chunk=8), say)
    assert not say.warnings, "a finished cache has nothing left to differ"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (tf.FalconMambaConfig(vocab_size=2048, hidden_size=32, num_hidden_layers=4, eos_token_id=2), "'falcon_mamba'"),
        (
            tf.DeepseekV32Config(vocab_size=2048, hidden_size=32, num_hidden_layers=4, eos_token_id=2),
            "indexed_attention",
        ),
    ],
)
def test_a_target_that_forgets_is_refused_by_its_config(data, tmp_path, config, reason):
    config.save_pretrained(tmp_path / "m")
    copy_tokenizer(tmp_path / "m")
    with pytest.raises(OptionError, match=rf"--prefill-chunk 64: .*{reason}.*leave the option out"):
        capture(capture_options(str(tmp_path / "m"), data, tmp_path / "c", prefill_chunk=64), Recorder())


@pytest.mark.parametrize("chunk", [3, 9, 64])
@pytest.mark.parametrize("kind", CUT)
def test_the_self_check_passes_what_is_exact(targets, kind, chunk):
    assert 0 < check_pieces(targets[kind], chunk) < 3e-5, (
        "the two ways are not the same arithmetic, but equal to rounding"
    )


class Forgetting(nn.Module):
    """A decoder that begins anew with every call of more than one token."""

    def __init__(self, decoder):
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids, cache, use_cache):  # noqa: ARG002
        return self.decoder(input_ids=input_ids, use_cache=False)


def test_the_self_check_finds_a_decoder_that_forgets(targets):
    target = targets["qwen3"]
    with pytest.raises(TargetError, match=r"--prefill-chunk 64: .*does not continue a sequence exactly"):
        check_pieces(replace(target, decoder=Forgetting(target.decoder)), 64)


@pytest.mark.parametrize("chunk", [5, 64])
def test_the_self_check_looks_across_a_windows_edge(targets, monkeypatch, chunk):
    """A cache that drops one key too many is right for short sequences, and wrong once its window is full."""
    target = targets["gemma3"]
    assert target.config.sliding_window == 8
    update = prefill.DynamicCache.update

    def short(self, key, value, layer, *args, **kwargs):
        keys, values = update(self, key, value, layer, *args, **kwargs)
        held = self.layers[layer]
        if hasattr(held, "sliding_window") and held.get_seq_length() >= held.sliding_window:
            held.keys = held.keys.clone()
            held.keys[:, :, 0] = 0
        return keys, values

    monkeypatch.setattr(prefill.DynamicCache, "update", short)
    monkeypatch.setattr(prefill, "FEW_TOKENS", 8)
    monkeypatch.setattr(prefill, "FEW_ENDS", (1, 7))
    with pytest.raises(TargetError, match="on 16 tokens"):
        check_pieces(target, chunk)


def test_a_capture_checks_its_pieces_before_it_writes(data, tiny_chat, tmp_path, monkeypatch):
    def refuse(_target, chunk):
        raise TargetError(f"no pieces of {chunk}")

    monkeypatch.setattr("capture.run.check_pieces", refuse)
    with pytest.raises(TargetError, match="no pieces of 8"):
        capture(capture_options(tiny_chat, data, tmp_path / "c", prefill_chunk=8), Recorder())
    assert not (tmp_path / "c").exists()


class OldName(Forgetting):
    """A decoder of a model that brings its own code, under which the library's cache has its former name."""

    def forward(self, input_ids, past_key_values, use_cache):
        return self.decoder(input_ids=input_ids, cache=past_key_values, use_cache=use_cache)


def test_a_cache_by_its_former_name(targets):
    decoder = OldName(targets["qwen3"].decoder)
    assert check_pieces(replace(targets["qwen3"], decoder=decoder), 64) == check_pieces(targets["qwen3"], 64)
