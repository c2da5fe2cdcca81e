"""Samples of a cache that is there already, so that a capture of the same data by the same rules need not tokenise it again.

A cache that is captured anew with other layers or another codec has the same tokens. They are taken from its plan, or where it is
finished from its arrays; all that decides them must be known to be the same, else the data is read.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cache.generations import GENERATIONS, MERGED
from cache.index import index_vouched
from cache.plan import Plan
from cache.read import open_cache
from cache.store import open_store
from capture.collect import DUPLICATE, OWN_COLUMNS, Collected, Gathered, Samples
from capture.conversations import NO_ASSISTANT
from capture.lines import Scan
from capture.messages import UNKNOWN_ROLE
from capture.samples import EMPTY, NOTHING_SUPERVISED, TOO_SHORT, Sample, tokens_sha256
from capture.settings import Settings, reading_record
from capture.spool import spool_folder
from capture.tell import counts_of_record, first_skipped_of_record, versions_record
from schemas.errors import CacheDamaged, CacheError
from schemas.manifest import CONVERTED, Manifest
from schemas.say import Say

# Rows that are left out without --skip-bad-rows.
SOUND_REASONS = {DUPLICATE, NO_ASSISTANT, UNKNOWN_ROLE, EMPTY, NOTHING_SUPERVISED, TOO_SHORT}
DECISIVE = ("target", "tokenizer_sha256", "chat_template_sha256", "max_length", "val_fraction")
# Files of the target beside those hashed above: its end tokens, special tokens and the tokenizer's class and switches.
TOKEN_FILES = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
Tokens = tuple[NDArray[np.int32], NDArray[np.uint8]]


def recall(settings: Settings, scans: Sequence[Scan], found: Manifest | None, say: Say) -> Collected | None:
    """What `collect` would give, out of the cache at --out; None where that is not certain, or it cannot be read."""
    out = settings.options.out
    counts = None if found is None else counts_of_record(found)
    first_skipped = None if found is None else first_skipped_of_record(found)
    if found is None or counts is None or first_skipped is None or not _same_tokens(settings, scans, found):
        return None
    gathered = Gathered(Samples(spool_folder(out)), set())
    turns: list[int] = []
    try:
        for rows, tokens in _shards(out, found):
            turns += _add(gathered, rows, tokens)
    except (CacheError, CacheDamaged):  # damaged, or never planned
        return None
    if len(gathered.samples) != found.totals.samples:
        return None
    index = gathered.samples.rows()
    # As the rows came: by source, row and turn.
    order = np.lexsort((np.array(turns), index["source_row"].to_numpy(), index["source"].to_numpy()))
    gathered.samples.put_in_order(order)
    gathered.first_skipped, gathered.duplicates = first_skipped, counts.pop(DUPLICATE, 0)
    gathered.counts = Counter(counts)
    say.note(f"{out}: {len(order):,} samples taken from the {'cache' if found.complete else 'plan'} that is there")
    return gathered.collected(found.sources)


def _same_tokens(settings: Settings, scans: Sequence[Scan], found: Manifest) -> bool:
    asked, held, record = settings.identity, found.identity, found.record
    if not type(settings.chat.tokenizer).__module__.startswith("transformers."):  # code that came with the target
        return False
    if any(getattr(asked, name) != getattr(held, name) for name in DECISIVE):
        return False
    if any(name in record for name in (GENERATIONS, MERGED, CONVERTED)):
        return False
    if any(record.get(name) != value for name, value in (reading_record(settings) | versions_record()).items()):
        return False
    reasons = {reason for source in found.sources for reason in source.skipped}
    if not settings.options.skip_bad_rows and not reasons <= SOUND_REASONS:
        return False
    if [(s.shown, s.sha256, s.rows) for s in scans] != [(s.path, s.sha256, s.rows) for s in found.sources]:
        return False
    return all(
        open_store(settings.options.out).get(f"target/{name}") == (own.read_bytes() if own.is_file() else None)
        for name in TOKEN_FILES
        for own in [settings.ref.folder / name]
    )


def _shards(out: str, found: Manifest) -> Iterator[tuple[pa.Table, Tokens]]:
    # The index's rows of each shard, and the tokens of its samples one after the other. Raises CacheError.
    store = open_store(out)
    if not found.complete:
        plan = Plan.open(store)
        if plan is None:
            raise CacheError(f"{out} has no plan")
        for shard in plan.shards:
            table = plan.shard(shard)
            ids, mask = (table[name].combine_chunks().flatten().to_numpy() for name in ("input_ids", "loss_mask"))
            yield table, (ids, mask)
        return
    if not index_vouched(store):
        raise CacheDamaged(f"{out} does not say, or not truly, which rows its index holds")
    cache = open_cache(out, found.identity.layers[:1])
    shards = cache.index["shard"].to_numpy()
    bounds = [0, *(np.flatnonzero(np.diff(shards)) + 1).tolist(), len(shards)]
    for start, stop in pairwise(bounds):
        rows = cache.index.slice(start, stop - start)
        tokens = int(rows["length"].to_numpy().sum())
        ids_T, mask_T = cache.tokens(rows["offset"][0].as_py(), tokens)
        yield rows, (ids_T.numpy().astype(np.int32), mask_T.numpy().astype(np.uint8))


def _add(gathered: Gathered, rows: pa.Table, tokens: Tokens) -> list[int]:
    # Each sample's turn, which its id ends with. Raises CacheDamaged where its tokens are not those of the index.
    turns, place = [], 0
    columns: dict[str, list[Any]] = {name: rows[name].to_pylist() for name in (*OWN_COLUMNS, "length", "source")}
    for number, length in enumerate(columns["length"]):
        own = slice(place, place + length)
        known = {name: columns[name][number] for name in OWN_COLUMNS}
        sample = Sample(input_ids=tokens[0][own], loss_mask=tokens[1][own], **known)
        if tokens_sha256(sample.input_ids, sample.loss_mask) != sample.tokens_sha256:
            raise CacheDamaged(f"sample {sample.sample_id} has other tokens than the index says")
        gathered.keep(sample, columns["source"][number])
        turns.append(int(known["sample_id"].rpartition("-")[2]))
        place += length
    return turns
