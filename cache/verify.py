"""Is a cache what it says it is? Quick: records, sizes, index, documents. Deep: every checksum, every sample's tokens, every state finite.

n rows of one sample, L layers, H hidden.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cache.buffers import Buffers
from cache.chunks import ChunkReader
from cache.codecs import HiddenCodec
from cache.documents import document_faults, stored_otherwise
from cache.generations import way_to_mend
from cache.index import index_vouched, read_index
from cache.layout import OUTLIERS, read_channels, read_root, write_root
from cache.plain import PlainReader
from cache.rows import read_rows
from cache.store import Store, open_store
from cache.write import object_sizes, parse_record
from schemas.arrays import ArraySpec, array_specs
from schemas.errors import CacheDamaged, CacheError
from schemas.manifest import Manifest
from schemas.records import record_name
from schemas.say import Say


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong, where, and which samples cannot be trusted for it."""

    where: str
    what: str
    samples: tuple[str, ...] = ()
    shard: int | None = None


def verify(path: str, deep: bool, say: Say) -> tuple[Manifest, list[Fault]]:
    """Every fault of a complete cache, none where it is sound; quick takes a look-up per object, deep reads every byte.

    Raises CacheError for a path that is no cache, another version or an incomplete one: there is nothing to verify yet.
    """
    store = open_store(path)
    manifest = read_root(store)
    if not manifest.complete:
        raise CacheError(f"{path} is incomplete: {way_to_mend(manifest)} to finish it")
    faults = [Fault(key, what) for key, what in document_faults(store, manifest, deep)]
    try:
        rows = read_index(store, manifest).to_pylist()
    except (CacheDamaged, CacheError) as fault:
        return manifest, [*faults, Fault("index.parquet", str(fault))]
    if index_vouched(store) is False:
        faults.append(Fault("index.parquet", "holds other rows than were written"))
    faults += _index_faults(manifest, rows)
    by_shard: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_shard.setdefault(row["shard"], []).append(row)
    shards = manifest.totals.shards
    records = list(store.get_each([record_name(shard) for shard in range(shards)]))
    sizes = object_sizes(store, [spec.name for spec in array_specs(manifest.identity, shards)])
    codec: HiddenCodec | None = None
    try:
        codec = HiddenCodec(manifest.identity.codec, read_channels(store, manifest.identity, manifest.identity.layers))
    except CacheDamaged as fault:
        if not any(found.where.startswith(OUTLIERS) for found in faults):
            faults.append(Fault(OUTLIERS, str(fault)))
    otherwise, buffers = stored_otherwise(store, manifest) if deep else set(), Buffers()
    for shard, record in enumerate(records):
        own = by_shard.get(shard, [])
        found = list(_object_faults(store.where(record_name(shard)), manifest, shard, record, sizes))
        if deep and not found:
            found = list(_content_faults(store, manifest, shard, own, codec, otherwise, buffers))
        touched = tuple(row["sample_id"] for row in own)
        faults += [Fault(fault.where, fault.what, fault.samples or touched, shard) for fault in found]
        say.progress("verify", shard + 1, shards)
    return manifest, faults


def forget(path: str, faults: Sequence[Fault]) -> int:
    """Make the cache incomplete again, without the damaged shards' commit records; the same capture then does just those.

    Returns how many shards were forgotten. Nothing else is removed: sound shards stay committed.
    """
    store = open_store(path)
    write_root(store, read_root(store).model_copy(update={"complete": False}))
    shards = {fault.shard for fault in faults if fault.shard is not None}
    for shard in shards:
        store.delete(record_name(shard))
    return len(shards)


def sound_or_forgotten(path: str, again: str, say: Say) -> bool:
    """Whether a complete cache is sound at a look; else its damaged shards are forgotten, so that going on makes them again.

    `again` is what is done about them, in words: "capturing again what is".
    """
    _, faults = verify(path, False, say)
    if not faults:
        return True
    say.warn(f"{path} is damaged ({faults[0].where}: {faults[0].what}): {again}")
    forget(path, faults)
    return False


