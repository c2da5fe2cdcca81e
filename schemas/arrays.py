"""The Zarr arrays of a cache, for every codec: names, shapes, data types and chunking follow from the manifest's identity alone.

T rows of tokens, H hidden size, K top-k.
"""

from dataclasses import dataclass, field
from functools import cached_property

from schemas.manifest import Codec, Identity

OUTLIER_CHANNELS = 8
CHUNK_BYTES = 1 << 20
SMALL_CHUNK_TOKENS = 16_384

# codec -> (on-disk type, the "dtype" attribute where Zarr has no such type, hidden columns per channel)
HIDDEN_STORAGE: dict[Codec, tuple[str, str | None, float]] = {
    "f32": ("float32", None, 1.0),
    "bf16": ("uint16", "bfloat16", 1.0),
    "bf16-zstd": ("uint16", "bfloat16", 1.0),
    "fp8": ("uint8", "float8_e4m3fn", 1.0),
    "int8": ("int8", None, 1.0),
    "int4": ("uint8", "int4", 0.5),
}
SCALED: frozenset[Codec] = frozenset({"fp8", "int8", "int4"})
WITH_OUTLIERS: frozenset[Codec] = frozenset({"int8", "int4"})
ITEM_BYTES = {"uint8": 1, "int8": 1, "uint16": 2, "float16": 2, "int32": 4, "float32": 4}


@dataclass(frozen=True)
class ArraySpec:
    """One array: `shape[0]` is T, the rows of all shards; a shard object holds `shard_rows` of them in chunks of `chunk_rows`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    shard_rows: int
    chunk_rows: int
    shuffled_zstd: bool = False
    attributes: dict[str, str] = field(default_factory=dict)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one token's row, uncompressed."""
        width = self.shape[1] if len(self.shape) > 1 else 1
        return width * ITEM_BYTES[self.dtype]

    def object_key(self, shard: int) -> str:
        """Where a shard's object lies, relative to the cache: "hidden/1/c/3/0"."""
        return "/".join([self.name, "c", str(shard), *["0"] * (len(self.shape) - 1)])


def hidden_width(codec: Codec, hidden_size: int) -> int:
    """Stored columns of a hidden row: H, or H/2 where two 4-bit values share a byte."""
    return int(hidden_size * HIDDEN_STORAGE[codec][2])


def chunk_rows(row_bytes: int, shard_tokens: int) -> int:
    """Rows of a chunk of about 1 MiB: the largest divisor of the shard of which so many bytes fit.

    Example: H 4096 in bf16 is 8192 bytes a row, so 128 rows; H 192 in f32 allows 1365 rows (768 bytes each), so 1024 of
    a shard of 65,536.
    """
    return _divisor(shard_tokens, max(1, CHUNK_BYTES // row_bytes))


def _divisor(number: int, most: int) -> int:
    return next(divisor for divisor in range(min(number, most), 0, -1) if number % divisor == 0)


def chunk_tokens(codec: Codec, hidden_size: int, top_k: int, shard_tokens: int) -> dict[str, int]:
    """The manifest's `chunk_tokens`: rows per chunk for each family of arrays."""
    hidden_bytes = hidden_width(codec, hidden_size) * ITEM_BYTES[HIDDEN_STORAGE[codec][0]]
    small = _divisor(shard_tokens, SMALL_CHUNK_TOKENS)
    rows = {
        "hidden": chunk_rows(hidden_bytes, shard_tokens),
        "tokens": small,
        "logits": chunk_rows(top_k * 4, shard_tokens),
    }
    if codec in SCALED:
        rows["hidden_scale"] = small
    if codec in WITH_OUTLIERS:
        rows["hidden_outliers"] = small
    return rows


def array_specs(identity: Identity, shards: int) -> list[ArraySpec]:
    """Every array of a cache of `shards` shards, in the order in which a shard's objects are written."""
    rows, codec = shards * identity.shard_tokens, identity.codec

    def spec(
        name: str, width: int | None, dtype: str, attribute: str | None = None, shuffled_zstd: bool = False
    ) -> ArraySpec:
        shape = (rows,) if width is None else (rows, width)
        attributes = {} if attribute is None else {"dtype": attribute}
        chunk = identity.chunk_tokens[name.split("/")[0]]
        return ArraySpec(name, shape, dtype, identity.shard_tokens, chunk, shuffled_zstd, attributes)

    specs = [spec("tokens/input_ids", None, "int32"), spec("tokens/loss_mask", None, "uint8")]
    dtype, attribute, _ = HIDDEN_STORAGE[codec]
    width = hidden_width(codec, identity.target.hidden_size)
    for layer in identity.layers:
        specs.append(spec(f"hidden/{layer}", width, dtype, attribute, shuffled_zstd=codec == "bf16-zstd"))
        if codec in SCALED:
            specs.append(spec(f"hidden_scale/{layer}", None, "float32"))
        if codec in WITH_OUTLIERS:
            specs.append(spec(f"hidden_outliers/{layer}", OUTLIER_CHANNELS, "uint16", "bfloat16"))
    return [
        *specs,
        spec("logits/topk_ids", identity.top_k, "int32"),
        spec("logits/topk_logprobs", identity.top_k, "float16"),
        spec("logits/rest_logprob", None, "float32"),
    ]


def bytes_per_token(identity: Identity) -> tuple[int, int]:
    """Uncompressed bytes of one token's row: (all arrays, the hidden arrays with their scales and outliers)."""
    specs = array_specs(identity, 1)
    return sum(s.row_bytes for s in specs), sum(s.row_bytes for s in specs if s.name.startswith("hidden"))
