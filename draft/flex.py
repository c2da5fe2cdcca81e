"""Block attention by torch's flex attention: on CUDA one compiled kernel that skips what no query of a tile sees.

Keys are the packed context, then all blocks' own slots. A query sees one run of each, so four bounds per query say it all, for
any sample, window or causality. T packed tokens, N blocks, B block size, Q = N * B queries, J keys, A query heads, K key-value
heads, D head size; Q and both parts of J are filled up to whole tiles.
"""

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad

from draft.attention import Attend, Layout, Pair
from schemas.errors import DraftError

TILE = 128
# The compiled kernel multiplies tiles of at least this width.
LEAST_WIDTH = 16

TILE_LISTS = [
    f"{full}{axis}_{part}" for full in ("", "full_") for axis in ("kv", "q") for part in ("num_blocks", "indices")
]


def flex_attention_of(layout: Layout, window: int | None, causal: bool = False) -> Attend:
    """What `split_attention` computes, to rounding. On a CPU torch's reference runs, which holds every score: for tests."""
    bounds = query_bounds(layout, window, causal)
    keys = _whole_tiles(sum(layout.tokens)) + bounds.shape[1]
    return partial(_attend, block_mask(bounds, keys), _whole_tiles(sum(layout.tokens)))


def query_bounds(layout: Layout, window: int | None, causal: bool) -> Tensor:
    """int32 [4, Q]: each query sees the keys from bound 0 to before 1 (its context) and from 2 to before 3 (its block).

    A query that only fills a tile sees its own block alone: none is without a key.
    """
    device, size = layout.relative_N.device, layout.block_size
    counts, starts = (torch.tensor(part, device=device) for part in (layout.blocks, layout.starts))
    start_N1 = starts.repeat_interleave(counts)[:, None]
    slot_B = torch.arange(size, device=device)
    stop_NB = (start_N1 + layout.relative_N[:, None]).expand(-1, size)
    first_NB = start_N1.expand(-1, size)
    if window is not None:
        first_NB = torch.minimum(torch.maximum(first_NB, stop_NB + slot_B - window + 1), stop_NB)
    fill = (0, _whole_tiles(stop_NB.numel()) - stop_NB.numel())
    query_Q = torch.arange(_whole_tiles(stop_NB.numel()), device=device)
    own_Q, context = query_Q // size * size, _whole_tiles(sum(layout.tokens))
    last_Q = query_Q + 1 if causal else torch.clamp(own_Q + size, max=len(query_Q))
    context_bounds = [pad(part.flatten(), fill) for part in (first_NB, stop_NB)]
    return torch.stack([*context_bounds, context + own_Q, context + last_Q]).int()


def block_mask(bounds_4Q: Tensor, keys: int) -> BlockMask:
    """The tiles of [Q, J] that any query of theirs sees, and those of them that all see in full: memory is Q * J / 128."""
    first, stop, own_first, own_stop = (part.view(-1, TILE, 1) for part in bounds_4Q)
    low = torch.arange(0, keys, TILE, device=bounds_4Q.device)
    high = low + TILE

    def any_all(first: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
        return ((first < high) & (stop > low) & (first < stop)).any(1), (first <= low) & (stop >= high)

    seen, covered = any_all(first, stop)
    own_seen, own_covered = any_all(own_first, own_stop)
    full = (covered | own_covered).all(1)
    partly = _ordered((seen | own_seen) & ~full)
    mask = BlockMask.from_kv_blocks(
        *partly, *_ordered(full), BLOCK_SIZE=TILE, mask_mod=_visible(*bounds_4Q), seq_lengths=(bounds_4Q.shape[1], keys)
    )
    for name in TILE_LISTS:
        tiles = getattr(mask, name)
        for axis in range(2, tiles.dim()):
            torch._dynamo.maybe_mark_dynamic(tiles, axis)  # type: ignore[no-untyped-call]
    return mask


def _visible(first_Q: Tensor, stop_Q: Tensor, own_first_Q: Tensor, own_stop_Q: Tensor) -> Any:
    # It closes over tensors alone: a number that changes from batch to batch would be compiled in, and compiled again.
    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        context = (key >= first_Q[query]) & (key < stop_Q[query])
        return context | ((key >= own_first_Q[query]) & (key < own_stop_Q[query]))

    return visible


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Counts [1, 1, rows] and column numbers [1, 1, rows, columns] of the true entries, those first."""
    columns = tiles.int().argsort(stable=True, dim=-1, descending=True)
    return tiles.sum(-1).int()[None, None], columns.int()[None, None]


def _attend(mask: BlockMask, context_rows: int, query: Tensor, own: Pair, context: Pair) -> Tensor:
    count, size, heads, width = query.shape
    queries = _whole_tiles(count * size)
    if query.is_cuda and width < LEAST_WIDTH:
        raise DraftError(f"flex attention needs heads of {LEAST_WIDTH} or wider, not {width}: use run.attention=split")

    def heads_first(part: Tensor, rows: int) -> Tensor:
        return pad(part, (0, 0, 0, 0, 0, rows - part.shape[0])).transpose(0, 1)[None]

    query_1AQD = heads_first(query.flatten(0, 1), queries)
    key, value = (
        torch.cat([heads_first(rows, context_rows), heads_first(slots.flatten(0, 1), queries)], 2).to(query.dtype)
        for rows, slots in zip(context, own, strict=True)
    )
    output: Tensor = _kernel(query.device.type)(query_1AQD, key, value, block_mask=mask, enable_gqa=True)
    return output[0, :, : count * size].transpose(0, 1).reshape(count, size, heads * width)


@cache
def _kernel(device: str) -> Any:
    # Lengths change with every batch: compiled once for all of them.
    return flex_attention if device == "cpu" else torch.compile(flex_attention, dynamic=True, fullgraph=True)


def _whole_tiles(count: int) -> int:
    # Two at least: the compiler takes a length of one for a case of its own.
    return max(2, -(-count // TILE)) * TILE
