"""Which caches can be joined, and what each gives to the whole: shards numbered on, samples that came before left out."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from cache.append import array_document
from cache.generations import GENERATIONS, MERGED
from cache.index import totals_of
from cache.read import Cache, open_cache
from cache.spans import pieces_of
from cache.store import Store
from schemas.arrays import array_specs
from schemas.errors import CacheDamaged, CacheError, OptionError
from schemas.manifest import CONVERTED, Manifest, Source, first_difference

DUPLICATE = "duplicate"


@dataclass(frozen=True)
class Part:
    """What one cache gives: the rows of its index that are new (at their places in the whole), and which of its shards."""

    cache: Cache
    index: pa.Table
    shards: list[int]
    sources: tuple[Source, ...]
    duplicates: int


def opened(paths: Sequence[str], out: str) -> list[Cache]:
    """The caches, each finished and sound at a look, of the same settings, head, tokenizer and array metadata."""
    if len(paths) < 2:
        raise OptionError("merge joins at least two caches: give more")
    places = [path.rstrip("/") if "://" in path else str(Path(path).resolve()) for path in (*paths, out)]
    if twice := [path for path, place in zip((*paths, out), places, strict=True) if places.count(place) > 1]:
        raise OptionError(f"{twice[0]} is given twice: name each cache once, and a new folder as --out")
    caches = [open_cache(path) for path in paths]
    first, files = caches[0], target_files(caches[0])
    for cache in caches[1:]:
        difference = first_difference(first.manifest.identity, cache.manifest.identity) or _masked_otherwise(
            first, cache
        )
        if difference is not None:
            name, ours, theirs = difference
            raise CacheError(
                f"{cache.path} was captured with {name} {theirs!r}, {first.path} with {ours!r}: only caches of the same settings can "
                "be merged"
            )
        others = target_files(cache)
        for name in sorted(files.keys() | others.keys()):
            if files.get(name) != others.get(name):
                raise CacheError(
                    f"{cache.path}/{name} has sha256 {_short(others.get(name))}, {first.path}/{name} has {_short(files.get(name))}: only "
                    "caches of the same target can be merged"
                )
        _check_arrays(first, cache)
    return caches


def _check_arrays(first: Cache, cache: Cache) -> None:
    # What their metadata says beside the number of rows, such as which channels are outliers.
    for spec in array_specs(first.manifest.identity, 1):
        ours, theirs = (array_document(each.store, spec.name) | {"shape": None} for each in (first, cache))
        for key in sorted(ours.keys() | theirs.keys()):
            if ours.get(key) != theirs.get(key):
                raise CacheError(
                    f"{cache.path}/{spec.name} was written with {key} {theirs.get(key)!r}, {first.path}/{spec.name} with "
                    f"{ours.get(key)!r}: only caches of the same settings can be merged"
                )


def target_files(cache: Cache) -> dict[str, str]:
    """The sha256 of each of the target's files, by key."""
    digests = {}
    for key in sorted(cache.store.sizes("target")):
        digest = hashlib.sha256()
        for piece in pieces(cache.store, key):
            digest.update(piece)
        digests[key] = digest.hexdigest()
    return digests


def _masked_otherwise(first: Cache, cache: Cache) -> tuple[str, object, object] | None:
    # Older caches do not say; they kept it.
    ours, theirs = (each.manifest.record.get("reasoning", "keep") for each in (first, cache))
    return None if ours == theirs else ("reasoning", ours, theirs)


def _short(digest: str | None) -> str:
    return "none (no such file)" if digest is None else digest[:16]


def parts_of(caches: Sequence[Cache]) -> list[Part]:
    """What each cache gives, in order: shards numbered on, samples that came before left out."""
    known: set[str] = set()
    parts: list[Part] = []
    shards = sources = 0
    for cache in caches:
        digests = cache.index["tokens_sha256"].to_pylist()
        new = np.array([digest not in known for digest in digests], dtype=bool)
        known.update(digests)
        left = cache.index.filter(pa.array(new))
        kept, place = np.unique(left["shard"].to_numpy(), return_inverse=True)
        rows = cache.manifest.identity.shard_tokens
        within = left["offset"].to_numpy() - left["shard"].to_numpy().astype(np.int64) * rows
        columns = {
            "offset": (shards + place) * rows + within,
            "shard": shards + place,
            "source": left["source"].to_numpy() + sources,
        }
        for name, values in columns.items():
            field = left.schema.field(name)
            left = left.set_column(left.schema.get_field_index(name), field, pa.array(values, field.type))
        told = _sources(cache, new)
        parts.append(Part(cache, left, kept.tolist(), told, int((~new).sum())))
        shards, sources = shards + len(kept), sources + len(told)
    return parts


def _sources(cache: Cache, new: np.ndarray) -> tuple[Source, ...]:
    """The cache's sources; a row of which no sample is left counts as a duplicate."""
    rows = list(zip(cache.index["source"].to_pylist(), cache.index["source_row"].to_pylist(), strict=True))
    lost = set(rows) - {row for row, stays in zip(rows, new.tolist(), strict=True) if stays}
    counts = Counter(source for source, _ in lost)
    told = []
    for number, source in enumerate(cache.manifest.sources):
        if count := counts[number]:
            skipped = source.skipped | {DUPLICATE: source.skipped.get(DUPLICATE, 0) + count}
            source = source.model_copy(update={"kept": source.kept - count, "skipped": dict(sorted(skipped.items()))})
        told.append(source)
    return tuple(told)


def manifest_of(parts: Sequence[Part]) -> Manifest:
    """The manifest of the parts in one cache, which is not complete yet."""
    first, index = parts[0].cache.manifest, pa.concat_tables([part.index for part in parts])
    totals = totals_of(index, sum(len(part.shards) for part in parts))
    records = [part.cache.manifest.record for part in parts]
    names = dict.fromkeys(name for record in records for name in record if name not in (GENERATIONS, MERGED, CONVERTED))
    # Where the caches were made by different versions, all are named.
    record = {name: ", ".join(dict.fromkeys(held[name] for held in records if name in held)) for name in names}
    return first.model_copy(
        update={
            "complete": False,
            "sources": tuple(source for part in parts for source in part.sources),
            "totals": totals,
            "record": record | {MERGED: f"{len(parts)} caches"},
        }
    )


def pieces(store: Store, key: str) -> Iterator[memoryview]:
    """An object's bytes, a few MiB at a time. Raises CacheDamaged."""
    try:
        yield from store.read(list(pieces_of(key, store.size(key) or 0)))
    except OSError as fault:
        raise CacheDamaged(f"{store.where(key)} cannot be read ({fault.strerror}): mend it, then merge again") from None
