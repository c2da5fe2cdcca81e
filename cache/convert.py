"""A finished cache in another codec, or with fewer layers, without the target: shard by shard, as a capture writes it.

T rows of a shard, H hidden.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache.calibrate import calibration_samples, widest_channels
from cache.codecs import Channels, HiddenCodec, check_codec
from cache.disk import check_free, needed_bytes
from cache.read import Cache, open_cache
from cache.store import open_store
from cache.verify import sound_or_forgotten
from cache.write import CacheWriter, existing_manifest
from schemas.arrays import WITH_OUTLIERS, array_specs, chunk_tokens
from schemas.errors import CacheError, OptionError
from schemas.index import PLAN_SCHEMA
from schemas.manifest import CONVERTED, Codec, Manifest, brief, first_difference
from schemas.say import Say

# How much is left of a state: a cache is converted to the same rank or a higher one, since precision that is gone does not come back.
LOSS: dict[Codec, int] = {"f32": 0, "bf16": 1, "bf16-zstd": 1, "int8": 2, "fp8": 3, "int4": 4}


def convert(
    path: str, out: str, codec: Codec | None, layers: Sequence[int] | None, device: torch.device, say: Say
) -> Manifest:
    """Write the cache at `path` to `out` with another codec, or some of its layers, or both; returns its manifest.

    The same command goes on with what was interrupted, and ends with the same bytes. Raises CacheError (a source that is no
    complete cache or lacks a layer, another cache in `out`), OptionError (precision that the source does not have, no room) and
    CacheDamaged.
    """
    source = open_cache(path, layers)
    manifest = _converted(source, codec or source.manifest.identity.codec)
    if open_store(out).where() == open_store(path).where():
        raise OptionError(f"{out} is the cache to be converted: give another place to write to")
    found = existing_manifest(out)
    if found is not None:
        _check_same(out, found, manifest)
        if found.complete and sound_or_forgotten(out, "converting again what is", say):
            say.note(f"{out} is already converted: nothing to do")
            return found
    writer = None if found is None else CacheWriter.resume(out)
    if writer is None:
        check_free(open_store(out), *needed_bytes(manifest.identity, manifest.totals.shards, source.index.nbytes))
        writer = CacheWriter.create(out, manifest, _plan(source), channels=_channels(source, manifest, device))
    for key in sorted(source.store.sizes("target")):
        data = source.store.get(key)
        assert data is not None, key
        writer.put_file(key, data)
    missing = writer.missing_shards()
    for done, shard in enumerate(missing, 1):
        writer.commit_shard(shard, _shard(source, writer, shard, device))
        say.progress("convert", done, len(missing))
    return writer.finish()


def _converted(source: Cache, codec: Codec) -> Manifest:
    identity = source.manifest.identity
    if LOSS[codec] < LOSS[identity.codec]:
        finer = [name for name, loss in LOSS.items() if loss >= LOSS[identity.codec]]
        raise OptionError(
            f"--codec {codec}: {source.path} holds {identity.codec}, and what that dropped does not come back: choose among "
            f"{', '.join(finer)}, or capture again"
        )
    check_codec(codec, identity.target.hidden_size)
    chunks = chunk_tokens(codec, identity.target.hidden_size, identity.top_k, identity.shard_tokens)
    same = codec == identity.codec
    update = {"codec": codec, "layers": source.layers, "chunk_tokens": identity.chunk_tokens if same else chunks}
    record = source.manifest.record | {CONVERTED: f"from {identity.codec}"}
    if CONVERTED in source.manifest.record:
        record[CONVERTED] = f"{source.manifest.record[CONVERTED]}, {identity.codec}"
    update_all = {"identity": identity.model_copy(update=update), "complete": False, "record": record}
    return source.manifest.model_copy(update=update_all)


def _check_same(out: str, found: Manifest, wanted: Manifest) -> None:
    difference = first_difference(wanted.model_copy(update={"complete": found.complete}), found)
    if difference is not None:
        name, asked, held = difference
        raise CacheError(
            f"{out} holds another cache, with {name} {brief(held)}, where this one has {brief(asked)}: give another place"
        )


def _plan(source: Cache) -> pa.Table:
    """The work list: the index, without ids and masks, which stay in the source."""
    count = len(source.index)
    empty = {
        "input_ids": pa.array([[]] * count, pa.list_(pa.int32())),
        "loss_mask": pa.array([[]] * count, pa.list_(pa.uint8())),
        "batch": pa.array(np.zeros(count, np.int32)),
    }
    columns = [
        empty[field.name] if field.name in empty else source.index[field.name].combine_chunks() for field in PLAN_SCHEMA
    ]
    return pa.table(columns, schema=PLAN_SCHEMA)


def _channels(source: Cache, manifest: Manifest, device: torch.device) -> Channels:
    """The outlier channels: the source's own, or those that a capture would choose, by the same samples."""
    if manifest.identity.codec not in WITH_OUTLIERS or source.codec.channels:
        return source.codec.channels if manifest.identity.codec in WITH_OUTLIERS else {}
    columns = source.index.select(["offset", "length"]).to_pydict()
    count = calibration_samples(columns["length"])
    spans = list(zip(columns["offset"][:count], columns["length"][:count], strict=True))
    sums: dict[int, list[Tensor]] = {layer: [] for layer in source.layers}
    for span in spans:
        hidden_TLH = source.samples([span], source.layers)[2].to(device).decode()
        for place, layer in enumerate(source.layers):
            sums[layer].append(hidden_TLH[:, place].double().abs().sum(0, keepdim=True))
    return {layer: widest_channels(own) for layer, own in sums.items()}


def _shard(source: Cache, writer: CacheWriter, shard: int, device: torch.device) -> Mapping[str, NDArray[Any]]:
    """The arrays of a shard: those of tokens and logits as they are, each layer's decoded and encoded anew."""
    rows = writer.manifest.identity.shard_tokens
    names = [spec.name for spec in array_specs(writer.manifest.identity, 1)]
    if source.codec.name == writer.codec.name:
        return {name: source.rows(name, shard * rows, rows) for name in names}
    kept = {name: source.rows(name, shard * rows, rows) for name in names if not name.startswith("hidden")}
    for layer in source.layers:
        kept |= _recoded(source, writer.codec, shard * rows, rows, layer, device)
    return kept


def _recoded(
    source: Cache, codec: HiddenCodec, offset: int, rows: int, layer: int, device: torch.device
) -> dict[str, NDArray[Any]]:
    states = source.samples([(offset, rows)], [layer])[2].to(device)
    encoded = codec.encode(states.decode()[:, 0], layer)
    return {f"{family}/{layer}": np.ascontiguousarray(values) for family, values in encoded.items()}
