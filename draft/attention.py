"""Block attention, split in two: scores against the sample's context and scores inside the block share one softmax.

Scores of one block against another are never computed, and the context's are computed per sample, so memory is linear in
blocks times context. T packed tokens, S context tokens of one sample, N blocks, n blocks of one sample, B block size, A query
heads, K key-value heads, G = A / K queries per key-value head, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draft.blocks import Blocks

Masks = list[Tensor | None]


@dataclass(frozen=True)
class Layout:
    """Which context rows each run of blocks sees; made once per forward and shared by the layers.

    Sample i has `blocks[i]` blocks and `tokens[i]` packed rows, of which the first `context[i]` come before its last anchor.
    `relative_N` is each block's anchor counted from its sample's first row; `whole` says that every block's context is all there is.
    """

    blocks: tuple[int, ...]
    tokens: tuple[int, ...]
    context: tuple[int, ...]
    relative_N: Tensor
    block_size: int
    whole: bool = False

    def masks(self, window: int | None, dtype: torch.dtype) -> Masks:
        """For each sample, 0 where a key is visible and -inf elsewhere: [n, 1, 1, S], or [n, B, 1, S] with a sliding window.

        None where there is nothing to hide.
        """
        if self.whole and window is None:
            return [None] * len(self.blocks)
        parts: Masks = []
        for anchor_n, size in zip(torch.split(self.relative_N, list(self.blocks)), self.context, strict=True):
            key_S = torch.arange(size, device=anchor_n.device)
            seen = key_S < anchor_n[:, None, None]
            if window is not None:
                slot_B1 = torch.arange(self.block_size, device=anchor_n.device)[:, None]
                seen = seen & (anchor_n[:, None, None] + slot_B1 - key_S < window)
            bias = torch.zeros(seen.shape, dtype=dtype, device=anchor_n.device).masked_fill_(~seen, -torch.inf)
            parts.append(bias[:, :, None])
        return parts


def layout_of(lengths: Sequence[int], blocks: Blocks) -> Layout:
    """The layout of packed samples: a block's context is every row of its sample strictly before its anchor."""
    starts = torch.tensor([0, *lengths[:-1]], device=blocks.anchor_N.device).cumsum(0)
    relative_N = blocks.anchor_N - starts[blocks.sample_N]
    counts = torch.bincount(blocks.sample_N, minlength=len(lengths)).tolist()
    deepest = torch.zeros(len(lengths), dtype=relative_N.dtype, device=relative_N.device)
    deepest.scatter_reduce_(0, blocks.sample_N, relative_N, "amax")
    return Layout(tuple(counts), tuple(lengths), tuple(deepest.tolist()), relative_N, blocks.block_size)


def attend(
    query: Tensor, own: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor], layout: Layout, masks: Masks
) -> Tensor:
    """Attention of blocks over their context and themselves, bidirectional inside the block.

    `query` [N, B, A, D]; `own` keys and values [N, B, K, D]; `context` keys and values [T, K, D]; all normed and rotated.
    Returns [N, B, A * D].
    """
    count, size, heads, width = query.shape
    kv_heads = own[0].shape[2]
    group = heads // kv_heads
    scaled = (query * width**-0.5).view(count, size, kv_heads, group, width)
    query_KNRD = scaled.permute(2, 0, 1, 3, 4).reshape(kv_heads, count, size * group, width)
    own_key, own_value = (part.permute(2, 0, 1, 3) for part in own)
    own_scores = torch.split(query_KNRD @ own_key.transpose(-1, -2), list(layout.blocks), 1)
    queries = torch.split(query_KNRD, list(layout.blocks), 1)
    keys, values = (_context_parts(part.transpose(0, 1), layout) for part in context)

    from_context, own_weights = [], []
    for index, mask in enumerate(masks):
        if not layout.blocks[index]:
            continue
        blocks, seen = layout.blocks[index], layout.context[index]
        flat = (kv_heads, blocks * size * group)
        scores = torch.bmm(queries[index].reshape(*flat, width), keys[index].transpose(1, 2))
        if mask is not None:
            scores = scores.view(kv_heads, blocks, size, group, seen) + mask
        scores = torch.cat([scores.view(kv_heads, blocks, size * group, seen), own_scores[index]], -1)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(own_value.dtype)
        context_weights, block_weights = torch.split(weights, [seen, size], -1)
        from_context.append(torch.bmm(context_weights.reshape(*flat, seen), values[index]))
        own_weights.append(block_weights)
    output = torch.cat(from_context, 1).view(query_KNRD.shape) + torch.cat(own_weights, 1) @ own_value
    output = output.view(kv_heads, count, size, group, width).permute(1, 2, 0, 3, 4)
    return output.reshape(count, size, heads * width)


def _context_parts(packed_KTD: Tensor, layout: Layout) -> list[Tensor]:
    """Each sample's context rows, [K, S, D]; the rows from its last anchor on are left out."""
    sizes = [size for total, seen in zip(layout.tokens, layout.context, strict=True) for size in (seen, total - seen)]
    return list(torch.split(packed_KTD, sizes, 1)[::2])
