"""The tables of a cache: index.parquet, one row per sample, and plan.parquet, the same with the tokens and the work order."""

import pyarrow as pa

from schemas.errors import CacheError

INDEX_SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("row_id", pa.string()),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("length", pa.int32(), nullable=False),
        pa.field("supervised", pa.int32(), nullable=False),
        pa.field("truncated", pa.bool_(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("shard", pa.int32(), nullable=False),
        pa.field("source", pa.int32(), nullable=False),
        pa.field("source_row", pa.int64(), nullable=False),
        pa.field("tokens_sha256", pa.string(), nullable=False),
    ]
)

# `batch` counts from 0 within the sample's shard: the forward pass in which the sample runs.
PLAN_SCHEMA = pa.schema(
    [
        *INDEX_SCHEMA,
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.uint8()), nullable=False),
        pa.field("batch", pa.int32(), nullable=False),
    ]
)

SPLITS = ("train", "val")


def check_table(table: pa.Table, schema: pa.Schema, where: str) -> pa.Table:
    """The table with exactly the schema's columns and types, without file-level metadata; CacheError names the column that differs."""
    found = table.schema
    for wanted in schema:
        position = found.get_field_index(wanted.name)
        if position < 0:
            raise CacheError(
                f"{where}: column {wanted.name!r} is missing: the file is of another version or damaged; capture again"
            )
        if found.field(position).type != wanted.type and not _same_list(found.field(position).type, wanted.type):
            raise CacheError(
                f"{where}: column {wanted.name!r} holds {found.field(position).type}, not {wanted.type}: capture again"
            )
    if unknown := [name for name in found.names if name not in schema.names]:
        raise CacheError(
            f"{where}: unknown column {unknown[0]!r}: the file is of another version; use the matching release"
        )
    return table.select(schema.names).cast(schema)


def _same_list(found: pa.DataType, wanted: pa.DataType) -> bool:
    # Parquet names a list's items "element", Arrow "item": the same type under two names.
    return bool(pa.types.is_list(found) and pa.types.is_list(wanted) and found.value_type == wanted.value_type)
