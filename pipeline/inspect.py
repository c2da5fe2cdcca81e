"""`dflash inspect`: what a cache holds, in words; and the words for a plan and for a finished capture."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from schemas.arrays import bytes_per_token
from schemas.manifest import FIRST_SKIPPED, TARGET_CHECKSUMS, Identity, Manifest, Source, Totals

if TYPE_CHECKING:
    from cache.verify import Fault
    from capture.run import DryRun

# Entries of the record that have a line of their own, or say nothing to people.
UNSHOWN = (FIRST_SKIPPED, TARGET_CHECKSUMS)


def rows_text(rows: Iterable[tuple[str, str]], indent: str = "  ") -> str:
    """Two aligned columns."""
    pairs = list(rows)
    width = max(len(name) for name, _ in pairs)
    return "\n".join(f"{indent}{name:<{width}}  {value}" for name, value in pairs)


def size_text(count: float) -> str:
    """Bytes for people: 1,536 is "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def totals_rows(identity: Identity, totals: Totals) -> list[tuple[str, str]]:
    """The lines that a plan and a cache share."""
    all_bytes, hidden_bytes = bytes_per_token(identity)
    rows = totals.shards * identity.shard_tokens
    fill = totals.tokens / rows if rows else 0.0
    return [
        ("target", f"{identity.target.name} ({', '.join(identity.target.architectures)}, {identity.dtype})"),
        ("layers", f"{', '.join(map(str, identity.layers))} of {identity.target.num_hidden_layers}"),
        (
            "codec",
            f"{identity.codec}: {hidden_bytes:,} bytes of hidden states a token, {all_bytes:,} with tokens and top-{identity.top_k}",
        ),
        ("samples", f"{totals.samples:,}, of which {totals.val_samples:,} held out"),
        ("tokens", f"{totals.tokens:,}, of which {totals.supervised:,} supervised"),
        ("shards", f"{totals.shards:,} of {identity.shard_tokens:,} rows, {fill:.1%} filled"),
        ("bytes", f"{size_text(rows * all_bytes)} ({rows * all_bytes:,})"),
    ]


def sources_text(sources: Sequence[Source]) -> str:
    """Where the samples come from: every row is kept or counted under a reason."""
    lines = ["data"]
    for source in sources:
        skipped = "".join(f", {count:,} {reason}" for reason, count in source.skipped.items())
        lines.append(f"  {source.path}: {source.rows:,} rows, {source.kept:,} kept{skipped}")
    return "\n".join(lines)


def plan_text(plan: "DryRun") -> str:
    """What `dflash capture --dry-run` prints: the plan and the disk it would need."""
    manifest = plan.manifest
    rows = [
        *totals_rows(manifest.identity, manifest.totals),
        ("free disk", "not bounded" if plan.free_bytes is None else size_text(plan.free_bytes)),
        ("cut", f"{plan.truncated:,} samples at {manifest.identity.max_length:,} tokens"),
        ("mask token", f"{manifest.identity.mask_token_id} ({manifest.mask_token_source})"),
    ]
    return "\n".join(["plan (nothing was written)", rows_text(rows), sources_text(manifest.sources)])


def summary_text(path: str, manifest: Manifest) -> str:
    """One line for a finished capture."""
    totals = manifest.totals
    return (
        f"{path}: {totals.samples:,} samples, {totals.tokens:,} tokens, layers {', '.join(map(str, manifest.identity.layers))}, "
        f"{totals.shards} shards, complete"
    )


def faults_text(path: str, manifest: Manifest, faults: Sequence["Fault"], deep: bool) -> str:
    """What `dflash verify` prints: each fault with the samples it touches, or that there is none."""
    totals = manifest.totals
    if not faults:
        looked = (
            "every checksum, hash and state" if deep else "records, sizes, index and documents; --deep reads every byte"
        )
        return f"{path}: sound ({totals.shards:,} shards, {totals.samples:,} samples; {looked})"
    lines = []
    for fault in faults:
        names = ", ".join(fault.samples[:4]) + (
            f" and {len(fault.samples) - 4:,} more" if len(fault.samples) > 4 else ""
        )
        lines.append(f"{fault.where}: {fault.what}" + (f" (samples {names})" if names else ""))
    touched = {name for fault in faults for name in fault.samples}
    return "\n".join([*lines, f"{len(faults):,} faults, {len(touched):,} of {totals.samples:,} samples touched"])


