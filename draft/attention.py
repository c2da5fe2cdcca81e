"""Block attention, split in two: scores against the sample's context and scores inside the block share one softmax.

Scores of one block against another are never computed, and blocks are taken a few at a time over no more context than they
see, so memory is linear in blocks times context, and beyond a size nothing of it is kept for the backward pass. T packed tokens,
S context tokens of a chunk, N blocks, n blocks of a chunk, B block size, A query heads, K key-value heads, G = A / K queries
per key-value head, D head size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from draft.blocks import Blocks

Pair = tuple[Tensor, Tensor]
# (query [N, B, A, D], own keys and values [N, B, K, D], context keys and values [T, K, D], all normed and rotated) -> [N, B, A * D].
Attend = Callable[[Tensor, Pair, Pair], Tensor]

# Scores of a chunk: on a CPU they stay in its cache from one pass over them to the next.
CPU_VALUES, GPU_VALUES = 1 << 20, 1 << 26
# Scores of a layer beyond which they are computed again in the backward pass, a fifth more work, instead of kept: 256 MiB in float32.
KEPT_VALUES = 1 << 26


@dataclass(frozen=True)
class Layout:
    """Which context rows each run of blocks sees; made once per forward and shared by the layers.

    Sample i has `blocks[i]` blocks and `tokens[i]` packed rows. `relative_N` is each block's anchor counted from its sample's first
    row; `whole` says that every block's context is all rows of its sample.
    """

    blocks: tuple[int, ...]
    tokens: tuple[int, ...]
    relative_N: Tensor
    block_size: int
    whole: bool = False

    @property
    def starts(self) -> list[int]:
        """Each sample's first packed row."""
        return [0, *accumulate(self.tokens)][:-1]


@dataclass(frozen=True)
class Chunk:
    """Neighbouring blocks of a sample, and the packed rows that any of them sees.

    `bias` is 0 where a key is visible and -inf elsewhere: [n, 1, 1, S], or [n, B, 1, S] with a sliding window; None where there is
    nothing to hide.
    """

    blocks: slice
    rows: slice
    bias: Tensor | None


def layout_of(lengths: Sequence[int], blocks: Blocks) -> Layout:
    """The layout of packed samples: a block's context is every row of its sample strictly before its anchor."""
    starts = torch.tensor([0, *lengths[:-1]], device=blocks.anchor_N.device).cumsum(0)
    relative_N = blocks.anchor_N - starts[blocks.sample_N]
    counts = torch.bincount(blocks.sample_N, minlength=len(lengths)).tolist()
    return Layout(tuple(counts), tuple(lengths), relative_N, blocks.block_size)


