"""The target's forward passes over one shard of the plan, into the arrays of that shard.

Shape suffixes: b sequences of a batch, m its longest, n columns of a piece of it, R their real rows one after the other,
H hidden size, T rows of a shard, V vocabulary, K top-k.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache.codecs import HiddenCodec
from schemas.arrays import array_specs
from schemas.errors import CaptureFault
from schemas.manifest import Identity
from target.head import HeadTraits, topk_of
from target.layers import tap_layers
from target.load import Target
from target.prefill import even_ends, forward_pieces


@dataclass(frozen=True)
class ShardPlan:
    """The samples of one shard by row: `start` counts rows from the shard's first, `batch` forward passes from 0."""

    sample_ids: list[str]
    start: NDArray[np.int64]
    length: NDArray[np.int64]
    batch: NDArray[np.int64]
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]


@dataclass(frozen=True)
class Batch:
    """One forward pass: right-padded ids, and for its real rows the place in the padded batch and in the shard.

    `wanted_R` marks the rows whose next token is supervised: only they need the head.
    """

    ids_bm: NDArray[np.int64]
    place_R: NDArray[np.int64]
    row_R: NDArray[np.int64]
    wanted_R: NDArray[np.bool_]
    samples: NDArray[np.int64]


def shard_plan(plan: pa.Table, shard: int, shard_tokens: int) -> ShardPlan:
    """The part of the plan's table that one shard is."""
    shards = plan["shard"].to_numpy()
    first, last = np.searchsorted(shards, [shard, shard + 1])
    part = plan.slice(first, last - first).combine_chunks()
    start = part["offset"].to_numpy() - shard * shard_tokens
    length = part["length"].to_numpy().astype(np.int64)
    ids, mask = (
        np.concatenate([piece.flatten().to_numpy() for piece in part[name].chunks])
        for name in ("input_ids", "loss_mask")
    )
    assert len(ids) == len(mask) == length.sum()
    return ShardPlan(part["sample_id"].to_pylist(), start, length, part["batch"].to_numpy().astype(np.int64), ids, mask)


def token_arrays(plan: ShardPlan, shard_tokens: int) -> dict[str, NDArray[np.generic]]:
    """tokens/input_ids and tokens/loss_mask of the shard; rows of no sample are zero."""
    rows = _sample_rows(plan.start, plan.length)
    ids, mask = np.zeros(shard_tokens, dtype=np.int32), np.zeros(shard_tokens, dtype=np.uint8)
    ids[rows], mask[rows] = plan.input_ids, plan.loss_mask
    return {"tokens/input_ids": ids, "tokens/loss_mask": mask}


def _sample_rows(start: NDArray[np.int64], length: NDArray[np.int64]) -> NDArray[np.int64]:
    # The shard's rows of these samples, one sample after the other.
    before = np.cumsum(length) - length
    return np.repeat(start - before, length) + np.arange(length.sum())


def make_batch(plan: ShardPlan, number: int, ids: NDArray[np.int32]) -> Batch:
    """Forward pass `number` of the shard, whose token ids by row are `ids`.

    Padding comes after the real tokens and is id 0. Attention is causal, so nothing to the right of a row can touch it:
    no attention mask is needed.
    """
    samples = np.flatnonzero(plan.batch == number)
    start, length = plan.start[samples], plan.length[samples]
    width = int(length.max())
    row_R = _sample_rows(start, length)
    place_R = _sample_rows(np.arange(len(samples)) * width, length)
    ids_bm = np.zeros(len(samples) * width, dtype=np.int64)
    ids_bm[place_R] = ids[row_R]
    first = (np.cumsum(plan.length) - plan.length)[samples]
    wanted_R = np.append(plan.loss_mask[1:], 0)[_sample_rows(first, length)].astype(bool)
    # After a sample's last row comes another sample's first.
    wanted_R[np.cumsum(length) - 1] = False
    return Batch(ids_bm.reshape(len(samples), width), place_R, row_R, wanted_R, samples)


def cut_batch(batch: Batch, ends: list[int]) -> Iterator[Batch]:
    """The batch in pieces of columns; each names its own rows alone."""
    width, start = batch.ids_bm.shape[1], 0
    sequence_R, column_R = np.divmod(batch.place_R, width)
    for end in ends:
        here = (column_R >= start) & (column_R < end)
        place_R = sequence_R[here] * (end - start) + column_R[here] - start
        ids_bn = batch.ids_bm[:, start:end]
        yield Batch(ids_bn, place_R, batch.row_R[here], batch.wanted_R[here], batch.samples)
        start = end