def inspect_text(path: str, sample: int, width: int) -> str:
    """The whole of `dflash inspect`: manifest, sizes and one decoded sample. Raises CacheError, CacheDamaged, OptionError."""
    from cache.read import open_cache
    from schemas.errors import OptionError

    cache = open_cache(path)
    manifest = cache.manifest
    if not 0 <= sample < len(cache.index):
        raise OptionError(f"--sample {sample}: {path} holds samples 0 to {len(cache.index) - 1}")
    identity, record = manifest.identity, manifest.record
    disk = sum(cache.store.sizes().values())
    rows = [
        *totals_rows(identity, manifest.totals),
        ("on disk", f"{size_text(disk)} ({disk:,} bytes)"),
        ("mask token", f"{identity.mask_token_id} ({manifest.mask_token_source})"),
        (
            "max length",
            f"{identity.max_length:,} tokens; {sum(cache.index['truncated'].to_pylist()):,} samples were cut",
        ),
        ("tokenizer", f"sha256 {identity.tokenizer_sha256[:16]}, template {identity.chat_template_sha256[:16]}"),
        ("target config", f"sha256 {identity.target.config_sha256[:16]}, revision {identity.target.revision}"),
        ("made with", ", ".join(f"{name} {record[name]}" for name in record if name not in UNSHOWN)),
    ]
    if skipped := record.get(FIRST_SKIPPED):
        rows.append(("left out first", skipped))
    return "\n".join(
        [
            f"{path}: hidden-state cache, format {manifest.version}",
            rows_text(rows),
            sources_text(manifest.sources),
            "",
            *_sample_lines(cache, sample, width),
        ]
    )


def _sample_lines(cache: Any, sample: int, width: int) -> list[str]:
    row = cache.index.slice(sample, 1).to_pylist()[0]
    ids, mask = cache.tokens(row["offset"], row["length"])
    tokenizer = _tokenizer(cache)
    lines = [
        f"sample {sample}: {row['sample_id']} ({row['split']}, {row['length']} tokens, {row['supervised']} supervised, "
        f"shard {row['shard']}); supervised text stands in ⟦ ⟧"
    ]
    return [*lines, *_wrap(marked_text(tokenizer, ids.tolist(), mask.tolist()), width)]


def _tokenizer(cache: Any) -> Any:
    from transformers import AutoTokenizer

    from schemas.errors import CacheDamaged, DflashError

    try:
        with cache.target_folder() as folder:
            # An absolute path, since a relative one that is missing would be looked for on the Hub.
            return AutoTokenizer.from_pretrained(folder.absolute())
    except DflashError:  # an object store that does not answer, or no room for what it gives
        raise
    except Exception as fault:  # whatever json or tokenizers raise for a file that is missing or torn
        raise CacheDamaged(
            f"{cache.store.where('target')} holds no tokenizer that can be read ({str(fault).splitlines()[0]}): the cache is "
            "damaged; capture again"
        ) from None


def marked_text(tokenizer: Any, ids: Sequence[int], mask: Sequence[bool]) -> str:
    """The decoded sample, special tokens visible, each supervised run in ⟦ ⟧."""
    parts, start = [], 0
    while start < len(ids):
        end = start
        while end < len(ids) and mask[end] == mask[start]:
            end += 1
        text = tokenizer.decode(ids[start:end], skip_special_tokens=False)
        parts.append(f"⟦{text}⟧" if mask[start] else text)
        start = end
    return "".join(parts)


def _wrap(text: str, width: int) -> list[str]:
    lines = []
    for line in text.split("\n"):
        pieces = [line[start : start + width - 2] for start in range(0, len(line), width - 2)] or [""]
        lines += [f"  {piece}" for piece in pieces]
    return lines
