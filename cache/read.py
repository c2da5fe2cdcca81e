"""Reading a complete cache: tokens, hidden states of chosen layers, top-k logits and the target's head, by row ranges.

T rows of all shards, n rows of one read, L layers read, H hidden, K top-k.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from cache.buffers import Buffers
from cache.chunks import ChunkDamaged, ChunkReader
from cache.codecs import HiddenCodec, PackedStates, as_tensor
from cache.generations import way_to_mend
from cache.head import TargetHead
from cache.index import read_index
from cache.layout import is_ours, read_channels, read_root
from cache.plain import PlainReader
from cache.rows import read_rows
from cache.store import Store, open_store
from cache.target_files import CONFIG, HEAD, file_fault
from cache.write import object_sizes, read_records
from schemas.arrays import ArraySpec, array_specs
from schemas.errors import CacheDamaged, CacheError
from schemas.manifest import Manifest
from schemas.records import record_name

TOKENS = ("tokens/input_ids", "tokens/loss_mask")
# After its first reading a chunk is verified at every so many-th.
VERIFY_EVERY = 16


@dataclass(frozen=True)
class Cache:
    """A complete cache, checked against its commit records when it was opened. `layers` are those that may be read.

    What is read lies in `buffers`, and its memory is used again when the last array or tensor over it is gone.
    """

    store: Store
    manifest: Manifest
    layers: tuple[int, ...]
    index: pa.Table
    arrays: dict[str, ChunkReader | PlainReader]
    codec: HiddenCodec
    buffers: Buffers

    @property
    def path(self) -> str:
        """The place, as it was given."""
        return self.store.where()

    @property
    def notes(self) -> list[str]:
        """What a user should be told about how it is read."""
        slow = [name for name, reader in self.arrays.items() if isinstance(reader, PlainReader)]
        how = "not stored as this program stores it: read by plain Zarr, which is slower"
        return [f"{self.store.where(name)} is {how}" for name in slow]

    def verifying(self, every: int) -> "Cache":
        """The same cache, where a chunk that was read before is verified at every so many-th reading (1: always)."""
        arrays = {
            name: replace(reader, verify_every=every) if isinstance(reader, ChunkReader) else reader
            for name, reader in self.arrays.items()
        }
        return replace(self, arrays=arrays)

    @contextmanager
    def target_folder(self) -> Iterator[Path]:
        """A local folder with the target's config and tokenizer, as long as the context lasts."""
        names = [key for key in self.store.sizes("target") if key != HEAD]
        with self.store.local(names) as folder:
            yield folder / "target"

    @cached_property
    def target_config(self) -> dict[str, Any]:
        """The target's config.json."""
        data = self.store.get(CONFIG)
        if data is None:
            raise CacheDamaged(f"{self.path}/{CONFIG} is missing: capture again")
        try:
            config: dict[str, Any] = json.loads(data)
        except ValueError as fault:
            raise CacheDamaged(f"{self.path}/{CONFIG} is not JSON ({fault}): capture again") from None
        return config

    def samples(self, spans: Sequence[tuple[int, int]], layers: Sequence[int]) -> tuple[Tensor, Tensor, PackedStates]:
        """Input ids (int64 [T]), loss mask (bool [T]) and hidden states of all (offset, length), end to end.

        The states are those of the layers asked for, in that order, as they are stored: move them, then `decode` them.
        """
        total, parts = sum(length for _, length in spans), dict[str, NDArray[Any]]()
        names, outs = list(TOKENS), [self.buffers.array((total,), self.arrays[name].spec.dtype) for name in TOKENS]
        for family in self.codec.families:
            own = [f"{family}/{layer}" for layer in layers]
            spec = self.arrays[own[0]].spec
            parts[family] = self.buffers.array((len(own), total, *spec.shape[1:]), spec.dtype)
            names += own
            outs += list(parts[family])
        ids, mask, *_ = self._rows(names, spans, outs)
        states = PackedStates(self.codec, tuple(layers), {name: as_tensor(part) for name, part in parts.items()})
        return torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(mask.astype(bool)), states

    def tokens(self, offset: int, length: int) -> tuple[Tensor, Tensor]:
        """Input ids (int64 [n]) and loss mask (bool [n]) of rows offset .. offset + length - 1."""
        ids, mask = self._rows(TOKENS, [(offset, length)])
        return torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(mask.astype(bool))

    def hidden(self, offset: int, length: int, layers: Sequence[int]) -> Tensor:
        """Hidden states [n, L, H] of rows offset .. offset + length - 1: float32 for codec f32, else bfloat16."""
        return self.samples([(offset, length)], layers)[2].decode()

    def topk(self, offset: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Top-k ids (int64 [n, K]), their log-probabilities (float32 [n, K]), and the log of the rest (float32 [n])."""
        names = ("logits/topk_ids", "logits/topk_logprobs", "logits/rest_logprob")
        ids, logprobs, rest = self._rows(names, [(offset, length)])
        return (
            torch.from_numpy(ids.astype(np.int64)),
            torch.from_numpy(logprobs.astype(np.float32)),
            torch.from_numpy(rest),
        )

    def rows(self, name: str, offset: int, length: int) -> NDArray[Any]:
        """Rows offset .. offset + length - 1 of an array, as they are stored. Raises CacheDamaged, naming it and its shard."""
        return self._rows((name,), [(offset, length)])[0]

    def _rows(
        self, names: Sequence[str], spans: Sequence[tuple[int, int]], outs: Sequence[NDArray[Any]] | None = None
    ) -> list[NDArray[Any]]:
        total = sum(length for _, length in spans)
        if outs is None:
            specs = [self.arrays[name].spec for name in names]
            outs = [self.buffers.array((total, *spec.shape[1:]), spec.dtype) for spec in specs]
        try:
            quick: list[ChunkReader] = []
            own: list[NDArray[Any]] = []
            for name, out in zip(names, outs, strict=True):
                reader = self.arrays[name]
                if isinstance(reader, PlainReader):
                    reader.fill(spans, out)
                else:
                    quick.append(reader)
                    own.append(out)
            if quick:
                read_rows(quick, spans, own)
        except ChunkDamaged as fault:
            raise ChunkDamaged(fault.where, fault.how, fault.rows, self._samples_in(*fault.rows)) from None
        return list(outs)

    def _samples_in(self, first: int, end: int) -> str:
        offsets, lengths = self.index["offset"].to_numpy(), self.index["length"].to_numpy()
        rows = np.flatnonzero((offsets < end) & (offsets + lengths > first)).tolist()
        return samples_text([self.index["sample_id"][row].as_py() for row in rows])

    def head(self) -> TargetHead:
        """The target's embedding and head in float32, with its scales."""
        try:
            with self.store.local([HEAD]) as folder:
                # Nothing else would tell a wrong number from a right one.
                if what := file_fault(self.manifest, HEAD, [np.memmap(folder / HEAD, np.uint8, "r")]):
                    raise CacheDamaged(f"{self.path}/{HEAD} {what}: capture again")
                weights = load_file(folder / HEAD)
        except (OSError, ValueError, SafetensorError) as fault:
            raise CacheDamaged(f"{self.path}/{HEAD} cannot be read ({fault}): capture again") from None
        target = self.manifest.identity.target
        embed_VH = weights["embed_tokens.weight"].float()
        lm_head_VH = weights["lm_head.weight"].float() if "lm_head.weight" in weights else embed_VH
        return TargetHead(embed_VH, lm_head_VH, target.embedding_scale, target.logit_scale, target.logit_softcap)


def samples_text(names: Sequence[str]) -> str:
    """ " (samples a, b and 3 more)", or nothing where there are none."""
    more = f" and {len(names) - 4:,} more" if len(names) > 4 else ""
    return f" (samples {', '.join(names[:4])}{more})" if names else ""


def open_cache(path: str, layers: Sequence[int] | None = None) -> Cache:
    """Open a complete cache, for the layers asked for (by default all).

    A chunk's checksum is verified when it is first read, and then now and then (`Cache.verifying`). Raises CacheError for a path
    that is no cache, an incomplete one, another version or a layer that it does not hold, and
    CacheDamaged where an object is missing or of another size than its commit record says: Zarr itself would read zeros.
    """
    store = open_store(path)
    manifest = read_root(store)
    if not manifest.complete:
        held_records = store.sizes("shards")
        done = sum(record_name(shard) in held_records for shard in range(manifest.totals.shards))
        raise CacheError(
            f"{path} is incomplete ({done} of {manifest.totals.shards} shards): "
            f"{way_to_mend(manifest)} to finish it, or "
            "train on what is there with `dflash train --partial`"
        )
    shards = range(manifest.totals.shards)
    return cache_of(store, manifest, read_index(store, manifest), layers, shards)


def cache_of(
    store: Store, manifest: Manifest, index: pa.Table, layers: Sequence[int] | None, shards: Sequence[int]
) -> Cache:
    """The cache of these shards, for the layers asked for (by default all). Raises as `open_cache`."""
    held = manifest.identity.layers
    for layer in layers or ():
        if layer not in held:
            raise CacheError(
                f"layer {layer} is not in {store.where()}, which holds {', '.join(map(str, held))}: choose among these, or capture it"
            )
    chosen = tuple(sorted(layers)) if layers else held
    specs = [
        spec
        for spec in array_specs(manifest.identity, manifest.totals.shards)
        if not spec.name.startswith("hidden") or int(spec.name.split("/")[1]) in chosen
    ]
    _check_objects(store, shards, specs, index)
    buffers = Buffers()
    codec = HiddenCodec(manifest.identity.codec, read_channels(store, manifest.identity, chosen))
    arrays = _readers(store, specs, buffers)
    return Cache(store, manifest, chosen, index, arrays, codec, buffers)


def _readers(store: Store, specs: Sequence[ArraySpec], buffers: Buffers) -> dict[str, ChunkReader | PlainReader]:
    readers: dict[str, ChunkReader | PlainReader] = {}
    keys = [f"{spec.name}/zarr.json" for spec in specs]
    for spec, key, document in zip(specs, keys, store.get_each(keys), strict=True):
        if document is None:
            raise CacheDamaged(f"{store.where(key)} is missing: the cache is damaged; capture again")
        if is_ours(document, spec):
            readers[spec.name] = ChunkReader(store, spec, VERIFY_EVERY, buffers)
        else:
            readers[spec.name] = PlainReader(store, spec, buffers)
    return readers


def _check_objects(store: Store, shards: Sequence[int], specs: Sequence[ArraySpec], index: pa.Table) -> None:
    def touched(shard: int) -> str:
        return samples_text(index.filter(pc.equal(index["shard"], shard))["sample_id"].to_pylist())

    # Records first: a shard that is committed meanwhile then has its objects in the list.
    records = list(read_records(store, shards))
    sizes = object_sizes(store, [spec.name for spec in specs])
    for shard, record in zip(shards, records, strict=True):
        if record is None:
            raise CacheDamaged(
                f"{store.where()}: the commit record of shard {shard} is missing{touched(shard)}: the cache is damaged; capture again"
            )
        for spec in specs:
            key = spec.object_key(shard)
            size, wanted = sizes.get(key), record.objects.get(key)
            if wanted is None or size != wanted.bytes:
                state = "missing" if size is None else f"{size} bytes, not {wanted.bytes if wanted else 'committed'}"
                raise CacheDamaged(
                    f"{store.where(key)} is {state}{touched(shard)}: the cache is damaged; capture again"
                )
