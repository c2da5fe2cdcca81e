"""From conversations to samples: ids, loss mask, side of the split, and what is cut or left out, by reason."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from capture.conversations import Conversation, Given, parse_conversation
from capture.lines import BadRow, Line
from schemas.errors import DataError
from target.chat import Chat, Turn, check_answer, encode_turns, split_turns

# Rows that are tokenised in one call.
GROUP_ROWS = 256
NOTHING_SUPERVISED = "nothing supervised within max length"
TOO_SHORT = "fewer than two supervised tokens"


@dataclass(frozen=True)
class SampleRules:
    """What decides a sample's tokens, the data aside."""

    tokenizer_sha256: str
    vocab_size: int
    max_length: int
    val_fraction: float
    skip_bad_rows: bool = False


@dataclass(frozen=True)
class Sample:
    """One sequence to run through the target; `loss_mask` is 1 where the token is the target's own output."""

    sample_id: str
    row_id: str | None
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    truncated: bool
    split: str
    source_row: int
    tokens_sha256: str


@dataclass(frozen=True)
class RowResult:
    """What became of one row: its samples, or why there are none. `retokenised`: it brought another tokenizer's ids."""

    samples: tuple[Sample, ...]
    skipped: str | None = None
    retokenised: bool = False


def samples_of(chat: Chat, lines: Iterable[Line], rules: SampleRules) -> Iterator[RowResult]:
    """The samples of each row, in order.

    Raises BadRow (`file:line: ...`) for the first row that is malformed or that the chat template cannot render, unless
    bad rows are skipped.
    """
    remaining = iter(lines)
    while group := list(islice(remaining, GROUP_ROWS)):
        prepared = [_prepare(chat, line, rules) for line in group]
        turns = [turn for item in prepared if isinstance(item, _Prepared) for turn in item.turns]
        encoded = iter(encode_turns(chat, turns))
        for item in prepared:
            if isinstance(item, str):
                yield RowResult((), item)
                continue
            pairs = list(islice(encoded, len(item.turns)))
            try:
                yield _finish(chat, item, pairs, rules)
            except BadRow as fault:
                if not rules.skip_bad_rows:
                    raise
                yield RowResult((), fault.reason)


@dataclass(frozen=True)
class _Prepared:
    conversation: Conversation
    turns: list[Turn]
    given: Given | None


def _prepare(chat: Chat, line: Line, rules: SampleRules) -> _Prepared | str:
    # The rendered turns of a row, or the reason it is skipped.
    try:
        conversation = parse_conversation(line)
        given = conversation.given
        if given is not None and given.tokenizer_sha256 == rules.tokenizer_sha256:
            return _Prepared(conversation, [], given)
        try:
            turns = split_turns(chat, conversation.messages, conversation.finished, conversation.tools)
        except DataError as fault:
            raise BadRow(f"{line.where}: {fault}", "not rendered by the chat template") from None
        return _Prepared(conversation, turns, None)
    except BadRow as fault:
        if not rules.skip_bad_rows:
            raise
        return fault.reason


def _finish(chat: Chat, item: _Prepared, pairs: Sequence[tuple[list[int], list[int]]], rules: SampleRules) -> RowResult:
    conversation = item.conversation
    if item.given is not None:
        _check_ids(item.given.input_ids, conversation.line.where, rules.vocab_size)
        pieces = [(0, item.given.input_ids, item.given.loss_mask)]
    else:
        for turn, (_, answer) in zip(item.turns, pairs, strict=True):
            try:
                check_answer(chat, answer, turn.ended)
            except DataError as fault:
                raise BadRow(f"{conversation.line.where}: {fault}", "end of turn") from None
        pieces = join_turns(pairs)
    samples, reason = [], NOTHING_SUPERVISED
    for turn_number, ids, mask in pieces:
        sample = _sample(conversation, turn_number, ids, mask, rules)
        if isinstance(sample, str):
            reason = sample
        else:
            samples.append(sample)
    retokenised = conversation.given is not None and item.given is None
    return RowResult(tuple(samples), None if samples else reason, retokenised)


def join_turns(pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[int, list[int], list[int]]]:
    """Samples (number of the first answer in it, ids, mask) of a conversation's (context ids, answer ids).

    A turn extends the sample before it where its context begins with that sample's ids. Templates that rewrite earlier
    turns (dropping their reasoning) break this; then a new sample begins, so that before every answer stands exactly
    what the target would be given.
    """
    done: list[tuple[int, list[int], list[int]]] = []
    for number, (context, answer) in enumerate(pairs):
        if done and context[: len(done[-1][1])] == done[-1][1]:
            first, ids, mask = done.pop()
            mask = mask + [0] * (len(context) - len(ids)) + [1] * len(answer)
            done.append((first, context + answer, mask))
        else:
            done.append((number, context + answer, [0] * len(context) + [1] * len(answer)))
    return done


def _sample(conversation: Conversation, turn: int, ids: list[int], mask: list[int], rules: SampleRules) -> Sample | str:
    supervised = sum(mask[: rules.max_length])
    if supervised < 2:
        return TOO_SHORT if sum(mask) < 2 else NOTHING_SUPERVISED if supervised == 0 else TOO_SHORT
    input_ids = np.asarray(ids[: rules.max_length], dtype=np.int32)
    loss_mask = np.asarray(mask[: rules.max_length], dtype=np.uint8)
    line = conversation.line
    return Sample(
        sample_id=f"{line.sha256[:16]}-{turn}",
        row_id=conversation.row_id,
        input_ids=input_ids,
        loss_mask=loss_mask,
        truncated=len(ids) > rules.max_length,
        split=split_side(conversation.first_user, ids[: mask.index(1)], rules.val_fraction),
        source_row=line.row,
        tokens_sha256=tokens_sha256(input_ids, loss_mask),
    )


def split_side(first_user: str | None, prefix_ids: Sequence[int], val_fraction: float) -> str:
    """ "val" iff the first 8 bytes of sha256(first user message), as a fraction of 2^64, are below `val_fraction`.

    Without a user message the little-endian int32 ids before the first supervised position stand for it. So the turns
    and re-answers of one prompt never straddle the split, and it never moves.
    """
    key = np.asarray(prefix_ids, dtype="<i4").tobytes() if first_user is None else first_user.encode("utf-8")
    fraction = int.from_bytes(hashlib.sha256(key).digest()[:8], "big") / 2**64
    return "val" if fraction < val_fraction else "train"


def tokens_sha256(input_ids: NDArray[np.int32], loss_mask: NDArray[np.uint8]) -> str:
    """The hash of the little-endian int32 ids, then the mask's bytes."""
    return hashlib.sha256(input_ids.astype("<i4").tobytes() + loss_mask.tobytes()).hexdigest()


def _check_ids(ids: Sequence[int], where: str, vocab_size: int) -> None:
    outside = next((i for i in ids if not 0 <= i < vocab_size), None)
    if outside is not None:
        raise BadRow(
            f"{where}: token id {outside} is no row of the target's embedding (0 to {vocab_size - 1}); regenerate with "
            "this target",
            "malformed ids",
        )
