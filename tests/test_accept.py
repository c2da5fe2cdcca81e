"""Acceptance over all anchors: the walk to the letter, and the figures against a loop that drafts each block alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cache_fixtures import make_cache
from hypothesis import given
from hypothesis import strategies as st
from reference import MASK, lively_draft, naive_forward, random_head, random_samples, small_config
from torch import Tensor

import draft.accept
from cache.read import open_cache
from draft.accept import accepted_lengths, evaluate_cache, evaluate_samples
from draft.blocks import PackedSamples, anchors_of, block_inputs, make_blocks
from draft.model import Draft
from draft.walk import Figure, answers_of, figure_of, walk_lengths
from schemas.errors import CacheError


def test_accepted_tokens_end_at_a_mismatch_or_an_unsupervised_slot() -> None:
    label = torch.tensor([[1, 2, 3]] * 4)
    token = torch.tensor([[1, 2, 3], [1, 9, 3], [9, 2, 3], [1, 2, 3]])
    valid = torch.tensor([[True, True, True]] * 3 + [[True, False, True]])
    assert accepted_lengths(token, label, valid).tolist() == [3, 1, 0, 1]


def test_the_walk_by_hand() -> None:
    """Two answers: positions 2..6 and 9..10. A block starts at each answer's first token, and never at its last."""
    mask = [False, False, True, True, True, True, True, False, False, True, True]
    assert answers_of(mask) == [(2, 7), (9, 11)]
    assert walk_lengths(mask, {2: 1, 3: 3, 4: 0, 5: 1, 9: 0}) == [1, 0, 1, 0]
    assert walk_lengths(mask, {2: 3, 9: 1}) == [3, 1]
    assert walk_lengths(mask, {2: 4, 9: 1}) == [4, 1]
    assert walk_lengths([True], {}) == [] and walk_lengths([False, True, False], {}) == []


@given(answer=st.lists(st.integers(0, 3), min_size=1, max_size=20), draft=st.integers(0, 3), block=st.integers(2, 5))
def test_the_walk_is_decoding_replayed(answer: list[int], draft: int, block: int) -> None:
    """A target that says `answer`, a draft that always says one token: decoding simulated, and the walk over the finished answer."""
    accepted = {
        anchor: next(
            (k for k in range(block - 1) if anchor + 1 + k >= len(answer) or answer[anchor + 1 + k] != draft), block - 1
        )
        for anchor in range(len(answer))
    }
    decoded, blocks = 1, []
    while decoded < len(answer):
        matches = 0
        while matches < block - 1 and decoded + matches < len(answer) and answer[decoded + matches] == draft:
            matches += 1
        blocks.append(matches)
        decoded = min(decoded + matches + 1, len(answer))
    assert walk_lengths([True] * len(answer), accepted) == blocks


def test_a_figure_is_a_sum_and_a_count() -> None:
    assert figure_of([[1, 0], [], [4]]) == Figure(5, 3)
    assert figure_of([[1, 0], [], [4]]).to_json() == {"accepted": 5, "blocks": 3, "acceptance": 5 / 3 + 1}
    assert figure_of([]).to_json() == {"accepted": 0, "blocks": 0, "acceptance": None}


def naive_scores(made: Draft, state_H: Tensor, logits_V: Tensor, candidates: list[int], before: int) -> list[float]:
    """The selector's scores of candidates after a token."""
    selector = made.candidate_selector
    assert selector is not None
    left = selector.predecessor_codebook[before].double() * (selector.hidden_projection.weight.double() @ state_H)
    return [float(logits_V[each] + left @ selector.successor_codebook[each].double()) for each in candidates]


def naive_evaluation(made: Draft, head: Any, samples: PackedSamples) -> dict[str, Any]:
    """Every anchor's block alone, in float64; tokens chosen, counted and compared one by one."""
    anchors, size = anchors_of(samples, 4), 4
    blocks = make_blocks(samples, anchors, size)
    states = naive_forward(made, samples, head.embed(block_inputs(samples, blocks, MASK)), blocks)
    ids, mask = samples.input_ids_T.tolist(), samples.loss_mask_T.tolist()
    ends = [sum(samples.lengths[: index + 1]) for index in range(len(samples.lengths))]
    selector = made.candidate_selector
    result: dict[str, Any] = {
        "lengths": {},
        "backbone": {},
        "correct": [0] * 3,
        "valid": [0] * 3,
        "recalled": 0,
        "loss": 0.0,
        "selector": 0.0,
    }
    for n, anchor in enumerate(anchors.tolist()):
        end, previous = next(end for end in ends if end > anchor), ids[anchor]
        chosen: dict[str, list[bool]] = {"lengths": [], "backbone": []}
        for k in range(1, size):
            logits = head.lm_head_VH.double() @ states[n, k]
            best, token = int(logits.argmax()), int(logits.argmax())
            candidates = logits.topk(5).indices.tolist()
            if selector is not None:
                walked = naive_scores(made, states[n, k], logits, candidates, previous)
                token = candidates[walked.index(max(walked))]
            previous = token
            inside = anchor + k < end and mask[anchor + k]
            label = ids[anchor + k] if inside else -1
            chosen["lengths"].append(token == label)
            chosen["backbone"].append(best == label)
            if inside:
                result["valid"][k - 1] += 1
                result["correct"][k - 1] += token == label
                result["loss"] -= float(logits.log_softmax(0)[label])
                if selector is not None and label in candidates:
                    result["recalled"] += 1
                    true = torch.tensor(naive_scores(made, states[n, k], logits, candidates, ids[anchor + k - 1]))
                    result["selector"] -= float(true.log_softmax(0)[candidates.index(label)])
        for key, hits in chosen.items():
            result[key][anchor] = [*hits, False].index(False)
    return result


