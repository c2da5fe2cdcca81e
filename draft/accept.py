"""Acceptance on samples that are there already, without the target: every anchor's accepted length, computed once.

T packed tokens, N blocks, B block size, R slots, V vocabulary, K candidates. `_B` counts slots 1..B-1.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cache.head import TargetHead
from cache.read import Cache
from draft.attention import Pair, layout_of
from draft.blocks import Blocks, PackedSamples, anchors_of, block_inputs, block_labels, block_valid, make_blocks
from draft.model import Draft
from draft.propose import Proposal, propose
from draft.sliced_head import SlicedHead, cross_entropy_, slice_rows
from draft.walk import figure_of, walk_lengths
from schemas.errors import CacheError
from schemas.say import Say, Silent

PACKED_TOKENS = 8192


@dataclass
class Tally:
    """What one way of choosing tokens reached so far. The lists have an entry per sample, `correct_B` counts per slot."""

    every_anchor: list[list[int]] = field(default_factory=list)
    walks: list[list[int]] = field(default_factory=list)
    correct_B: Tensor | int = 0

    def add_samples(self, samples: PackedSamples, anchor_N: Tensor, accepted_N: Tensor) -> None:
        """Take in the accepted lengths of all anchors of whole samples."""
        anchors, accepted = anchor_N.tolist(), accepted_N.tolist()
        mask, start, done = samples.loss_mask_T.tolist(), 0, 0
        for length in samples.lengths:
            upto = bisect_left(anchors, start + length, done)
            own = {anchor - start: taken for anchor, taken in zip(anchors[done:upto], accepted[done:upto], strict=True)}
            self.every_anchor.append(list(own.values()))
            self.walks.append(walk_lengths(mask[start : start + length], own))
            start, done = start + length, upto

    def to_json(self, valid_B: Tensor, loss: float) -> dict[str, Any]:
        """Its figures in the words of `--json`; a slot that no block has is null."""
        correct_B = torch.as_tensor(self.correct_B)
        slots = zip(correct_B.tolist(), valid_B.tolist(), strict=True)
        return {
            "uniform": figure_of(self.every_anchor).to_json(),
            "walk": figure_of(self.walks).to_json(),
            "accuracy": int(correct_B.sum()) / int(valid_B.sum()),
            "accuracy_per_slot": [correct / valid if valid else None for correct, valid in slots],
            "loss": loss,
        }


def accepted_lengths(token_NB: Tensor, label_NB: Tensor, valid_NB: Tensor) -> Tensor:
    """Drafted tokens accepted [N]: matches in slots 1..B-1 before the first mismatch or unsupervised slot."""
    return ((token_NB == label_NB) & valid_NB).int().cumprod(1).sum(1)


def evaluate_samples(
    draft: Draft, head: TargetHead, batches: Iterable[tuple[Sequence[str], PackedSamples]], lengths: bool = False
) -> dict[str, Any]:
    """Acceptance over every anchor of packed samples, given with their ids.

    Returns `uniform`, `walk`, `accuracy` (all slots), `accuracy_per_slot` [B-1], `loss` and, with a selector, `backbone` (the
    same of its logits alone) and `candidate_recall`; with `lengths`, `accepted_per_block`: the walk's lengths by sample id.
    `loss` is the mean cross-entropy in nats, unweighted, over supervised slots; with a selector plus that of the selector over
    the slots whose token is a candidate, given the true token before them. A block ends at its first unsupervised slot.
    """
    return report_of((evaluate_pack(draft, head, names, samples) for names, samples in batches), lengths)


@dataclass
class Pack:
    """What was measured on some packed samples: their ids, the tallies, and sums (float64 or counts, on the CPU)."""

    ids: list[str] = field(default_factory=list)
    chosen: Tally = field(default_factory=Tally)
    backbone: Tally = field(default_factory=Tally)
    sums: dict[str, Tensor] = field(default_factory=dict)


def evaluate_pack(draft: Draft, head: TargetHead, names: Sequence[str], samples: PackedSamples) -> Pack:
    """Measure every anchor of packed samples: a part of `evaluate_samples` that can be done anywhere."""
    anchor_N, pack = anchors_of(samples, draft.config.block_size), Pack(list(names))
    taken_N, taken_backbone_N = [anchor_N[:0]], [anchor_N[:0]]
    for accepted_N, accepted_backbone_N, counts in _slices(draft, head, samples, anchor_N):
        taken_N.append(accepted_N)
        taken_backbone_N.append(accepted_backbone_N)
        pack.sums = {key: pack.sums.get(key, 0) + value for key, value in counts.items()}
    pack.sums = {key: value.cpu() for key, value in pack.sums.items()}
    pack.chosen.add_samples(samples, anchor_N, torch.cat(taken_N))
    pack.backbone.add_samples(samples, anchor_N, torch.cat(taken_backbone_N))
    return pack


def report_of(packs: Iterable[Pack], lengths: bool = False) -> dict[str, Any]:
    """What `evaluate_samples` returns, from its parts in order."""
    chosen, backbone, ids = Tally(), Tally(), list[str]()
    sums: dict[str, Tensor] = {}
    for pack in packs:
        ids.extend(pack.ids)
        for total, part in ((chosen, pack.chosen), (backbone, pack.backbone)):
            total.every_anchor.extend(part.every_anchor)
            total.walks.extend(part.walks)
        sums = {**sums, **{key: sums.get(key, 0) + value for key, value in pack.sums.items()}}
    if not sums:
        raise CacheError(
            "the samples have no anchor (a supervised token with a supervised one after it): evaluate others"
        )
    valid_B, slots = sums["valid_B"], int(sums["valid_B"].sum())
    chosen.correct_B, backbone.correct_B = sums["correct_B"], sums["backbone_correct_B"]
    loss = float(sums["base_loss"]) / slots
    if "recalled" not in sums:
        result = chosen.to_json(valid_B, loss)
    else:
        recalled = int(sums["recalled"])
        selector_loss = float(sums["selector_loss"]) / recalled if recalled else 0.0
        result = chosen.to_json(valid_B, loss + selector_loss)
        result |= {"backbone": backbone.to_json(valid_B, loss), "candidate_recall": recalled / slots}
    if lengths:
        result["accepted_per_block"] = dict(zip(ids, chosen.walks, strict=True))
    return result


@torch.inference_mode()
def _slices(
    draft: Draft, head: TargetHead, samples: PackedSamples, anchor_N: Tensor
) -> Iterator[tuple[Tensor, Tensor, dict[str, Tensor]]]:
    """Accepted lengths (proposed, backbone) and counts, for slices of blocks whose logits fit; the context is projected once."""
    if not len(anchor_N):
        return
    context = draft.context_of(samples.hidden_TLH, samples.lengths)
    drafted = draft.config.block_size - 1
    step = max(1, slice_rows(draft.config.vocab_size, anchor_N.device, torch.float32) // drafted)
    rows = min(step, len(anchor_N)) * drafted
    sliced = SlicedHead(head, rows, rows)
    for part_N in torch.split(anchor_N, step):
        yield _measure(draft, sliced, samples, context, make_blocks(samples, part_N, draft.config.block_size))


def _measure(
    draft: Draft, sliced: SlicedHead, samples: PackedSamples, context: list[Pair], blocks: Blocks
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    input_NB = block_inputs(samples, blocks, draft.config.dflash_config.mask_token_id)
    hidden_NBH = draft.over_context(sliced.head.embed(input_NB), context, layout_of(samples.lengths, blocks))
    proposal = propose(draft, sliced.all_logits, hidden_NBH, input_NB[:, 0])
    labels_NB = block_labels(samples, blocks)
    label_NB, valid_NB = labels_NB[:, 1:], block_valid(samples, blocks)[:, 1:]
    counts = {
        "valid_B": valid_NB.sum(0),
        "correct_B": ((proposal.token == label_NB) & valid_NB).sum(0),
        "backbone_correct_B": ((proposal.backbone == label_NB) & valid_NB).sum(0),
    }
    if proposal.candidate is not None:
        counts |= _selector_counts(draft, proposal, hidden_NBH[:, 1:], labels_NB, valid_NB)
    counts["base_loss"] = _losses_(proposal, label_NB)[valid_NB].sum().double()
    accepted = [accepted_lengths(tokens, label_NB, valid_NB) for tokens in (proposal.token, proposal.backbone)]
    return accepted[0], accepted[1], counts


def _losses_(proposal: Proposal, label_NB: Tensor) -> Tensor:
    """Cross-entropy [N, B-1] of the backbone; the logits are lost."""
    best_NB1 = proposal.backbone[..., None]
    top_NB1 = proposal.logits.gather(2, best_NB1)
    flat = (part.flatten(0, 1) for part in (proposal.logits, label_NB[..., None], top_NB1, best_NB1))
    return cross_entropy_(*flat).view_as(label_NB)


def _selector_counts(
    draft: Draft, proposal: Proposal, hidden_NBH: Tensor, labels_NB: Tensor, valid_NB: Tensor
) -> dict[str, Tensor]:
    """How many true tokens are candidates, and the selector's cross-entropy on those, given the true token before each."""
    assert draft.candidate_selector is not None and proposal.candidate is not None
    match_NBK = (proposal.candidate == labels_NB[:, 1:, None]) & valid_NB[:, :, None]
    kept_NB = match_NBK.any(2)
    candidate_RK = proposal.candidate[kept_NB]
    unary_RK = proposal.logits[kept_NB].gather(1, candidate_RK)
    scores_RK = draft.candidate_selector.scores(hidden_NBH[kept_NB], unary_RK, candidate_RK, labels_NB[:, :-1][kept_NB])
    loss = F.cross_entropy(scores_RK.float(), match_NBK[kept_NB].int().argmax(1), reduction="sum")
    return {"recalled": kept_NB.sum(), "selector_loss": loss.double()}


