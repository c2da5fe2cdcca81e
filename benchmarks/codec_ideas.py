"""What might store hidden states in less than int4 does, tried on a finished float32 cache and a draft trained from it.

    python benchmarks/codec_ideas.py --cache work/demo/hs.zarr --draft work/demo/dflash2

Prints what each idea takes, what it leaves of the states, and of the draft's acceptance: the walk over the held-out samples when
the draft, which has only seen true states, is given the decoded ones. Ideas that lose nothing are in lossless_ideas.py.

T rows of tokens, L layers, H hidden, S samples, G groups of channels that share a scale, C channels of
a group, W stored bytes.
"""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from cache.calibrate import calibration_samples, widest_channels
from cache.codecs import HiddenCodec
from cache.head import TargetHead
from cache.quantise import pack_nibbles, unpack_nibbles
from cache.read import Cache, open_cache
from draft.attention import layout_of
from draft.blocks import Blocks, PackedSamples, block_inputs, block_labels, block_valid, make_blocks
from draft.files import load_draft
from draft.model import Draft
from draft.propose import propose
from draft.walk import answers_of
from schemas.manifest import Codec

SEARCHED = tuple(
    share / 20 for share in range(20, 8, -1)
)  # of the scale that the largest value asks for: 1 down to 0.45


# --- The ideas: rows [T, H] in float32 and a layer's wide channels in, what would lie on disk and what comes back of it out --


@dataclass(frozen=True)
class Stored:
    """`parts`: the tensors that would lie on disk, T along the first axis. `back_TH`: what is decoded of them."""

    parts: Mapping[str, Tensor]
    back_TH: Tensor

    @property
    def row_bytes(self) -> float:
        """Bytes of a token."""
        return sum(part.nbytes for part in self.parts.values()) / len(self.back_TH)


Inner = Callable[[Tensor], Stored]
Idea = Callable[[Tensor, Sequence[int]], Stored]


def as_cached(rows_TH: Tensor, channels: Sequence[int], codec: Codec) -> Stored:
    """A codec of the cache, as it is."""
    packed = HiddenCodec(codec, {0: tuple(channels)}).pack(rows_TH[:, None], [0])
    return Stored({family: part[0] for family, part in packed.parts.items()}, packed.decode()[:, 0])


def wide_apart(rows_TH: Tensor, channels: Sequence[int], inner: Inner) -> Stored:
    """The wide channels kept apart in bfloat16, all others as `inner` stores them."""
    channel_C = torch.tensor(channels)
    apart_TC = rows_TH[:, channel_C].to(torch.bfloat16)
    stored = inner(rows_TH.index_fill(1, channel_C, 0.0))
    back_TH = stored.back_TH.to(torch.bfloat16).index_copy(1, channel_C, apart_TC)
    return Stored({**stored.parts, "hidden_outliers": apart_TC}, back_TH)


def none_apart(rows_TH: Tensor, _channels: Sequence[int], inner: Inner) -> Stored:
    """No channel kept apart."""
    stored = inner(rows_TH)
    return Stored(stored.parts, stored.back_TH.to(torch.bfloat16))


