"""The Zarr group of a cache: its metadata documents, and the arrays that plain Zarr sees."""

import json
from typing import Any

import zarr
from zarr.codecs import Crc32cCodec
from zarr.storage import MemoryStore

from cache.store import Store
from schemas.arrays import ArraySpec, array_specs
from schemas.errors import CacheError
from schemas.manifest import ATTRIBUTE, Manifest, read_manifest


def write_arrays(store: Store, manifest: Manifest) -> None:
    """Write the metadata of every array and group below the root. zarr-python makes the documents, we make them durable."""
    memory = MemoryStore()
    group = zarr.create_group(memory)
    specs = array_specs(manifest.identity, manifest.totals.shards)
    for family in sorted({spec.name.split("/")[0] for spec in specs}):
        group.create_group(family)
    for spec in specs:
        _create(group, spec)
    for key, document in memory._store_dict.items():
        if key != "zarr.json":
            store.put(key, [document.to_bytes()])


def _create(group: zarr.Group, spec: ArraySpec) -> None:
    assert not spec.shuffled_zstd, "bf16-zstd is refused before a layout is made"
    width = spec.shape[1:]
    group.create_array(
        spec.name,
        shape=spec.shape,
        dtype=spec.dtype,
        shards=(spec.shard_rows, *width),
        chunks=(spec.chunk_rows, *width),
        compressors=[Crc32cCodec()],
        filters=None,
        fill_value=0,
        attributes=dict(spec.attributes),
        config={"write_empty_chunks": True},
    )


def write_root(store: Store, manifest: Manifest) -> None:
    """Write zarr.json of the root group with the manifest: the document that makes a folder a cache, or a complete one."""
    attributes = {ATTRIBUTE: manifest.model_dump(mode="json")}
    document = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    store.put("zarr.json", [json.dumps(document, indent=2).encode()])


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