def _index_faults(manifest: Manifest, rows: Sequence[dict[str, Any]]) -> Iterator[Fault]:
    """Samples lie one behind the other, each inside its shard, and add up to the totals."""
    shard_tokens, before = manifest.identity.shard_tokens, 0
    for row in rows:
        begin, end = row["offset"], row["offset"] + row["length"]
        if begin < before or row["shard"] != begin // shard_tokens or (end - 1) // shard_tokens != row["shard"]:
            yield Fault(
                "index.parquet", f"rows {begin} to {end} overlap others or leave their shard", (row["sample_id"],)
            )
        before = end
    totals = manifest.totals
    held = {
        "tokens": (sum(row["length"] for row in rows), totals.tokens),
        "supervised": (sum(row["supervised"] for row in rows), totals.supervised),
        "val_samples": (sum(row["split"] == "val" for row in rows), totals.val_samples),
    }
    for name, (index, stated) in held.items():
        if index != stated:
            yield Fault("index.parquet", f"holds {index} {name}, the manifest says {stated}")


def _object_faults(
    where: str, manifest: Manifest, shard: int, data: bytes | None, sizes: Mapping[str, int]
) -> Iterator[Fault]:
    try:
        record = parse_record(where, data)
    except CacheError as fault:
        yield Fault(record_name(shard), str(fault))
        return
    if record is None:
        yield Fault(record_name(shard), "missing")
        return
    for spec in array_specs(manifest.identity, manifest.totals.shards):
        key = spec.object_key(shard)
        size, wanted = sizes.get(key), record.objects.get(key)
        if wanted is None:
            yield Fault(key, "not in the shard's commit record")
        elif size != wanted.bytes:
            yield Fault(key, "missing" if size is None else f"{size:,} bytes, the commit record says {wanted.bytes:,}")


def _content_faults(
    store: Store,
    manifest: Manifest,
    shard: int,
    rows: Sequence[dict[str, Any]],
    codec: HiddenCodec | None,
    otherwise: Set[str],
    buffers: Buffers,
) -> Iterator[Fault]:
    # `codec`: None where the outlier channels are not known, so that states cannot be decoded. `otherwise`: see `stored_otherwise`.
    identity, first = manifest.identity, shard * manifest.identity.shard_tokens
    arrays: dict[str, Any] = {}
    for spec in array_specs(identity, manifest.totals.shards):
        try:
            arrays[spec.name] = _all_rows(store, spec, first, spec.name in otherwise, buffers)
        except CacheDamaged as fault:
            yield Fault(spec.object_key(shard), str(fault).split(": ", 1)[1])
    if len(arrays) < len(array_specs(identity, 1)):
        return
    for row in rows:
        span = slice(row["offset"] - first, row["offset"] - first + row["length"])
        ids, mask = arrays["tokens/input_ids"][span], arrays["tokens/loss_mask"][span]
        if hashlib.sha256(ids.tobytes() + mask.tobytes()).hexdigest() != row["tokens_sha256"]:
            yield Fault(f"shard {shard}", "tokens or mask differ from the index's hash", (row["sample_id"],))
        if int(mask.sum()) != row["supervised"]:
            yield Fault(f"shard {shard}", f"{int(mask.sum())} supervised, not {row['supervised']}", (row["sample_id"],))
        if codec is not None:
            for layer in identity.layers:
                own = {family: arrays[f"{family}/{layer}"][span] for family in codec.families}
                hidden_nH = codec.decode(own, layer)
                if not bool(torch.isfinite(hidden_nH).all()):
                    yield Fault(f"hidden/{layer}", "a state is not finite", (row["sample_id"],))
                elif not bool(hidden_nH.any()):
                    yield Fault(f"hidden/{layer}", "all states are zero", (row["sample_id"],))
        wanted = np.flatnonzero(mask[1:])
        if not np.isfinite(arrays["logits/topk_logprobs"][span][wanted]).all():
            yield Fault("logits/topk_logprobs", "a log-probability is not finite", (row["sample_id"],))


def _all_rows(store: Store, spec: ArraySpec, first: int, plain: bool, buffers: Buffers) -> NDArray[Any]:
    """A shard's rows, every chunk verified. Raises CacheDamaged."""
    if not plain:
        return read_rows([ChunkReader(store, spec, buffers=buffers)], [(first, spec.shard_rows)])[0]
    out = buffers.array((spec.shard_rows, *spec.shape[1:]), spec.dtype)
    PlainReader(store, spec, buffers).fill([(first, spec.shard_rows)], out)
    return out