def scaled(rows_TH: Tensor, bits: int, group: int | None = None, shares: Sequence[float] = (1.0,)) -> Stored:
    """Integers of 3 or 4 bits: a float32 scale for the row, or a bfloat16 one for each group of channels (the last may be short).

    The scale is that of the largest magnitude, times the one of `shares` which leaves the least squared error; what is then
    beyond the largest integer is cut to it.
    """
    largest, width, size = 2 ** (bits - 1) - 1, rows_TH.shape[1], group or rows_TH.shape[1]
    value_TGC = F.pad(rows_TH, (0, -width % size)).unflatten(1, (-1, size))
    peak_TG1 = value_TGC.abs().amax(2, keepdim=True) / largest
    least_TG1, scale_TG1 = torch.full_like(peak_TG1, math.inf), peak_TG1
    for share in shares:
        own_TG1 = peak_TG1 * share if group is None else (peak_TG1 * share).to(torch.bfloat16).float()
        error_TG1 = (nearest(value_TGC, own_TG1, largest) * own_TG1 - value_TGC).square_().sum(2, keepdim=True)
        scale_TG1 = torch.where(error_TG1 < least_TG1, own_TG1, scale_TG1)
        least_TG1 = torch.minimum(error_TG1, least_TG1)
    pack, unpack = (pack_threes, unpack_threes) if bits == 3 else (pack_nibbles, unpack_nibbles)
    packed_TW = pack(nearest(value_TGC, scale_TG1, largest).flatten(1)[:, :width].to(torch.int8))
    kept_TG = scale_TG1[:, :, 0].to(torch.float32 if group is None else torch.bfloat16)
    back_TH = unpack(packed_TW).float() * kept_TG.float().repeat_interleave(size, 1)[:, :width]
    return Stored({"hidden": packed_TW, "hidden_scale": kept_TG}, back_TH)


def nearest(value_TGC: Tensor, scale_TG1: Tensor, largest: int) -> Tensor:
    """The nearest whole multiples of the scale, of at most `largest`; 0 where the scale is 0."""
    return torch.where(scale_TG1 > 0, value_TGC / scale_TG1, 0.0).round_().clamp_(-largest, largest)


def rotated(rows_TH: Tensor, inner: Inner) -> Stored:
    """`inner` on rows that a Hadamard matrix has turned, each channel by a random sign first: no channel is then much wider
    than another. Block-diagonal where H is no power of two: 576 = 9 x 64 turns 64 channels among themselves (QuaRot,
    https://arxiv.org/abs/2404.00456)."""
    width = rows_TH.shape[1]
    turn_CC = hadamard(width & -width)
    sign_H = torch.randint(0, 2, (width,), generator=torch.Generator().manual_seed(0)) * 2.0 - 1.0
    stored = inner(((rows_TH * sign_H).unflatten(1, (-1, len(turn_CC))) @ turn_CC).flatten(1))
    back_TH = (stored.back_TH.unflatten(1, (-1, len(turn_CC))) @ turn_CC).flatten(1) * sign_H
    return Stored(stored.parts, back_TH)


def hadamard(size: int) -> Tensor:
    """The orthonormal Hadamard matrix of a power of two (Sylvester's): symmetric, its own inverse."""
    turn = torch.ones(1, 1)
    while len(turn) < size:
        turn = torch.cat([torch.cat([turn, turn], 1), torch.cat([turn, -turn], 1)])
    return turn / math.sqrt(size)


def pack_threes(values_TH: Tensor) -> Tensor:
    """int8 values of -4..3, eight to three bytes: the first in the lowest three bits. H is a multiple of 8."""
    three_TW8 = values_TH.int().bitwise_and(7).unflatten(1, (-1, 8))
    word_TW1 = (three_TW8 << torch.arange(0, 24, 3)).sum(2, keepdim=True)
    return (word_TW1 >> torch.arange(0, 24, 8)).bitwise_and(255).to(torch.uint8).flatten(1)


def unpack_threes(packed_TW: Tensor) -> Tensor:
    """The int8 values of packed threes."""
    word_TW1 = (packed_TW.int().unflatten(1, (-1, 3)) << torch.arange(0, 24, 8)).sum(2, keepdim=True)
    three_TW8 = (word_TW1 >> torch.arange(0, 24, 3)).bitwise_and(7)
    return torch.where(three_TW8 > 3, three_TW8 - 8, three_TW8).to(torch.int8).flatten(1)


