"""What a draft is worth: accepted tokens from the cache's held-out samples, or by real decoding against the target."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cache.device import resolve_device
from cache.layout import read_root
from cache.read import Cache, open_cache
from cache.store import open_store
from capture.lines import scan_files
from capture.prompts import read_prompts
from draft.accept import evaluate_cache
from draft.decode import decode_prompts
from draft.files import load_draft
from draft.model import Draft
from pipeline.results import CACHE, DECODED, check_json, keep_result, write_json
from schemas.draft import draft_folder
from schemas.errors import DraftError, OptionError
from schemas.manifest import Identity
from schemas.options import EvaluateOptions
from schemas.say import Say
from target.chat import open_chat, prompt_ids
from target.load import Target, TargetRef, eos_ids, load_target, load_tokenizer, resolve_target
from train.rundir import PROVENANCE, read_provenance

Prompt = tuple[str, list[int]]
# Options that mean something to some ways of evaluating only.
DECODING_ONLY: tuple[str, ...] = ("through_codec", "max_new_tokens", "dtype", "attn", "trust_remote_code")
CACHE_ONLY: tuple[str, ...] = ("through_codec", "split")


def evaluate(
    options: EvaluateOptions, json_path: str | None, say: Say, show: Callable[[dict[str, Any]], None] = lambda _: None
) -> dict[str, Any]:
    """Evaluate as asked, `show` the figures, keep them (in `json_path` and, of all held-out samples, in the run) and return them.

    They are shown first, since a disk may be full by now. Raises UserErrors.
    """
    if json_path is not None:
        check_json(Path(json_path))
    _warn_of_idle(options, say)
    result = _from_cache(options, say) if options.target is None else _by_decoding(options, say)
    result = {"draft": options.draft, **result}
    show(result)
    if options.limit is None and options.split == "val":
        keep_result(options.draft, CACHE if options.target is None else DECODED, result)
    else:
        say.note("measured on a part, or on what the draft was trained on: not kept for `dflash compare`")
    if json_path is not None:
        write_json(Path(json_path), result)
    return result


def _warn_of_idle(options: EvaluateOptions, say: Say) -> None:
    if options.target is None:
        idle, needed = DECODING_ONLY, "--target"
    elif options.prompts is not None:
        idle, needed = CACHE_ONLY, "--cache"
    else:
        return
    defaults = EvaluateOptions(draft=options.draft)
    for name in idle:
        if getattr(options, name) != getattr(defaults, name):
            say.warn(f"{name}={getattr(options, name)} has no effect without {needed}")


def _from_cache(options: EvaluateOptions, say: Say) -> dict[str, Any]:
    if options.cache is None or options.prompts is not None:
        raise OptionError(
            "evaluate needs --cache (acceptance without the target), or --target with --prompts or --cache (real decoding)"
        )
    draft = load_draft(draft_folder(options.draft), resolve_device(options.device), "float32")
    cache = _open_cache(options.cache, draft, options.draft, say)
    figures = evaluate_cache(draft, cache, options.split, lengths=options.lengths, limit=options.limit, say=say)
    return {"cache": options.cache, "split": options.split, **figures}


def _by_decoding(options: EvaluateOptions, say: Say) -> dict[str, Any]:
    if (options.prompts is None) == (options.cache is None):
        raise OptionError("evaluate --target needs either --prompts or --cache: where do the prompts come from?")
    assert options.target is not None
    device = resolve_device(options.device)
    draft = load_draft(draft_folder(options.draft), device, "float32")
    cache = None
    if options.cache is not None:
        cache = _open_cache(options.cache, draft, options.draft, say)
    reference = resolve_target(options.target, options.trust_remote_code)
    if cache is not None:
        prompts = cache_prompts(cache, options.split, options.limit)
    else:
        assert options.prompts is not None
        prompts = file_prompts(reference, options.prompts, options.limit)
    target = load_target(reference, options.dtype, options.device, options.attn)
    check_shapes(draft, target)
    dtype = str(target.dtype).removeprefix("torch.")
    if cache is not None and (held := cache.manifest.identity.dtype) != dtype:
        say.warn(
            f"{options.cache} was captured in {held}, the target decodes in {dtype}: answers, and so walk and decoded, differ by "
            f"rounding (--dtype {held} decodes as it was captured)"
        )
    codec = cache.codec if cache is not None and options.through_codec else None
    eos = eos_ids(reference, load_tokenizer(reference))
    figures = decode_prompts(
        draft, target, prompts, options.max_new_tokens, eos, codec=codec, lengths=options.lengths, say=say
    )
    if dtype != "float32" and figures["lossless"]["equal"] < figures["lossless"]["prompts"]:
        say.note(
            f"in {dtype} a block of tokens rounds otherwise than one token, so answers may part where two tokens are all but equal: "
            "--dtype float32 tells that from a fault"
        )
    where = {"cache": options.cache, "split": options.split} if cache is not None else {"prompts": options.prompts}
    return {"target": reference.name, **where, "max_new_tokens": options.max_new_tokens, **figures}


def _open_cache(path: str, draft: Draft, draft_path: str, say: Say) -> Cache:
    """The cache, with the draft's layers alone, where it is of the draft's target as far as shapes tell; else a DraftError.

    A run knows its target better: a cache of another one of the same shapes is warned of.
    """
    identity = read_root(open_store(path)).identity
    check_same_target(draft, identity, path)
    if (Path(draft_path) / PROVENANCE).is_file():
        trained, held = read_provenance(Path(draft_path)).identity.target, identity.target
        if trained.config_sha256 != held.config_sha256:
            say.warn(
                f"{draft_path} was trained for {trained.name} ({trained.revision}), {path} is of {held.name} ({held.revision}): the "
                "figures are those of a draft for another target"
            )
    cache = open_cache(path, draft.config.dflash_config.target_layer_ids)
    for note in cache.notes:
        say.note(note)
    return cache


def cache_prompts(cache: Cache, split: str, limit: int | None) -> list[Prompt]:
    """(sample id, ids before its first answer) of the split's samples. Raises OptionError where there are none."""
    rows = [row for row in cache.index.to_pylist() if row["split"] == split][:limit]
    if not rows:
        raise OptionError(
            f"{cache.path} holds no {split} samples: capture with a larger --val-fraction, or give --prompts"
        )
    prompts = []
    for row in rows:
        ids, mask = cache.tokens(row["offset"], row["length"])
        prompts.append((row["sample_id"], ids[: int(mask.int().argmax())].tolist()))
    return prompts


