"""Several finished caches of the same settings become one: shard objects are copied as they are, nothing is decoded.

Shards are numbered on from cache to cache. A sample whose tokens came before is left out of the index, and a shard of which
nothing is left is not copied. All is written as in a capture: shard objects, the shard's record, index, and zarr.json last.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from cache.append import array_document, put_array_document
from cache.checksum import crc32c
from cache.disk import check_free, needed_bytes
from cache.index import write_index
from cache.layout import write_root
from cache.parts import Part, manifest_of, opened, parts_of, pieces, target_files
from cache.read import Cache
from cache.store import Store, open_store
from cache.verify import sound_or_forgotten
from cache.write import existing_manifest, is_committed, object_sizes, read_records
from schemas.arrays import array_specs
from schemas.errors import CacheDamaged, CacheError
from schemas.manifest import Manifest, brief, first_difference
from schemas.records import CommitRecord, ObjectRecord, record_name
from schemas.say import Say


@dataclass(frozen=True)
class Merged:
    """A finished merge: its manifest, and how many samples of each cache had come before."""

    manifest: Manifest
    duplicates: list[int]


def merge(paths: Sequence[str], out: str, say: Say) -> Merged:
    """Join the caches at `paths`, in that order, into a new one at `out`; what an earlier run has copied is not copied again.

    Raises OptionError for the arguments and a disk that is too small, CacheError for caches that cannot be joined (naming the
    field and both values) or an `out` that holds something else, CacheDamaged for an object that is not what its record says.
    """
    parts = parts_of(opened(paths, out))
    manifest = manifest_of(parts)
    merged = Merged(manifest.model_copy(update={"complete": True}), [part.duplicates for part in parts])
    found = existing_manifest(out)
    if found is not None:
        _check_same(out, found, merged.manifest)
        if found.complete and sound_or_forgotten(out, "copying again what is", say):
            say.note(f"{out} is already the merge of these caches: nothing to do")
            return merged
    store, index = open_store(out), pa.concat_tables([part.index for part in parts]).combine_chunks()
    store.clean_workspaces()
    missing = _missing(store, parts)
    check_free(store, *needed_bytes(manifest.identity, len(missing), index.nbytes))
    if found is None:
        write_root(store, manifest)
    _write_arrays(store, parts[0].cache.store, manifest)
    _copy_shards(store, missing, say)
    for name in target_files(parts[0].cache):
        store.put(name, pieces(parts[0].cache.store, name))
    write_index(store, index)
    write_root(store, merged.manifest)
    store.clean_workspaces()
    return merged


def _check_same(out: str, found: Manifest, wanted: Manifest) -> None:
    # Complete or not, it must be this merge.
    difference = first_difference(wanted, found.model_copy(update={"complete": True}))
    if difference is not None:
        name, ours, theirs = difference
        raise CacheError(
            f"--out {out} holds another cache, with {name} {brief(theirs)}, where this merge has {brief(ours)}: give another --out"
        )


@dataclass(frozen=True)
class _Copy:
    """A shard to be copied: its number in its own cache, and the record that it has in the whole."""

    cache: Cache
    shard: int
    record: CommitRecord


def _missing(store: Store, parts: Sequence[Part]) -> list[_Copy]:
    """The shards that are not copied yet: what lies in their place is not, by record and sizes, what the parts have."""
    copies: list[_Copy] = []
    for part in parts:
        for shard, record in zip(part.shards, read_records(part.cache.store, part.shards), strict=True):
            assert record is not None, "opening the cache has checked it"
            copies.append(_Copy(part.cache, shard, _renumbered(part.cache, record, len(copies))))
    there = list(read_records(store, range(len(copies))))
    sizes = object_sizes(store, [spec.name for spec in array_specs(parts[0].cache.manifest.identity, 1)])
    return [
        copy
        for copy, held in zip(copies, there, strict=True)
        if held != copy.record or not is_committed(held, held.plan_sha256, copy.record.objects.keys(), sizes)
    ]


def _renumbered(cache: Cache, record: CommitRecord, number: int) -> CommitRecord:
    # It still names the plan that the shard was made by.
    specs, rows = array_specs(cache.manifest.identity, 1), cache.manifest.identity.shard_tokens
    objects = {spec.object_key(number): record.objects[spec.object_key(record.shard)] for spec in specs}
    return CommitRecord(
        shard=number, rows=(number * rows, (number + 1) * rows), plan_sha256=record.plan_sha256, objects=objects
    )


def _write_arrays(store: Store, first: Store, manifest: Manifest) -> None:
    specs = array_specs(manifest.identity, manifest.totals.shards)
    for family in sorted({spec.name.split("/")[0] for spec in specs}):
        if (document := first.get(f"{family}/zarr.json")) is None:
            raise CacheDamaged(
                f"{first.where(f'{family}/zarr.json')} is missing: mend it first (`dflash verify {first.where()} --repair`, then its "
                "own command)"
            )
        store.put(f"{family}/zarr.json", [document])
    for spec in specs:
        put_array_document(store, spec.name, array_document(first, spec.name), spec.shape[0])


def _copy_shards(store: Store, missing: Sequence[_Copy], say: Say) -> None:
    for done, copy in enumerate(missing, 1):
        record = copy.record
        for spec in array_specs(copy.cache.manifest.identity, 1):
            new = spec.object_key(record.shard)
            store.put(new, _verified(copy.cache, spec.object_key(copy.shard), record.objects[new]))
        store.put(record_name(record.shard), [record.model_dump_json(indent=1).encode()])
        say.progress("merge", done, len(missing))


def _verified(cache: Cache, key: str, wanted: ObjectRecord) -> Iterator[memoryview]:
    """An object's bytes in pieces. At the end, before it can appear under its name, CacheDamaged where they are other bytes."""
    size = checksum = 0
    for piece in pieces(cache.store, key):
        size, checksum = size + len(piece), crc32c(piece, checksum)
        yield piece
    if (size, f"{checksum:08x}") != (wanted.bytes, wanted.crc32c):
        raise CacheDamaged(
            f"{cache.path}/{key} does not match its commit record ({size:,} bytes, checksum {checksum:08x}, not {wanted.bytes:,}, "
            f"{wanted.crc32c}): mend it first (`dflash verify {cache.path} --deep --repair`, then its own command)"
        )