def ideas() -> dict[str, Idea]:
    """What is tried, by name; the first three are the cache's own."""
    tried: dict[str, Idea] = {name: partial(as_cached, codec=name) for name in ("bf16", "int8", "int4")}
    for bits in (4, 3):
        name, row = f"int{bits}", partial(scaled, bits=bits)
        if bits == 3:
            tried[name] = partial(wide_apart, inner=row)
        tried[f"{name}, scale searched"] = partial(wide_apart, inner=partial(row, shares=SEARCHED))
        for group in (128, 64, 32):
            tried[f"{name}, scales of {group}"] = partial(wide_apart, inner=partial(row, group=group))
        tried[f"{name}, scales of 32, searched"] = partial(wide_apart, inner=partial(row, group=32, shares=SEARCHED))
        tried[f"{name}, scales of 32, none apart"] = partial(none_apart, inner=partial(row, group=32))
        turned, blocks = partial(rotated, inner=row), partial(rotated, inner=partial(row, group=64))
        tried[f"{name}, rotated"] = partial(wide_apart, inner=turned)
        searched = partial(rotated, inner=partial(row, shares=SEARCHED))
        tried[f"{name}, rotated, scale searched"] = partial(wide_apart, inner=searched)
        tried[f"{name}, rotated, none apart"] = partial(none_apart, inner=turned)
        tried[f"{name}, rotated, scales of 64"] = partial(wide_apart, inner=blocks)
        tried[f"{name}, rotated, scales of 64, none apart"] = partial(none_apart, inner=blocks)
    return tried


# --- What they cost --------------------------------------------------------------------------------------------------------


def calibrated(cache: Cache) -> dict[int, tuple[int, ...]]:
    """The channels that a capture would keep apart."""
    columns = cache.index.select(["offset", "length"]).to_pydict()
    count = calibration_samples(columns["length"])
    spans = list(zip(columns["offset"][:count], columns["length"][:count], strict=True))
    hidden_TLH = cache.samples(spans, cache.layers)[2].decode()
    return {layer: widest_channels([hidden_TLH[:, place]]) for place, layer in enumerate(cache.layers)}


def walked(draft: Draft, head: TargetHead, samples: PackedSamples, hidden_TLH: Tensor) -> NDArray[np.int64]:
    """[S, 2]: each sample's accepted tokens and blocks, on a walk (draft/walk.py), when the draft is given these states.

    Evaluation drafts from every anchor, this only from those that the walk comes by, one of each sample at a time.
    """
    size, context = draft.config.block_size, draft.context_of(hidden_TLH, samples.lengths)
    ends, mask = np.cumsum(samples.lengths), samples.loss_mask_T.tolist()
    spans: list[list[list[int]]] = []  # of each sample, its answers' next position and end
    for end, length in zip(ends.tolist(), samples.lengths, strict=True):
        start = end - length
        spans.append([[start + first, start + last] for first, last in answers_of(mask[start:end])])
    sums = np.zeros((len(spans), 2), np.int64)
    while True:
        spans = [[span for span in own if span[0] < span[1] - 1] for own in spans]
        live = [place for place, own in enumerate(spans) if own]
        if not live:
            return sums
        blocks = make_blocks(samples, torch.tensor([spans[place][0][0] for place in live]), size)
        input_NB = block_inputs(samples, blocks, draft.config.dflash_config.mask_token_id)
        hidden_NBH = draft.over_context(head.embed(input_NB), context, layout_of(samples.lengths, blocks))
        for place, taken in zip(live, matches(draft, head, samples, blocks, hidden_NBH).tolist(), strict=True):
            sums[place] += (taken, 1)
            spans[place][0][0] += taken + 1


def matches(draft: Draft, head: TargetHead, samples: PackedSamples, blocks: Blocks, hidden_NBH: Tensor) -> Tensor:
    """Drafted tokens that each block accepts, [N]: slot by slot, so that no logits are made of what follows a mismatch."""
    label_NB, valid_NB = block_labels(samples, blocks), block_valid(samples, blocks)
    taken_N, going = torch.zeros(len(label_NB), dtype=torch.int64), torch.arange(len(label_NB))
    for slot in range(1, blocks.block_size):
        going = going[valid_NB[going, slot]]
        if not len(going):
            break
        # What was drafted for the slot before is the true token there, or the block would not go on.
        proposal = propose(draft, head.logits, hidden_NBH[going, slot - 1 : slot + 1], label_NB[going, slot - 1])
        going = going[proposal.token[:, 0] == label_NB[going, slot]]
        taken_N[going] += 1
    return taken_N


