"""Every kind of target, captured whole and compared with hooks on a plain forward of a model loaded by other means.

T positions of one sample, H hidden size, V vocabulary, K top-k.
"""

from functools import reduce
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf
from capture_fixtures import Recorder, capture_options, shipped_rows, write_jsonl
from safetensors.torch import load_file
from target_fixtures import KINDS, LAYERS, make_target
from train_fixtures import options as train_options

from cache.read import open_cache
from capture.run import capture
from draft.accept import evaluate_cache
from draft.files import load_draft
from train.run import train

ROWS = 6
WRAPPED = {"qwen3.5-wrapped": "model.language_model.", "kimi-k2.5": "model.language_model."}
# What the record says, as the architecture's published code computes it.
NORMS = {"qwen3.5": "rms, 1 + weight", "qwen3.5-wrapped": "rms, 1 + weight", "gemma3": "rms, 1 + weight"}
SCALES = {"gemma3": (32**0.5, 1.0, 3.0), "granite": (6.0, 0.25, None)}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_jsonl(tmp_path_factory.mktemp("rows") / "rows.jsonl", shipped_rows(ROWS))


@pytest.fixture(scope="module")
def captured(tmp_path_factory, data):
    """kind -> (the target's folder, a complete cache of all its layers), each made once."""
    folder, made = tmp_path_factory.mktemp("kinds"), {}

    def get(kind):
        if kind not in made:
            target, out = make_target(kind, folder / kind), folder / f"{kind}.zarr"
            capture(capture_options(target, data, out, layers=tuple(range(LAYERS)), top_k=6), Recorder())
            made[kind] = Path(target), out
        return made[kind]

    return get


def reference(folder, prefix="model.", auto=tf.AutoModelForCausalLM):
    """`hooked` of the model that transformers loads, and the model."""
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    return hooked(model, prefix), model


def hooked(model, prefix="model."):
    """ids -> every layer's output [T, H], logits [T, V], and the embedding rows as they enter layer 0."""
    layers = reduce(getattr, f"{prefix}layers".split("."), model)
    entered, states = [], []
    layers[0].register_forward_pre_hook(
        lambda _m, args, kwargs: entered.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    for layer in layers:
        layer.register_forward_hook(lambda _m, _a, out: states.append(out[0] if isinstance(out, tuple) else out))

    def run(ids):
        entered.clear()
        states.clear()
        with torch.inference_mode():
            logits_TV = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        return [state[0] for state in states], logits_TV, entered[0][0]

    return run


def check_rows(out, run):
    """Every sample of the cache: hidden rows, log-probabilities, and the embedding's scale, against the reference."""
    cache = open_cache(str(out))
    assert len(cache.index) >= ROWS - 1
    for row in cache.index.to_pylist():
        ids_T, mask_T = cache.tokens(row["offset"], row["length"])
        states, logits_TV, entered_TH = run(ids_T.tolist())
        hidden_TLH = cache.hidden(row["offset"], row["length"], cache.layers)
        for place, layer in enumerate(cache.layers):
            error = (hidden_TLH[:, place] - states[layer]).norm(dim=-1) / states[layer].norm(dim=-1)
            assert error.max() <= 1e-3 and error.median() <= 1e-5, layer
        logprob_TV = logits_TV.double().log_softmax(-1)
        ids_TK, stored_TK, rest_T = cache.topk(row["offset"], row["length"])
        wanted = torch.from_numpy(np.append(mask_T.numpy()[1:], 0).astype(bool))
        assert wanted.any()
        best_TK = logprob_TV.topk(ids_TK.shape[1]).values
        ours_TK = logprob_TV.gather(1, ids_TK.long())
        assert torch.allclose(ours_TK[wanted], best_TK[wanted], atol=1e-3)
        assert torch.allclose(stored_TK[wanted].double(), best_TK[wanted], rtol=1e-3, atol=1e-3)
        others_T = logprob_TV.scatter(1, ids_TK.long(), -torch.inf).logsumexp(-1)
        assert torch.allclose(rest_T[wanted].double(), others_T[wanted], atol=1e-3)
        rows_TH = cache.head().embed_VH[ids_T.long()].float() * cache.manifest.identity.target.embedding_scale
        assert torch.allclose(rows_TH, entered_TH, rtol=1e-5, atol=1e-6)


def check_files(out, model, norm):
    """head.safetensors, against the reference's own parameters."""
    stored = load_file(out / "target" / "head.safetensors")
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    tied = embedding.data_ptr() == head.data_ptr()
    assert open_cache(str(out)).manifest.identity.target.tied == tied
    assert sorted(stored) == ["embed_tokens.weight", *([] if tied else ["lm_head.weight"]), "norm.weight"]
    assert torch.equal(stored["embed_tokens.weight"], embedding)
    assert tied or torch.equal(stored["lm_head.weight"], head)
    assert torch.equal(stored["norm.weight"], norm.weight)
    return tied


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_cache_holds_what_a_plain_forward_computes(captured, kind):
    folder, out = captured(kind)
    prefix = WRAPPED.get(kind, "model.")
    auto = tf.AutoModelForImageTextToText if kind in WRAPPED else tf.AutoModelForCausalLM
    run, model = reference(folder, prefix, auto)
    check_rows(out, run)
    tied = check_files(out, model, reduce(getattr, f"{prefix}norm".split("."), model))
    assert tied == (kind in ("qwen3-tied", "gemma3"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_manifest_says_what_a_draft_needs_of_the_target(captured, kind):
    manifest = open_cache(str(captured(kind)[1])).manifest
    target, record = manifest.identity.target, manifest.record
    scales = (target.embedding_scale, target.logit_scale, target.logit_softcap)
    assert scales == SCALES.get(kind, (1.0, 1.0, None))
    assert record["norm"] == NORMS.get(kind, "rms, weight")
    assert float(record["norm_eps"]) in (1e-5, 1e-6)
    assert ("rope_theta" in record["rope"]) == (kind != "kimi-linear")
    assert ('"yarn"' in record["rope"]) == (kind in ("gpt-oss", "deepseek-v3", "kimi-k2.5"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_trains_and_is_measured_on_each(captured, tmp_path, kind):
    out = str(captured(kind)[1])
    data = {"batch_tokens": 256, "anchors": 4}
    options = train_options(draft={"kind": "dflash2"}, data=data, run={"steps": 2, "log_every": 1, "layers": (0, 2)})
    train(options, out, str(tmp_path / "run"), False, Recorder())
    draft = load_draft(tmp_path / "run" / "draft", torch.device("cpu"), "float32")
    own = draft.config
    assert (own.hidden_size, own.vocab_size, own.num_target_layers) == (32, 2048, LAYERS)
    cache = open_cache(out, (0, 2))
    figures = evaluate_cache(draft, cache, "val")
    assert figures["walk"]["blocks"] > 0 and figures["walk"]["acceptance"] >= 1