def evaluate_cache(
    draft: Draft,
    cache: Cache,
    split: str = "val",
    *,
    lengths: bool = False,
    limit: int | None = None,
    say: Say | None = None,
) -> dict[str, Any]:
    """`evaluate_samples` over a split of a cache (its first `limit` samples), states as its codec stores them.

    Raises CacheError where the split holds no samples.
    """
    rows = [row for row in cache.index.to_pylist() if row["split"] == split][:limit]
    if not rows:
        raise CacheError(
            f"{cache.path} holds no {split} samples: evaluate the other split, or capture with another --val-fraction"
        )
    device, dtype = draft.fc.weight.device, draft.fc.weight.dtype
    return evaluate_samples(draft, cache.head().to(device, dtype), _read(draft, cache, rows, say or Silent()), lengths)


def _read(
    draft: Draft, cache: Cache, rows: list[dict[str, Any]], say: Say
) -> Iterator[tuple[list[str], PackedSamples]]:
    """Samples packed up to a number of tokens, on the draft's device."""
    done = 0
    while done < len(rows):
        first, tokens = done, 0
        while done < len(rows) and (done == first or tokens + rows[done]["length"] <= PACKED_TOKENS):
            tokens += rows[done]["length"]
            done += 1
        yield [row["sample_id"] for row in rows[first:done]], _packed(draft, cache, rows[first:done])
        say.progress("evaluating", done, len(rows))


def _packed(draft: Draft, cache: Cache, rows: list[dict[str, Any]]) -> PackedSamples:
    spans = [(row["offset"], row["length"]) for row in rows]
    ids_T, mask_T, states = cache.samples(spans, draft.config.dflash_config.target_layer_ids)
    return PackedSamples(ids_T, mask_T, states, tuple(length for _, length in spans)).to(draft.fc.weight.device)