def acceptance(walks: NDArray[np.int64], picked: NDArray[np.int64] | slice = slice(None)) -> NDArray[np.float64]:
    """Accepted / blocks + 1, over the samples picked (of the last axis but one)."""
    sums = walks[picked].sum(-2)
    return sums[..., 0] / sums[..., 1] + 1


def difference(walks: NDArray[np.int64], true: NDArray[np.int64]) -> tuple[float, float]:
    """What acceptance gains over the true states, and its standard error: the same samples drawn 2,000 times with replacement."""
    drawn = np.random.default_rng(0).integers(0, len(true), (2000, len(true)))
    return float(acceptance(walks) - acceptance(true)), float(
        (acceptance(walks, drawn) - acceptance(true, drawn)).std()
    )


def error(back_TH: Tensor, true_TH: Tensor) -> float:
    """|stored - state| / |state|, the mean over tokens."""
    return float(((back_TH - true_TH).norm(dim=1) / true_TH.norm(dim=1)).mean())


def lossy(draft: Draft, cache: Cache, names: Sequence[str]) -> None:
    """Print a row for each idea: size, error of each layer (and without the wide channels), acceptance."""
    held_out = [row for row in cache.index.to_pylist() if row["split"] == "val"]
    ids_T, mask_T, states = cache.samples([(row["offset"], row["length"]) for row in held_out], cache.layers)
    samples = PackedSamples(ids_T, mask_T, states.decode(), tuple(row["length"] for row in held_out))
    head, channels, true_TLH = cache.head(), calibrated(cache), samples.hidden_TLH
    true, hidden, large = walked(draft, head, samples, true_TLH), true_TLH.shape[2], torch.randn(8, 4096)
    print(
        f"| idea | bytes a token | of bf16, H {hidden}; 4096 | error by layer | other channels' | acceptance | change |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    print(f"| float32 | {4 * hidden * len(cache.layers):,} | 2; 2 | | | {acceptance(true):.3f} | |", flush=True)
    for name, idea in ((name, idea) for name, idea in ideas().items() if name in names):
        size, back, all_errors, other_errors = 0.0, [], [], []
        for place, layer in enumerate(cache.layers):
            true_TH, apart = true_TLH[:, place], channels[layer]
            stored = idea(true_TH, apart)
            others_H = torch.ones(hidden, dtype=torch.bool).index_fill(0, torch.tensor(apart), False)
            size += stored.row_bytes
            back.append(stored.back_TH)
            all_errors.append(error(stored.back_TH, true_TH))
            other_errors.append(error(stored.back_TH[:, others_H], true_TH[:, others_H]))
        walks = walked(draft, head, samples, torch.stack(back, 1))
        shares = size / len(back) / hidden / 2, idea(large, range(8)).row_bytes / 8192
        change, spread = difference(walks, true)
        errors, others = (" ".join(f"{value:.3f}" for value in values) for values in (all_errors, other_errors))
        print(
            f"| {name} | {size:,.0f} | {shares[0]:.3f}; {shares[1]:.3f} | {errors} | {others} | {acceptance(walks):.3f} "
            f"| {change:+.3f} ± {spread:.3f} |",
            flush=True,
        )


def main() -> None:
    """Try ideas on the held-out samples."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", default="work/demo/hs.zarr", help="a complete one, of codec f32")
    parser.add_argument("--draft", default="work/demo/dflash2", help="a run that was trained from it")
    parser.add_argument("--ideas", nargs="+", default=list(ideas()), choices=list(ideas()), metavar="IDEA")
    options = parser.parse_args()
    draft = load_draft(f"{options.draft}/draft", "cpu", "float32")
    cache = open_cache(options.cache, draft.config.dflash_config.target_layer_ids)
    assert cache.codec.name == "f32", f"--cache {options.cache} holds {cache.codec.name}: give one of codec f32"
    with torch.inference_mode():
        lossy(draft, cache, options.ideas)


if __name__ == "__main__":
    main()
