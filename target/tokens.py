"""Which tokenizer and template a cache was made with, and which token id stands for MASK."""

import hashlib
from collections.abc import Collection
from typing import Any

from schemas.errors import OptionError, TargetError
from schemas.manifest import MaskTokenSource
from target.chat import Chat
from target.load import TargetRef

VOCABULARY_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt", "added_tokens.json")


def tokenizer_sha256(ref: TargetRef) -> str:
    """The hash of tokenizer.json's bytes; where there is none, of the names and bytes of the other vocabulary files.

    Raises TargetError where the folder holds neither.
    """
    if (path := ref.folder / "tokenizer.json").is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    digest = hashlib.sha256()
    found = [ref.folder / name for name in VOCABULARY_FILES if (ref.folder / name).is_file()]
    found += sorted(ref.folder.glob("*.tiktoken"))
    if not found:
        raise TargetError(
            f"target {ref.name!r}: {ref.folder} holds no tokenizer.json and no vocabulary file; add the tokenizer's "
            "files"
        )
    for path in found:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def chat_template_sha256(chat: Chat) -> str:
    """The hash of the template's text."""
    return hashlib.sha256(chat.tokenizer.chat_template.encode("utf-8")).hexdigest()


def mask_token(chat: Chat, vocab_size: int, asked: int | None, seen: Collection[int]) -> tuple[int, MaskTokenSource]:
    """The id that stands for an unknown token in a draft's input, and its source (docs/design.md, conventions).

    In order: the one asked for; the tokenizer's mask token; the lowest of the `vocab_size` embedding rows that no token
    uses; the highest-numbered special token that is not bos, eos, pad, unk, in the chat template or in the captured
    data. `seen` are the ids of the captured data. Raises OptionError where there is none, it is no embedding row, or it
    occurs in the data.
    """
    if asked is not None:
        return _usable(chat, asked, "--mask-token-id", vocab_size, seen), "user"
    own = getattr(chat.tokenizer, "mask_token_id", None)
    if own is not None:
        return _usable(chat, own, "the tokenizer's mask token", vocab_size, seen), "tokenizer"
    used = set(chat.tokenizer.get_vocab().values())
    unused = next((row for row in range(vocab_size) if row not in used), None)
    if unused is not None:
        return _usable(chat, unused, "the lowest unused row", vocab_size, seen), "unused row"
    spare = [i for i in _spare_specials(chat) if i < vocab_size and i not in seen]
    if not spare:
        raise OptionError(
            "the target has no mask token, no unused embedding row and no unused special token: choose an id with "
            "--mask-token-id"
        )
    return max(spare), "unused special"


def _spare_specials(chat: Chat) -> list[int]:
    tokenizer: Any = chat.tokenizer
    special = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= {tokenizer.convert_tokens_to_ids(token): token for token in tokenizer.all_special_tokens}
    named = {getattr(tokenizer, f"{kind}_token_id", None) for kind in ("bos", "eos", "pad", "unk")} | chat.eos
    return [i for i, token in special.items() if i not in named and token not in tokenizer.chat_template]


def _usable(chat: Chat, token_id: int, what: str, vocab_size: int, seen: Collection[int]) -> int:
    if not 0 <= token_id < vocab_size:
        raise OptionError(
            f"mask token {token_id} ({what}) is out of range: the target's embedding has rows 0 to {vocab_size - 1}; "
            "choose one with --mask-token-id"
        )
    if token_id in seen:
        token = chat.tokenizer.convert_ids_to_tokens(token_id)
        raise OptionError(
            f"mask token {token_id} ({token!r}, {what}) occurs in the captured tokens, where it must not: choose "
            "another id with --mask-token-id"
        )
    return token_id