def split_attention(layout: Layout, window: int | None, heads: int, dtype: torch.dtype, causal: bool = False) -> Attend:
    """Attention of blocks over their context and themselves, bidirectional inside the block unless `causal`.

    `window` is in tokens and at least the block's size, so no query is left without a key: it sees its own slot. `heads` are the
    queries', `dtype` the scores'.
    """
    values = CPU_VALUES if layout.relative_N.device.type == "cpu" else GPU_VALUES
    chunks = list(_chunks(layout, window, values // (layout.block_size * heads), dtype))
    total = sum((c.blocks.stop - c.blocks.start) * (c.rows.stop - c.rows.start) for c in chunks)
    keep = total * layout.block_size * heads <= KEPT_VALUES
    hidden_BB = None
    if causal:
        ones_BB = torch.ones(layout.block_size, layout.block_size, dtype=torch.bool, device=layout.relative_N.device)
        hidden_BB = ones_BB.triu(1)
    return partial(_attend, chunks, keep, hidden_BB)


def _chunks(layout: Layout, window: int | None, most: int, dtype: torch.dtype) -> Iterator[Chunk]:
    """As many blocks at a time as keep blocks times context under `most`, but at least one."""
    anchors, first = layout.relative_N.tolist(), 0
    for start, tokens, count in zip(layout.starts, layout.tokens, layout.blocks, strict=True):
        begin, end = first, first + count
        first = end
        while begin < end:
            low = 0 if window is None else max(0, anchors[begin] - window + 1)
            stop = begin + 1
            while stop < end and (stop + 1 - begin) * (anchors[stop] - low) <= most:
                stop += 1
            high = tokens if layout.whole else anchors[stop - 1]
            blocks, seen = slice(begin, stop), range(min(low, high), high)
            yield Chunk(blocks, slice(start + seen.start, start + high), _bias(layout, window, blocks, seen, dtype))
            begin = stop


def _bias(layout: Layout, window: int | None, blocks: slice, seen: range, dtype: torch.dtype) -> Tensor | None:
    if layout.whole and window is None:
        return None
    anchor_n11 = layout.relative_N[blocks, None, None]
    key_S = torch.arange(seen.start, seen.stop, device=anchor_n11.device)
    visible = key_S < anchor_n11
    if window is not None:
        slot_B1 = torch.arange(layout.block_size, device=anchor_n11.device)[:, None]
        visible = visible & (anchor_n11 + slot_B1 - key_S < window)
    bias = torch.zeros(visible.shape, dtype=dtype, device=anchor_n11.device).masked_fill_(~visible, -torch.inf)
    return bias[:, :, None]


def _attend(
    chunks: Sequence[Chunk], keep: bool, hidden_BB: Tensor | None, query: Tensor, own: Pair, context: Pair
) -> Tensor:
    count, size, heads, width = query.shape
    kv_heads = own[0].shape[2]
    scaled = (query * width**-0.5).view(count, size, kv_heads, heads // kv_heads, width)
    query_KNBGD = scaled.permute(2, 0, 1, 3, 4)
    own_key, own_value = (part.permute(2, 0, 1, 3) for part in own)
    key_KTD, value_KTD = (part.transpose(0, 1) for part in context)
    outputs = []
    for chunk in chunks:
        inputs = (
            query_KNBGD[:, chunk.blocks],
            own_key[:, chunk.blocks],
            own_value[:, chunk.blocks],
            key_KTD[:, chunk.rows],
            value_KTD[:, chunk.rows],
        )
        if keep or not torch.is_grad_enabled():
            outputs.append(_chunk(chunk.bias, hidden_BB, *inputs))
        else:
            again = partial(_chunk, chunk.bias, hidden_BB)
            outputs.append(checkpoint(again, *inputs, use_reentrant=False, preserve_rng_state=False))
    output = torch.cat(outputs, 1) if outputs else query_KNBGD
    return output.permute(1, 2, 0, 3, 4).reshape(count, size, heads * width)


def _chunk(
    bias: Tensor | None,
    hidden_BB: Tensor | None,
    query_KnBGD: Tensor,
    own_key: Tensor,
    own_value: Tensor,
    key_KSD: Tensor,
    value_KSD: Tensor,
) -> Tensor:
    """One chunk: [K, n, B, G, D] -> the same."""
    kv_heads, count, size, group, width = query_KnBGD.shape
    seen, flat = key_KSD.shape[1], (kv_heads, count * size * group)
    query_KnRD = query_KnBGD.reshape(kv_heads, count, size * group, width)
    scores = torch.bmm(query_KnRD.view(*flat, width), key_KSD.transpose(1, 2))
    if bias is not None:
        scores = scores.view(kv_heads, count, size, group, seen) + bias
    own_scores = query_KnRD @ own_key.transpose(-1, -2)
    if hidden_BB is not None:
        own_scores = own_scores.view(kv_heads, count, size, group, size)
        own_scores = own_scores.masked_fill(hidden_BB[:, None], -torch.inf).view(kv_heads, count, size * group, size)
    scores = torch.cat([scores.view(kv_heads, count, size * group, seen), own_scores], -1)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(own_value.dtype)
    context_weights, own_weights = torch.split(weights, [seen, size], -1)
    output = torch.bmm(context_weights.reshape(*flat, seen), value_KSD).view(query_KnRD.shape) + own_weights @ own_value
    return output.view(kv_heads, count, size, group, width)