def file_prompts(reference: TargetRef, path: str, limit: int | None) -> list[Prompt]:
    """(row's hash, ids) of each prompt of a file, up to its first answer, rendered by the target's template. Raises DataError."""
    chat = open_chat(reference)
    prompts = [prompt for scan in scan_files((path,), limit) for prompt in read_prompts(scan)]
    return [(prompt.sample_id, prompt_ids(chat, prompt.first_messages())) for prompt in prompts]


def check_same_target(draft: Draft, identity: Identity, path: str) -> None:
    """Refuse a cache of another target or mask token than the draft's: its figures would be those of noise."""
    config = draft.config
    pairs = (
        ("hidden size", config.hidden_size, identity.target.hidden_size),
        ("vocabulary", config.vocab_size, identity.target.vocab_size),
        ("target layers", config.num_target_layers, identity.target.num_hidden_layers),
        ("mask token", config.dflash_config.mask_token_id, identity.mask_token_id),
    )
    for name, ours, theirs in pairs:
        if ours != theirs:
            raise DraftError(
                f"the draft's {name} is {ours}, that of {path} is {theirs}: evaluate it on a cache of its own target"
            )


def check_shapes(draft: Draft, target: Target) -> None:
    """Refuse a target that the draft was not made for."""
    pairs = (
        ("hidden size", draft.config.hidden_size, target.config.hidden_size),
        ("vocabulary", draft.config.vocab_size, target.config.vocab_size),
        ("target layers", draft.config.num_target_layers, target.config.num_hidden_layers),
    )
    for name, ours, theirs in pairs:
        if ours != theirs:
            raise DraftError(
                f"the draft's {name} is {ours}, the target's is {theirs}: give the target that the draft was trained for"
            )
