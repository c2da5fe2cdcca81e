"""What a capture will do, as far as the options and the target's small files decide it: the identity of its cache."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cache.codecs import check_codec
from cache.device import resolve_device
from capture.lines import Scan, scan_files
from capture.plan import default_shard_tokens
from capture.samples import SampleRules
from schemas.arrays import chunk_tokens
from schemas.errors import CacheError, OptionError
from schemas.manifest import Identity, Manifest, TargetIdentity
from schemas.options import CaptureOptions
from schemas.ranks import ALONE, Ranks
from schemas.say import Say
from target.architecture import architecture, check_usable
from target.chat import TEMPLATE_DATE, Chat, open_chat
from target.head import HeadTraits, head_traits
from target.layers import check_layers, default_layers
from target.load import TargetRef, config_sha256, read_config, resolve_dtype, resolve_target
from target.parallel import check_parallel
from target.prefill import check_prefill
from target.tokens import chat_template_sha256, tokenizer_sha256

DEFAULT_DATA = Path(__file__).parent / "data" / "conversations.jsonl"


@dataclass(frozen=True)
class Settings:
    """All that follows from options and target, the data aside; `identity.mask_token_id` is still open (0)."""

    ref: TargetRef
    config: Any
    chat: Chat
    traits: HeadTraits
    options: CaptureOptions
    identity: Identity
    device: torch.device


def settle(options: CaptureOptions, say: Say, ranks: Ranks = ALONE) -> Settings:
    """Find the target, read its config and tokenizer. Raises UserError; nothing is written, no weight is read."""
    ref = resolve_target(options.target, options.trust_remote_code)
    config = read_config(ref)
    text = config.get_text_config()
    device = resolve_device(options.device, ranks)
    dtype = resolve_dtype(options.dtype, config)
    check_parallel(text, options.tp, device)
    check_usable(ref.name, config, ref.trust_remote_code, options.attn, dtype, device)
    if options.prefill_chunk is not None:
        check_prefill(config, options.prefill_chunk)
    if options.layers is None:
        layers = default_layers(text.num_hidden_layers)
        say.note(f"no --layers given: taking {','.join(map(str, layers))} of {text.num_hidden_layers}")
    else:
        layers = check_layers(options.layers, text.num_hidden_layers)
    if options.top_k > text.vocab_size:
        raise OptionError(f"--top-k {options.top_k} is more than the target's {text.vocab_size} tokens: ask for fewer")
    if options.mask_token_id is not None and not 0 <= options.mask_token_id < text.vocab_size:
        raise OptionError(
            f"--mask-token-id {options.mask_token_id} is out of range: the target's embedding has rows 0 to "
            f"{text.vocab_size - 1}"
        )
    check_codec(options.codec, text.hidden_size)
    traits, chat = head_traits(text), open_chat(ref)
    if chat.dated:
        say.note(
            f"the chat template writes today's date: it is given {TEMPLATE_DATE}, so that the cache can be made again"
        )
    identity = _identity(options, ref, config, chat, traits, layers)
    return Settings(ref, config, chat, traits, options, identity, device)


def scan_data(options: CaptureOptions, say: Say) -> list[Scan]:
    """Hash the data files and count their rows; those shipped where none are given. Raises DataError."""
    if options.data:
        return scan_files(options.data, options.limit)
    say.note(
        "no --data given: taking the conversations shipped with the project (answers of SmolLM2-135M-Instruct to "
        "its own prompts)"
    )
    # The manifest must not depend on where the project is installed.
    scans = scan_files((str(DEFAULT_DATA),), options.limit)
    return [replace(scan, shown="/".join(Path(scan.path).parts[-3:])) for scan in scans]


def sample_rules(settings: Settings) -> SampleRules:
    """How the data's rows become samples."""
    options, identity = settings.options, settings.identity
    return SampleRules(
        tokenizer_sha256=identity.tokenizer_sha256,
        vocab_size=identity.target.vocab_size,
        max_length=options.max_length,
        val_fraction=options.val_fraction,
        skip_bad_rows=options.skip_bad_rows,
        format=options.format,
        reasoning=options.reasoning,
        target=settings.ref.name,
    )


def reading_record(settings: Settings) -> dict[str, str]:
    """What decides tokens and masks beside the identity and the data: the entries of the manifest's record that are compared."""
    dated = {"template_date": str(TEMPLATE_DATE)} if settings.chat.dated else {}
    return {"format": settings.options.format, "reasoning": settings.options.reasoning, **dated}


def check_reading(settings: Settings, found: Manifest) -> None:
    """Refuse to go on with a cache whose rows were read otherwise: CacheError names the option and both values."""
    older = {"format": "auto", "reasoning": "keep", "template_date": "the day of its capture"}
    for name, asked in reading_record(settings).items():
        if (held := found.record.get(name, older[name])) != asked:
            raise CacheError(
                f"{settings.options.out} was captured with {name} {held!r}, this command asks for {asked!r}: use the same "
                "settings, or another --out"
            )


def _identity(
    options: CaptureOptions, ref: TargetRef, config: Any, chat: Chat, traits: HeadTraits, layers: tuple[int, ...]
) -> Identity:
    text = config.get_text_config()
    target = TargetIdentity(
        name=ref.name,
        revision=ref.revision,
        architectures=tuple(config.architectures or ()),
        config_sha256=config_sha256(ref),
        num_hidden_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        tied=architecture(ref.name, config, ref.trust_remote_code).tied,
        embedding_scale=traits.embedding_scale,
        logit_scale=traits.logit_scale,
        logit_softcap=traits.logit_softcap,
    )
    open_identity = Identity(
        target=target,
        layers=layers,
        tokenizer_sha256=tokenizer_sha256(ref),
        chat_template_sha256=chat_template_sha256(chat),
        codec=options.codec,
        top_k=options.top_k,
        dtype=resolve_dtype(options.dtype, config),
        tp=options.tp,
        mask_token_id=0,
        max_length=options.max_length,
        val_fraction=options.val_fraction,
        seed=options.seed,
        shard_tokens=1,
        batch_tokens=options.batch_tokens,
        chunk_tokens=chunk_tokens(options.codec, text.hidden_size, options.top_k, 1),
    )
    shard_tokens = options.shard_tokens or default_shard_tokens(open_identity)
    if options.max_length > shard_tokens:
        raise OptionError(
            f"--max-length {options.max_length} is more than the {shard_tokens} tokens of a shard, which no sample may "
            f"cross: give --shard-tokens {1 << (options.max_length - 1).bit_length()} or a shorter --max-length"
        )
    chunks = chunk_tokens(options.codec, text.hidden_size, options.top_k, shard_tokens)
    return open_identity.model_copy(update={"shard_tokens": shard_tokens, "chunk_tokens": chunks})
