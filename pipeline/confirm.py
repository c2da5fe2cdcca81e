"""Before a cache is given up: what would be lost, and the word that must be typed."""

import sys

from pipeline.inspect import size_text
from schemas.arrays import bytes_per_token
from schemas.manifest import Manifest

WORD = "overwrite"


def confirm_overwrite(path: str, lost: Manifest) -> bool:
    """Whether the cache may be replaced: on a terminal the user types the word; elsewhere the option has said it."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    print(f"{lost_text(path, lost)}\ntype {WORD} to replace it: ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip() == WORD


def lost_text(path: str, lost: Manifest) -> str:
    """What replacing a cache loses, on one line."""
    identity, totals = lost.identity, lost.totals
    size = totals.shards * identity.shard_tokens * bytes_per_token(identity)[0]
    state = "a finished cache" if lost.complete else "an unfinished cache"
    return (
        f"{path} holds {state} of {identity.target.name}, layers {', '.join(map(str, identity.layers))}: {totals.samples:,} samples, "
        f"{totals.tokens:,} tokens, {size_text(size)}; --overwrite loses it"
    )
