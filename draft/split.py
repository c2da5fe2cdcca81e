"""Block attention, split in two: scores against the sample's context and scores inside the block share one softmax.

Scores of one block against another are never computed, and blocks are taken a few at a time over no more context than they
see. The backward pass computes the scores again, so memory is linear in blocks plus context. T packed tokens, S context tokens
of a chunk, N blocks, n blocks of a chunk, B block size, A query heads, K key-value heads, G = A / K queries per key-value head,
R = B G queries of a block per key-value head, X = S + B keys that a query of a chunk may see, D head size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draft.attention import Attend, Layout, Pair

# Scores of a chunk: on a CPU they stay in its cache from one pass over them to the next.
CPU_VALUES, GPU_VALUES = 1 << 21, 1 << 26


@dataclass(frozen=True)
class Chunk:
    """Neighbouring blocks of a sample, and the packed rows that any of them sees.

    `bias` is 0 where a key is visible and -inf elsewhere: [n, 1, 1, S], or [n, B, 1, S] with a sliding window; None where there is
    nothing to hide.
    """

    blocks: slice
    rows: slice
    bias: Tensor | None


def split_attention(layout: Layout, window: int | None, heads: int, causal: bool = False) -> Attend:
    """Attention of blocks over their context and themselves, bidirectional inside the block unless `causal`.

    `window` is in tokens and at least the block's size, so no query is left without a key: it sees its own slot. `heads` are the
    queries'.
    """
    values = CPU_VALUES if layout.relative_N.device.type == "cpu" else GPU_VALUES
    chunks = list(_chunks(layout, window, values // (layout.block_size * heads)))
    hidden_BB = None
    if causal:
        ones_BB = torch.ones(layout.block_size, layout.block_size, dtype=torch.bool, device=layout.relative_N.device)
        hidden_BB = ones_BB.triu(1)
    return partial(_attend, chunks, hidden_BB)


def _chunks(layout: Layout, window: int | None, most: int) -> Iterator[Chunk]:
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
            yield Chunk(blocks, slice(start + seen.start, start + high), _bias(layout, window, blocks, seen))
            begin = stop


def _bias(layout: Layout, window: int | None, blocks: slice, seen: range) -> Tensor | None:
    if layout.whole and window is None:
        return None
    anchor_n11 = layout.relative_N[blocks, None, None]
    key_S = torch.arange(seen.start, seen.stop, device=anchor_n11.device)
    visible = key_S < anchor_n11
    if window is not None:
        slot_B1 = torch.arange(layout.block_size, device=anchor_n11.device)[:, None]
        visible = visible & (anchor_n11 + slot_B1 - key_S < window)
    return torch.zeros(visible.shape, device=anchor_n11.device).masked_fill_(~visible, -torch.inf)[:, :, None]


def _attend(chunks: Sequence[Chunk], hidden_BB: Tensor | None, query: Tensor, own: Pair, context: Pair) -> Tensor:
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else own[1].dtype
    with torch.autocast(kind, enabled=False):
        output: Tensor = _SplitAttention.apply(chunks, hidden_BB, dtype, query, *own, *context)  # type: ignore[no-untyped-call]
    return output.flatten(2)


class _SplitAttention(torch.autograd.Function):
    """Attention chunk by chunk, there and back: of scores nothing is kept, and gradients are added up in place.

    (Cut by autograd, every chunk would bring gradients of the size of the whole, nearly all of them zeros.)
    """

    @staticmethod
    def forward(
        ctx: Any, chunks: Sequence[Chunk], hidden_BB: Tensor | None, dtype: torch.dtype, *inputs: Tensor
    ) -> Tensor:
        """`inputs` are query, own keys and values, context's keys and values, as in `Attend`; products are taken in `dtype`."""
        output_NBAD = torch.empty_like(inputs[0], dtype=dtype)
        for chunk in chunks:
            part = _part(chunk, dtype, *inputs)
            context_KnRS, own_KnRB = _context_and_own(_weights(part, chunk.bias, hidden_BB).to(dtype), part)
            output_KnRD = _over_context(context_KnRS, part.value_KSD) + own_KnRB @ part.own_value_KnBD
            _put(output_KnRD, output_NBAD[chunk.blocks], part)
        ctx.chunks, ctx.hidden_BB, ctx.dtype = chunks, hidden_BB, dtype
        ctx.save_for_backward(*inputs, output_NBAD)
        return output_NBAD

    @staticmethod
    def backward(ctx: Any, arriving_NBAD: Tensor) -> tuple[Tensor | None, ...]:
        """With weights P = softmax(S), O = P V: dV = P'dO, dP = dO V', dS = P (dP - rowsum(dO O)), dQ = dS K, dK = dS'Q."""
        *inputs, output_NBAD = ctx.saved_tensors
        # Of context rows the gradients of many chunks meet: in float32, whatever the products are taken in.
        kinds = [None, None, None, torch.float32, torch.float32]
        gradients = [torch.zeros_like(each, dtype=kind) for each, kind in zip(inputs, kinds, strict=True)]
        to_query, to_own_key, to_own_value, to_key, to_value = gradients
        for chunk in ctx.chunks:
            part = _part(chunk, ctx.dtype, *inputs)
            arriving_KnRD = _queries(arriving_NBAD[chunk.blocks], part.kv_heads, ctx.dtype)
            output_KnRD = _queries(output_NBAD[chunk.blocks], part.kv_heads, torch.float32)
            weights_KnRX = _weights(part, chunk.bias, ctx.hidden_BB)
            context_KnRS, own_KnRB = _context_and_own(weights_KnRX.to(ctx.dtype), part)
            to_value[chunk.rows] += _from_queries(context_KnRS, arriving_KnRD)
            to_own_value[chunk.blocks] = (own_KnRB.mT @ arriving_KnRD).permute(1, 2, 0, 3)
            slopes_KnRX = torch.empty_like(weights_KnRX)
            context_KnRS, own_KnRB = _context_and_own(slopes_KnRX, part)
            context_KnRS.copy_(_over_context(arriving_KnRD, part.value_KSD.mT))
            own_KnRB.copy_(arriving_KnRD @ part.own_value_KnBD.mT)
            slopes_KnRX.sub_((arriving_KnRD * output_KnRD).sum(-1, keepdim=True)).mul_(weights_KnRX)
            context_KnRS, own_KnRB = _context_and_own(slopes_KnRX.to(ctx.dtype), part)
            query_KnRD = _over_context(context_KnRS, part.key_KSD) + own_KnRB @ part.own_key_KnBD
            _put(query_KnRD.mul_(part.scale), to_query[chunk.blocks], part)
            to_key[chunk.rows] += _from_queries(context_KnRS, part.query_KnRD)
            to_own_key[chunk.blocks] = (own_KnRB.mT @ part.query_KnRD).permute(1, 2, 0, 3)
        # In the types of the inputs, as autograd wants them.
        return None, None, None, *(each.to(whole.dtype) for each, whole in zip(gradients, inputs, strict=True))