def two_token_samples(lengths: tuple[int, ...]) -> PackedSamples:
    samples = random_samples(lengths)
    return PackedSamples(samples.input_ids_T % 2, samples.loss_mask_T, samples.hidden_TLH, lengths)


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
@torch.no_grad()
def test_evaluation_is_every_block_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, head = lively_draft(small_config(kind), seed=3), random_head()
    # Two tokens in the text, which the head prefers, so that blocks accept something.
    head.lm_head_VH[1] = -head.lm_head_VH[0]
    head.lm_head_VH[2:] *= 0.2
    if made.candidate_selector is not None:
        made.candidate_selector.successor_codebook *= 3
    lengths = (13, 1, 18, 11)
    samples = two_token_samples(lengths)
    monkeypatch.setattr(draft.accept, "slice_rows", lambda *_: 7)
    found = evaluate_samples(made, head, [(["a", "b", "c", "d"], samples)], lengths=True)
    expected = naive_evaluation(made, head, samples)
    accepted = list(expected["lengths"].values())
    assert len(set(accepted)) >= 3, "accepted lengths vary too little to prove anything"
    assert found["uniform"] == Figure(sum(accepted), len(accepted)).to_json()
    walks, start = {}, 0
    for name, length in zip("abcd", lengths, strict=True):
        own = {
            anchor - start: taken for anchor, taken in expected["lengths"].items() if start <= anchor < start + length
        }
        walks[name] = walk_lengths(samples.loss_mask_T.tolist()[start : start + length], own)
        start += length
    assert found["accepted_per_block"] == walks and found["walk"] == figure_of(walks.values()).to_json()
    assert found["accuracy_per_slot"] == [c / v for c, v in zip(expected["correct"], expected["valid"], strict=True)]
    slots = sum(expected["valid"])
    assert found["accuracy"] == sum(expected["correct"]) / slots
    base = expected["loss"] / slots
    if kind == "dflash":
        assert found["loss"] == pytest.approx(base, rel=1e-5)
        assert "backbone" not in found and "candidate_recall" not in found
        return
    assert found["backbone"]["loss"] == pytest.approx(base, rel=1e-5)
    assert found["loss"] == pytest.approx(base + expected["selector"] / expected["recalled"], rel=1e-5)
    assert found["candidate_recall"] == expected["recalled"] / slots
    backbone = list(expected["backbone"].values())
    assert found["backbone"]["uniform"] == Figure(sum(backbone), len(backbone)).to_json()
    assert backbone != accepted, "the selector changed nothing: the test shows nothing"


def cache_draft(kind: str = "dflash2") -> Draft:
    sizes = {"hidden_size": 16, "vocab_size": 40, "mask_token_id": 39, "target_layer_ids": [0, 3]}
    return lively_draft(small_config(kind, **sizes))


@pytest.mark.parametrize("codec", ["f32", "bf16"])
def test_a_caches_split_is_its_samples(tmp_path: Path, codec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make_cache(tmp_path / "hs.zarr", codec=codec)
    cache, made = open_cache(str(tmp_path / "hs.zarr"), [0, 3]), cache_draft()
    rows = [row for row in cache.index.to_pylist() if row["split"] == "val"]
    batches = []
    for row in rows:
        ids, mask = cache.tokens(row["offset"], row["length"])
        hidden = cache.hidden(row["offset"], row["length"], [0, 3])
        batches.append(([row["sample_id"]], PackedSamples(ids, mask, hidden, (row["length"],))))
    assert len(rows) >= 2
    whole = evaluate_cache(made, cache, "val", lengths=True)
    assert_alike(whole, evaluate_samples(made, cache.head(), batches, lengths=True))
    monkeypatch.setattr(draft.accept, "PACKED_TOKENS", 1)
    assert_alike(evaluate_cache(made, cache, "val", lengths=True), whole)
    limited = evaluate_cache(made, cache, "val", lengths=True, limit=1)
    assert list(limited["accepted_per_block"]) == [rows[0]["sample_id"]]
    assert evaluate_cache(made, cache, "train")["uniform"]["blocks"] > whole["uniform"]["blocks"]


def assert_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Counts exactly, losses to rounding."""
    assert found.keys() == expected.keys()
    for key in found:
        if key == "loss":
            assert found[key] == pytest.approx(expected[key], rel=1e-5)
        elif key == "backbone":
            assert_alike(found[key], expected[key])
        else:
            assert found[key] == expected[key], key


def test_a_split_without_samples_is_refused(tmp_path: Path) -> None:
    make_cache(tmp_path / "hs.zarr", codec="f32")
    cache = open_cache(str(tmp_path / "hs.zarr"), [0, 3])
    with pytest.raises(CacheError, match="holds no test samples: evaluate the other split"):
        evaluate_cache(cache_draft(), cache, "test")


def test_samples_without_an_anchor_are_refused() -> None:
    samples = random_samples((5,))
    silent = PackedSamples(samples.input_ids_T, torch.zeros(5, dtype=torch.bool), samples.hidden_TLH, (5,))
    with pytest.raises(CacheError, match="have no anchor"):
        evaluate_samples(lively_draft(small_config()), random_head(), [(["a"], silent)])
