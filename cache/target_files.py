"""The target's files in a cache: config, tokenizer and head, whose checksums the manifest's record holds."""

from collections.abc import Iterable, Mapping
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from cache.checksum import crc32c
from schemas.manifest import TARGET_CHECKSUMS, Manifest

FOLDER, CONFIG, HEAD = "target", "target/config.json", "target/head.safetensors"


def checksums_record(files: Mapping[str, bytes]) -> dict[str, str]:
    """The CRC-32C of each file, by key, as an entry of a manifest's record."""
    return {TARGET_CHECKSUMS: ", ".join(f"{key} {crc32c(data):08x}" for key, data in sorted(files.items()))}


def target_checksums(manifest: Manifest) -> dict[str, str]:
    """The checksum of each file, by key; none in caches that were made before they were recorded."""
    text = manifest.record.get(TARGET_CHECKSUMS, "")
    return dict(part.split(" ", 1) for part in text.split(", ") if " " in part)


def file_fault(manifest: Manifest, key: str, pieces: Iterable[bytes | memoryview | NDArray[np.uint8]]) -> str | None:
    """What is wrong with a file's bytes, given piece by piece, where it is known what they should be."""
    wanted = target_checksums(manifest).get(key)
    found = f"{reduce(lambda before, piece: crc32c(piece, before), pieces, 0):08x}"
    return None if wanted in (None, found) else f"has CRC-32C {found}, the manifest says {wanted}"