class _Part(NamedTuple):
    """What a chunk computes with, the queries scaled."""

    query_KnRD: Tensor
    own_key_KnBD: Tensor
    own_value_KnBD: Tensor
    key_KSD: Tensor
    value_KSD: Tensor

    @property
    def kv_heads(self) -> int:
        return len(self.key_KSD)

    @property
    def scale(self) -> float:
        return float(self.query_KnRD.shape[-1] ** -0.5)


def _part(
    chunk: Chunk, dtype: torch.dtype, query: Tensor, own_key: Tensor, own_value: Tensor, key: Tensor, value: Tensor
) -> _Part:
    kv_heads, width = key.shape[1:]
    own = (each[chunk.blocks].permute(2, 0, 1, 3).to(dtype) for each in (own_key, own_value))
    context = (each[chunk.rows].transpose(0, 1).to(dtype) for each in (key, value))
    return _Part(_queries(query[chunk.blocks] * width**-0.5, kv_heads, dtype), *own, *context)


def _queries(part_nBAD: Tensor, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """[n, B, A, D] -> [K, n, R, D]: the queries that share keys lie together."""
    count, size, _, width = part_nBAD.shape
    grouped = part_nBAD.view(count, size, kv_heads, -1, width).permute(2, 0, 1, 3, 4)
    return grouped.to(dtype, memory_format=torch.contiguous_format).reshape(kv_heads, count, -1, width)


def _put(part_KnRD: Tensor, into_nBAD: Tensor, part: _Part) -> None:
    """The other way round."""
    count, size, _, width = into_nBAD.shape
    grouped = part_KnRD.view(part.kv_heads, count, size, -1, width).permute(1, 2, 0, 3, 4)
    into_nBAD.view(count, size, part.kv_heads, -1, width).copy_(grouped)


def _weights(part: _Part, bias: Tensor | None, hidden_BB: Tensor | None) -> Tensor:
    """The softmax over the context's rows and the block's own slots, float32 [K, n, R, X]."""
    (kv_heads, count, rows, _), size = part.query_KnRD.shape, part.own_key_KnBD.shape[2]
    scores_KnRX = torch.empty(kv_heads, count, rows, part.key_KSD.shape[1] + size, device=part.query_KnRD.device)
    context_KnRS, own_KnRB = _context_and_own(scores_KnRX, part)
    context_KnRS.copy_(_over_context(part.query_KnRD, part.key_KSD.mT))
    own_KnRB.copy_(part.query_KnRD @ part.own_key_KnBD.mT)
    if bias is not None:
        context_KnRS.view(kv_heads, count, size, rows // size, -1).add_(bias)
    if hidden_BB is not None:
        own_KnRB.view(kv_heads, count, size, rows // size, size).masked_fill_(hidden_BB[:, None], -torch.inf)
    # Each row is read in full before any of it is written.
    return torch.softmax(scores_KnRX, -1, out=scores_KnRX)


def _context_and_own(joined_KnRX: Tensor, part: _Part) -> tuple[Tensor, Tensor]:
    seen = part.key_KSD.shape[1]
    return joined_KnRX[..., :seen], joined_KnRX[..., seen:]


def _over_context(left_KnRX: Tensor, right_KXY: Tensor) -> Tensor:
    """All queries of a chunk times what they have in common, [K, n, R, Y]: one product a key-value head."""
    product = torch.bmm(left_KnRX.flatten(1, 2), right_KXY)
    return product.view(*left_KnRX.shape[:3], product.shape[-1])


def _from_queries(left_KnRX: Tensor, right_KnRY: Tensor) -> Tensor:
    """What all queries of a chunk add to what they have in common, [X, K, Y]."""
    return torch.bmm(left_KnRX.flatten(1, 2).mT, right_KnRY.flatten(1, 2)).transpose(0, 1)
