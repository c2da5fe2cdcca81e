"""The commit record of a shard: what was written, so that a torn or missing object is never read as zeros."""

from pydantic import Field

from schemas.strict import Strict


class ObjectRecord(Strict):
    """One shard object: its size and the CRC-32C of all its bytes, as 8 hexadecimal digits."""

    bytes: int = Field(ge=0)
    crc32c: str = Field(pattern="^[0-9a-f]{8}$")


class CommitRecord(Strict):
    """`shards/<nnnnnn>.json`: written last, after every object of the shard is in place."""

    shard: int = Field(ge=0)
    rows: tuple[int, int]
    plan_sha256: str
    objects: dict[str, ObjectRecord]


def record_name(shard: int) -> str:
    """The record's path in the cache: shards/000012.json."""
    return f"shards/{shard:06d}.json"
