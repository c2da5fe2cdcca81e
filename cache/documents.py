"""What of a cache belongs to no shard, so that no commit record vouches for it: the arrays' documents, the target's config and head."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from cache.chunks import ChunkReader
from cache.layout import is_ours
from cache.rows import read_rows
from cache.spans import Span, pieces_of
from cache.store import Store
from cache.target_files import CONFIG, HEAD, file_fault, target_checksums
from schemas.arrays import ArraySpec, array_specs
from schemas.errors import CacheDamaged
from schemas.manifest import Manifest, TargetIdentity

# A safetensors file: the length of its header (8 bytes), the header (JSON), the tensors.
LENGTH_BYTES = 8
# No header of three tensors is longer.
MOST_HEADER_BYTES = 1 << 20


def document_faults(store: Store, manifest: Manifest, deep: bool) -> Iterator[tuple[str, str]]:
    """(key, what is wrong) of each that is missing or not what the manifest says; of the head its header, all of it where `deep`."""
    target = manifest.identity.target
    if (config := store.get(CONFIG)) is None:
        yield CONFIG, "missing"
    elif (found := hashlib.sha256(config).hexdigest()) != target.config_sha256:
        yield CONFIG, f"has sha256 {found[:16]}, the target's had {target.config_sha256[:16]}"
    if (size := store.size(HEAD)) is None:
        yield HEAD, "missing"
    else:
        what = _head_fault(store, size, target)
        if what is None and deep:
            what = file_fault(manifest, HEAD, store.read(list(pieces_of(HEAD, size))))
        if what is not None:
            yield HEAD, what
    others = sorted(target_checksums(manifest).keys() - {CONFIG, HEAD})
    for key, data in zip(others, store.get_each(others), strict=True):
        if (what := "missing" if data is None else file_fault(manifest, key, [data])) is not None:
            yield key, what
    specs = array_specs(manifest.identity, manifest.totals.shards)
    groups = sorted({spec.name.split("/")[0] for spec in specs})
    for name, data in zip(groups, _documents(store, groups), strict=True):
        if (what := _group_fault(data)) is not None:
            yield f"{name}/zarr.json", what
    for spec, data in zip(specs, _documents(store, [spec.name for spec in specs]), strict=True):
        if (what := _array_fault(store, spec, data)) is not None:
            yield f"{spec.name}/zarr.json", what


def stored_otherwise(store: Store, manifest: Manifest) -> set[str]:
    """The arrays that another tool has stored in other codecs or chunks: plain Zarr reads them, and we by it."""
    specs = array_specs(manifest.identity, manifest.totals.shards)
    documents = zip(specs, _documents(store, [spec.name for spec in specs]), strict=True)
    return {spec.name for spec, data in documents if data and not is_ours(data, spec) and not _holds_ours(store, spec)}


def _documents(store: Store, names: Sequence[str]) -> Iterator[bytes | None]:
    return store.get_each([f"{name}/zarr.json" for name in names])


def _group_fault(data: bytes | None) -> str | None:
    if data is None:
        return "missing"
    try:
        document = json.loads(data)
        sound = document["zarr_format"] == 3 and document["node_type"] == "group"
    except (ValueError, KeyError, TypeError):
        sound = False
    return None if sound else "is no document of a Zarr group"


def _array_fault(store: Store, spec: ArraySpec, data: bytes | None) -> str | None:
    if data is None:
        return "missing"
    try:
        differences = [f"{name} {said}, the manifest {wanted}" for name, said, wanted in _differences(spec, data)]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return "is no document of a Zarr array"
    if differences:
        return f"says {differences[0]}"
    if not is_ours(data, spec) and _holds_ours(store, spec):
        return "describes other codecs or chunks than the array's objects have"
    return None


def _differences(spec: ArraySpec, data: bytes) -> Iterator[tuple[str, Any, Any]]:
    """(field, what it is, what it should be). Codecs and chunks may be another tool's, all else follows from the manifest."""
    document: dict[str, Any] = json.loads(data)
    shape, keys = document["shape"], document["chunk_key_encoding"]
    # An append that is under way, or was given up, has made it longer by whole shards.
    longer = shape[0] >= spec.shape[0] and shape[0] % spec.shard_rows == 0
    separator = keys.get("configuration", {}).get("separator", "/")
    own: dict[str, Any] = document.get("attributes", {})
    yield from (
        (name, said, wanted)
        for name, said, wanted in (
            ("zarr_format", document["zarr_format"], 3),
            ("node_type", document["node_type"], "array"),
            ("shape", shape, [shape[0] if longer else spec.shape[0], *spec.shape[1:]]),
            ("data_type", document["data_type"], spec.dtype),
            ("chunk keys", f"{keys['name']} {separator}", "default /"),
            ("attributes", {name: own.get(name) for name in spec.attributes}, spec.attributes),
        )
        if said != wanted
    )


def _holds_ours(store: Store, spec: ArraySpec) -> bool:
    # Whether any shard's first chunk lies where we write it, with its checksum.
    reader = ChunkReader(store, spec)
    for first in range(0, spec.shape[0], spec.shard_rows):
        try:
            read_rows([reader], [(first, 1)])
        except CacheDamaged:
            continue
        return True
    return False


def _head_fault(store: Store, size: int, target: TargetIdentity) -> str | None:
    try:
        shapes, end = _safetensors_header(store, size)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return "is no safetensors file"
    if end != size:
        return f"{size:,} bytes, its own header says {end:,}"
    rows = [target.vocab_size, target.hidden_size]
    needed = {"embed_tokens.weight": rows, "norm.weight": rows[1:]} | ({} if target.tied else {"lm_head.weight": rows})
    for name, shape in needed.items():
        if shapes.get(name) != shape:
            return f"lacks {name}" if name not in shapes else f"{name} has shape {shapes[name]}, the target's {shape}"
    return None


def _safetensors_header(store: Store, size: int) -> tuple[dict[str, Any], int]:
    """Each tensor's shape, and how many bytes the file should have. Raises ValueError and its like where it is no such file."""
    (first,) = store.read([Span(HEAD, 0, LENGTH_BYTES)])
    length = int.from_bytes(first, "little")
    if len(first) < LENGTH_BYTES or not 0 < length <= min(MOST_HEADER_BYTES, size - LENGTH_BYTES):
        raise ValueError("no header")
    (text,) = store.read([Span(HEAD, LENGTH_BYTES, length)])
    tensors: dict[str, Any] = json.loads(bytes(text))
    tensors.pop("__metadata__", None)
    end = max(int(tensor["data_offsets"][1]) for tensor in tensors.values())
    return {name: tensor["shape"] for name, tensor in tensors.items()}, LENGTH_BYTES + length + end
