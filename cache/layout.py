"""The Zarr group of a cache: its metadata documents, and the arrays that plain Zarr sees."""

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import zarr
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.codecs.numcodecs import Shuffle
from zarr.storage import MemoryStore

from cache.shard import ZSTD_LEVEL
from cache.store import Store
from schemas.arrays import OUTLIER_CHANNELS, WITH_OUTLIERS, ArraySpec, array_specs
from schemas.errors import CacheDamaged, CacheError
from schemas.manifest import ATTRIBUTE, Identity, Manifest, read_manifest

OUTLIERS, CHANNELS = "hidden_outliers", "channels"


def write_arrays(store: Store, manifest: Manifest, channels: Mapping[int, Sequence[int]] | None = None) -> None:
    """Write the metadata of every array and group below the root. zarr-python makes the documents, we make them durable.

    `channels` are each layer's outlier channels, where the codec has any.
    """
    channels = channels or {}
    assert set(channels) == (set(manifest.identity.layers) if manifest.identity.codec in WITH_OUTLIERS else set())
    memory = MemoryStore()
    group = zarr.create_group(memory)
    specs = array_specs(manifest.identity, manifest.totals.shards)
    for family in sorted({spec.name.split("/")[0] for spec in specs}):
        group.create_group(family)
    for spec in specs:
        own: dict[str, Any] = dict(spec.attributes)
        family, name = spec.name.split("/")
        if family == OUTLIERS:
            own[CHANNELS] = list(channels[int(name)])
        _create(group, spec, own)
    for key, document in memory._store_dict.items():
        if key != "zarr.json":
            store.put(key, [document.to_bytes()])


def read_channels(store: Store, identity: Identity, layers: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Each layer's outlier channels, from its array's attributes; none where the codec has none. Raises CacheDamaged."""
    if identity.codec not in WITH_OUTLIERS:
        return {}
    keys = [f"{OUTLIERS}/{layer}/zarr.json" for layer in layers]
    found = {}
    for layer, key, text in zip(layers, keys, store.get_each(keys), strict=True):
        try:
            channels = tuple(int(channel) for channel in json.loads(text or b"")["attributes"][CHANNELS])
            if len(set(channels)) != OUTLIER_CHANNELS or not set(channels) <= set(range(identity.target.hidden_size)):
                raise ValueError(f"channels {channels}")
        except (ValueError, KeyError, TypeError) as fault:
            raise CacheDamaged(
                f"{store.where(key)} does not say which {OUTLIER_CHANNELS} channels it holds ({fault!r}): the cache is damaged; "
                "capture again"
            ) from None
        found[layer] = channels
    return found


def is_ours(document: bytes, spec: ArraySpec) -> bool:
    """Whether an array's zarr.json describes what `encode_shard` writes. Only then are its chunks where we look for them."""
    try:
        found = json.loads(document)
        grid, codecs = found["chunk_grid"], found["codecs"]
        (outer,) = codecs
        inner = outer["configuration"]
        little = {"endian": "little"}
        chain = [_codec(codec) for codec in inner["codecs"]]
        index = [_codec(codec) for codec in inner["index_codecs"]]
        width = list(spec.shape[1:])
        shrunk = ["numcodecs.shuffle", "zstd"] if spec.shuffled_zstd else []
        names = [name for name, _ in chain]
        return bool(
            outer["name"] == "sharding_indexed"
            and found["data_type"] == spec.dtype
            and found["shape"][1:] == width
            and grid["configuration"]["chunk_shape"] == [spec.shard_rows, *width]
            and inner["chunk_shape"] == [spec.chunk_rows, *width]
            and inner.get("index_location", "end") == "end"
            and names == ["bytes", *shrunk, "crc32c"]
            and all(own.get("endian", "little") == "little" for name, own in chain if name == "bytes")
            and all(own == {"elementsize": 2} for name, own in chain if name == "numcodecs.shuffle")
            and index == [("bytes", little), ("crc32c", {})]
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def _codec(document: Any) -> tuple[str, dict[str, Any]]:
    # A codec without a configuration may be its bare name.
    if isinstance(document, str):
        return document, {}
    return document["name"], document.get("configuration") or {}


def _create(group: zarr.Group, spec: ArraySpec, attributes: dict[str, Any]) -> None:
    width = spec.shape[1:]
    with warnings.catch_warnings():
        # That the shuffle is numcodecs' own is what we chose.
        warnings.filterwarnings(
            "ignore", message="Numcodecs codecs are not in the Zarr version 3", category=UserWarning
        )
        shrink = [Shuffle(elementsize=2), ZstdCodec(level=ZSTD_LEVEL)] if spec.shuffled_zstd else []
        group.create_array(
            spec.name,
            shape=spec.shape,
            dtype=spec.dtype,
            shards=(spec.shard_rows, *width),
            chunks=(spec.chunk_rows, *width),
            compressors=[*shrink, Crc32cCodec()],
            filters=None,
            fill_value=0,
            attributes=attributes,
            config={"write_empty_chunks": True},
        )


def write_root(store: Store, manifest: Manifest) -> None:
    """Write zarr.json of the root group with the manifest: the document that makes a folder a cache, or a complete one."""
    store.put("zarr.json", [_root_document(manifest)])


def begin_root(store: Store, manifest: Manifest) -> bool:
    """`write_root` where there is none; False where there is one, which stays as it is."""
    return store.put_new("zarr.json", [_root_document(manifest)])


def _root_document(manifest: Manifest) -> bytes:
    attributes = {ATTRIBUTE: manifest.model_dump(mode="json")}
    document = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    return json.dumps(document, indent=2).encode()


def read_root(store: Store) -> Manifest:
    """The manifest of the cache at a store; CacheError where there is none or it cannot be read."""
    where = store.where()
    text = store.get("zarr.json")
    if text is None:
        raise CacheError(
            f"{where} is no hidden-state cache (no zarr.json there): give a folder that `dflash capture` wrote"
        )
    try:
        document: Any = json.loads(text)
    except ValueError as fault:
        raise CacheError(f"{where}/zarr.json is not JSON ({fault}): the cache is damaged; capture again") from None
    attributes = document.get("attributes") if isinstance(document, dict) else None
    return read_manifest(attributes if isinstance(attributes, dict) else {}, where)