@torch.inference_mode()
def run_shard(
    target: Target,
    traits: HeadTraits,
    identity: Identity,
    plan: ShardPlan,
    after_batch: Callable[[int], None],
    prefill_chunk: int | None = None,
    codec: HiddenCodec | None = None,
) -> dict[str, NDArray[np.generic]]:
    """Every array of the shard by name, [shard_tokens, ...], as `cache.write.CacheWriter.commit_shard` takes them.

    A batch wider than `prefill_chunk` runs in pieces of so many columns, each stored before the next one runs: memory is
    that of one piece and the key-value cache. `codec` knows the outlier channels of int8 and int4, and need not be given for
    others. `after_batch(real tokens done)` is called after each batch. Raises
    CaptureFault for a non-finite value, naming sample, position and layer, and for a layer that is all zeros.
    """
    codec = codec or HiddenCodec(identity.codec)
    arrays = token_arrays(plan, identity.shard_tokens)
    for spec in array_specs(identity, 1):
        if spec.name not in arrays:
            arrays[spec.name] = np.zeros(spec.shape, dtype=spec.dtype)
    with tap_layers(target.layers, identity.layers) as taken:
        for number in range(int(plan.batch.max()) + 1):
            batch = make_batch(plan, number, arrays["tokens/input_ids"])  # type: ignore[arg-type]
            for piece, final_bnH in run_batch(target, batch, prefill_chunk):
                place_R = torch.from_numpy(piece.place_R).to(target.device)
                hidden = {layer: taken[layer].flatten(0, 1).index_select(0, place_R) for layer in identity.layers}
                taken.clear()
                _check_hidden(hidden, plan, piece)
                for layer, hidden_RH in hidden.items():
                    for family, values in codec.encode(hidden_RH, layer).items():
                        arrays[f"{family}/{layer}"][piece.row_R] = values
                _store_topk(final_bnH.flatten(0, 1), piece, plan, target, traits, arrays)
            after_batch(len(batch.row_R))
    return arrays


def run_batch(target: Target, batch: Batch, prefill_chunk: int | None) -> Iterator[tuple[Batch, Tensor]]:
    """Each forward pass of the batch with what it computes, and the decoder's final output there."""
    ids_bm, width = torch.from_numpy(batch.ids_bm).to(target.device), batch.ids_bm.shape[1]
    if prefill_chunk is None or width <= prefill_chunk:
        yield batch, target.decoder(input_ids=ids_bm, use_cache=False).last_hidden_state
        return
    ends = even_ends(width, prefill_chunk)
    yield from zip(cut_batch(batch, ends), forward_pieces(target.decoder, target.config, ids_bm, ends), strict=True)


def _store_topk(
    final_PH: Tensor,
    batch: Batch,
    plan: ShardPlan,
    target: Target,
    traits: HeadTraits,
    arrays: Mapping[str, NDArray[np.generic]],
) -> None:
    rows, places = batch.row_R[batch.wanted_R], batch.place_R[batch.wanted_R]
    wanted_RH = final_PH.index_select(0, torch.from_numpy(places).to(target.device))
    top_k = arrays["logits/topk_ids"].shape[1]
    for part, ids_RK, logprobs_RK, rest_R in topk_of(wanted_RH, target, traits, top_k):
        logprobs = logprobs_RK.cpu().numpy()
        if not np.isfinite(logprobs[:, 0]).all():
            row = int(rows[part][~np.isfinite(logprobs[:, 0])][0])
            raise CaptureFault(_fault("the next-token distribution is not finite", plan, row))
        arrays["logits/topk_ids"][rows[part]] = ids_RK.cpu().numpy()
        arrays["logits/topk_logprobs"][rows[part]] = logprobs
        arrays["logits/rest_logprob"][rows[part]] = rest_R.cpu().numpy()


def _check_hidden(hidden: Mapping[int, Tensor], plan: ShardPlan, batch: Batch) -> None:
    # Smallest and largest value of each layer, one look at all of them: NaN passes through both.
    extremes_L2 = torch.stack([torch.stack(hidden_RH.aminmax()) for hidden_RH in hidden.values()]).float().cpu()
    finite_L = extremes_L2.isfinite().all(dim=1)
    zero_L = (extremes_L2 == 0).all(dim=1)
    for (layer, hidden_RH), finite, zero in zip(hidden.items(), finite_L.tolist(), zero_L.tolist(), strict=True):
        if not finite:
            worst = int((~hidden_RH.isfinite()).any(dim=1).nonzero()[0])
            raise CaptureFault(_fault(f"layer {layer}: a hidden state is not finite", plan, int(batch.row_R[worst])))
        if zero:
            raise CaptureFault(_fault(f"layer {layer}: all hidden states are zero", plan, int(batch.row_R[0])))


def _fault(what: str, plan: ShardPlan, row: int) -> str:
    sample = int(np.searchsorted(plan.start, row, side="right")) - 1
    where = f"sample {plan.sample_ids[sample]}, position {row - int(plan.start[sample])}"
    return f"{what} ({where}); this shard was not stored: check the target's weights, or run it with --dtype float32"
