"""The manifest: the attribute "dflash" of a cache's root group, which says what the cache holds and what made it (format 1)."""

from typing import Annotated, Any, Final, Literal

from pydantic import Field, field_validator, model_validator

from schemas.errors import CacheError
from schemas.strict import Strict, parse

FORMAT: Final = "dflash-hidden-states"
VERSION: Final = 1
ATTRIBUTE = "dflash"
# The entry of a manifest's record that names the first row left out for each reason.
FIRST_SKIPPED = "first_skipped"
# The entry with the checksums of the target's files.
TARGET_CHECKSUMS = "target_crc32c"
# The entry that says of a converted cache from which codecs it came.
CONVERTED = "converted"
LAYER_CONVENTION: Final = "output of decoder layer i, before the final norm"

Codec = Literal["f32", "bf16", "bf16-zstd", "fp8", "int8", "int4"]
MaskTokenSource = Literal["tokenizer", "unused row", "unused special", "user"]
Count = Annotated[int, Field(ge=0)]


class TargetIdentity(Strict):
    """Which frozen LLM the hidden states come from, and what of its arithmetic a draft must repeat."""

    name: str
    revision: str | None
    architectures: tuple[str, ...]
    config_sha256: str
    num_hidden_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    tied: bool
    embedding_scale: float
    logit_scale: float
    logit_softcap: float | None


class Identity(Strict):
    """Everything that decides the bytes of a cache, the data aside. A capture that resumes or appends needs it to match."""

    target: TargetIdentity
    layers: tuple[int, ...] = Field(min_length=1)
    layer_convention: Literal["output of decoder layer i, before the final norm"] = LAYER_CONVENTION
    tokenizer_sha256: str
    chat_template_sha256: str
    codec: Codec
    top_k: int = Field(ge=1)
    dtype: str
    tp: int = Field(ge=1)
    mask_token_id: int = Field(ge=0)
    max_length: int = Field(ge=2)
    val_fraction: float = Field(ge=0, lt=1)
    seed: int
    shard_tokens: int = Field(ge=1)
    batch_tokens: int = Field(ge=1)
    chunk_tokens: dict[str, Annotated[int, Field(ge=1)]]

    @field_validator("layers")
    @classmethod
    def _ascending(cls, layers: tuple[int, ...]) -> tuple[int, ...]:
        if list(layers) != sorted(set(layers)) or layers[0] < 0:
            raise ValueError("layers are ascending, distinct and not negative")
        return layers

    @model_validator(mode="after")
    def _whole_chunks(self) -> "Identity":
        for family in ("tokens", "hidden", "logits"):
            if family not in self.chunk_tokens:
                raise ValueError(f"chunk_tokens has no {family}")
        for family, rows in self.chunk_tokens.items():
            if self.shard_tokens % rows:
                raise ValueError(f"chunk_tokens.{family} {rows} does not divide shard_tokens {self.shard_tokens}")
        return self


class Source(Strict):
    """One input file: rows = kept + the sum of skipped."""

    path: str
    sha256: str
    rows: Count
    kept: Count
    skipped: dict[str, Count]


class Totals(Strict):
    """What the cache holds. `tokens` are real rows; the arrays are longer by the padding at the shards' ends."""

    samples: int = Field(ge=1)
    tokens: int = Field(ge=1)
    supervised: Count
    shards: int = Field(ge=1)
    val_samples: Count


class Manifest(Strict):
    """The whole manifest. `record` holds tool versions and other host-independent facts.

    They decide nothing but for `format`, `reasoning` and `template_date`, how rows were read: a capture that resumes needs
    those to match.
    """

    format: Literal["dflash-hidden-states"] = FORMAT
    version: Literal[1] = VERSION
    complete: bool
    identity: Identity
    sources: tuple[Source, ...]
    totals: Totals
    mask_token_source: MaskTokenSource
    record: dict[str, str]


def read_manifest(attributes: dict[str, Any], where: str) -> Manifest:
    """The manifest out of a root group's attributes; raises CacheError where it is absent, of another version or malformed."""
    data = attributes.get(ATTRIBUTE)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise CacheError(
            f"{where} is no hidden-state cache (no {FORMAT!r} manifest in zarr.json): give a folder that `dflash capture` wrote"
        )
    if data.get("version") != VERSION:
        version = data.get("version")
        raise CacheError(
            f"{where} has format version {version!r}, this program reads {VERSION}: capture again or use the matching release"
        )
    return parse(Manifest, data, f"{where}/zarr.json", CacheError)


def first_difference(wanted: Strict, found: Strict, prefix: str = "") -> tuple[str, Any, Any] | None:
    """The first field in which two records of one kind differ: (dotted name, wanted value, found value), or None."""
    for name in type(wanted).model_fields:
        ours, theirs = getattr(wanted, name), getattr(found, name)
        if ours == theirs:
            continue
        if isinstance(ours, Strict) and isinstance(theirs, Strict):
            return first_difference(ours, theirs, f"{prefix}{name}.")
        return f"{prefix}{name}", ours, theirs
    return None


def brief(value: object) -> str:
    """A field's value for a message: of sources, what tells them apart."""
    if isinstance(value, tuple) and value and isinstance(value[0], Source):
        return ", ".join(f"{source.path} ({source.kept} rows kept, sha256 {source.sha256[:16]})" for source in value)
    return repr(value)
