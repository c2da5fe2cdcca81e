"""Reading a complete cache: tokens, hidden states of chosen layers, top-k logits and the target's head, by row ranges.

T rows of all shards, n rows of one read, L layers read, H hidden, K top-k.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from cache.chunks import ChunkReader, read_rows
from cache.codecs import check_codec, decode
from cache.generations import maker
from cache.head import TargetHead
from cache.index import read_index
from cache.layout import read_root
from cache.store import Store, open_store
from cache.write import object_sizes, read_records
from schemas.arrays import ArraySpec, array_specs
from schemas.errors import CacheDamaged, CacheError
from schemas.manifest import Manifest
from schemas.records import record_name

HEAD = "target/head.safetensors"
TOKENS = ("tokens/input_ids", "tokens/loss_mask")


@dataclass(frozen=True)
class Cache:
    """A complete cache, checked against its commit records when it was opened. `layers` are those that may be read."""

    store: Store
    manifest: Manifest
    layers: tuple[int, ...]
    index: pa.Table
    arrays: dict[str, ChunkReader]

    @property
    def path(self) -> str:
        """The place, as it was given."""
        return self.store.where()

    @contextmanager
    def target_folder(self) -> Iterator[Path]:
        """A local folder with the target's config and tokenizer, as long as the context lasts."""
        names = [key for key in self.store.sizes("target") if key != HEAD]
        with self.store.local(names) as folder:
            yield folder / "target"

    @cached_property
    def target_config(self) -> dict[str, Any]:
        """The target's config.json."""
        data = self.store.get("target/config.json")
        if data is None:
            raise CacheDamaged(f"{self.path}/target/config.json is missing: capture again")
        try:
            config: dict[str, Any] = json.loads(data)
        except ValueError as fault:
            raise CacheDamaged(f"{self.path}/target/config.json is not JSON ({fault}): capture again") from None
        return config

    def samples(self, spans: Sequence[tuple[int, int]], layers: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Input ids (int64 [T]), loss mask (bool [T]) and hidden states [T, L, H] of all (offset, length), end to end.

        The states are those of the layers asked for, in that order: float32 for codec f32, else bfloat16.
        """
        ids, mask, *hidden = self._rows([*TOKENS, *(f"hidden/{layer}" for layer in layers)], spans)
        codec = self.manifest.identity.codec
        hidden_TLH = torch.stack([decode({"hidden": each}, codec) for each in hidden], dim=1)
        return torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(mask.astype(bool)), hidden_TLH

    def tokens(self, offset: int, length: int) -> tuple[Tensor, Tensor]:
        """Input ids (int64 [n]) and loss mask (bool [n]) of rows offset .. offset + length - 1."""
        ids, mask = self._rows(TOKENS, [(offset, length)])
        return torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(mask.astype(bool))

    def hidden(self, offset: int, length: int, layers: Sequence[int]) -> Tensor:
        """Hidden states [n, L, H] of rows offset .. offset + length - 1, as `samples` gives them."""
        codec = self.manifest.identity.codec
        per_layer = self._rows([f"hidden/{layer}" for layer in layers], [(offset, length)])
        return torch.stack([decode({"hidden": hidden}, codec) for hidden in per_layer], dim=1)

    def topk(self, offset: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Top-k ids (int64 [n, K]), their log-probabilities (float32 [n, K]), and the log of the rest (float32 [n])."""
        names = ("logits/topk_ids", "logits/topk_logprobs", "logits/rest_logprob")
        ids, logprobs, rest = self._rows(names, [(offset, length)])
        return (
            torch.from_numpy(ids.astype(np.int64)),
            torch.from_numpy(logprobs.astype(np.float32)),
            torch.from_numpy(rest),
        )

    def _rows(self, names: Sequence[str], spans: Sequence[tuple[int, int]]) -> list[NDArray[np.generic]]:
        return read_rows([self.arrays[name] for name in names], spans)

    def head(self) -> TargetHead:
        """The target's embedding and head in float32, with its scales."""
        try:
            with self.store.local([HEAD]) as folder:
                weights = load_file(folder / HEAD)
        except (OSError, SafetensorError) as fault:
            raise CacheDamaged(f"{self.path}/{HEAD} cannot be read ({fault}): capture again") from None
        target = self.manifest.identity.target
        embed_VH = weights["embed_tokens.weight"].float()
        lm_head_VH = weights["lm_head.weight"].float() if "lm_head.weight" in weights else embed_VH
        return TargetHead(embed_VH, lm_head_VH, target.embedding_scale, target.logit_scale, target.logit_softcap)


def open_cache(path: str, layers: Sequence[int] | None = None) -> Cache:
    """Open a complete cache, for the layers asked for (by default all).

    Raises CacheError for a path that is no cache, an incomplete one, another version or a layer that it does not hold, and
    CacheDamaged where an object is missing or of another size than its commit record says: Zarr itself would read zeros.
    """
    store = open_store(path)
    manifest = read_root(store)
    if not manifest.complete:
        held_records = store.sizes("shards")
        done = sum(record_name(shard) in held_records for shard in range(manifest.totals.shards))
        raise CacheError(
            f"{path} is incomplete ({done} of {manifest.totals.shards} shards): "
            f"run the same `{maker(manifest)}` command again to finish it, or "
            "train on what is there with `dflash train --partial`"
        )
    return cache_of(store, manifest, read_index(store, manifest), layers, range(manifest.totals.shards))


def cache_of(
    store: Store, manifest: Manifest, index: pa.Table, layers: Sequence[int] | None, shards: Sequence[int]
) -> Cache:
    """The cache of these shards, for the layers asked for (by default all). Raises as `open_cache`."""
    check_codec(manifest.identity.codec)
    held = manifest.identity.layers
    for layer in layers or ():
        if layer not in held:
            raise CacheError(
                f"layer {layer} is not in {store.where()}, which holds {', '.join(map(str, held))}: choose among these, or capture it"
            )
    chosen = tuple(sorted(layers)) if layers else held
    unread = {f"hidden/{layer}" for layer in held if layer not in chosen}
    specs = [spec for spec in array_specs(manifest.identity, manifest.totals.shards) if spec.name not in unread]
    _check_objects(store, shards, specs)
    return Cache(store, manifest, chosen, index, {spec.name: ChunkReader(store, spec) for spec in specs})


def _check_objects(store: Store, shards: Sequence[int], specs: Sequence[ArraySpec]) -> None:
    # Records first: a shard that is committed meanwhile then has its objects in the list.
    records = list(read_records(store, shards))
    sizes = object_sizes(store, [spec.name for spec in specs])
    for shard, record in zip(shards, records, strict=True):
        if record is None:
            raise CacheDamaged(
                f"{store.where()}: the commit record of shard {shard} is missing: the cache is damaged; capture again"
            )
        for spec in specs:
            key = spec.object_key(shard)
            size, wanted = sizes.get(key), record.objects.get(key)
            if wanted is None or size != wanted.bytes:
                state = "missing" if size is None else f"{size} bytes, not {wanted.bytes if wanted else 'committed'}"
                raise CacheDamaged(f"{store.where(key)} is {state}: the cache is damaged; capture again")
