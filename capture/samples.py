"""From conversations to samples: ids, loss mask, side of the split, and what is cut or left out, by reason."""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capture.conversations import Conversation, Given, parse_conversation
from capture.heap import heap_set_aside
from capture.lines import BadRow, Line
from capture.pieces import Piece, join_steps, join_turns, plain_piece
from schemas.errors import DataError
from schemas.options import DataFormat, Reasoning
from target.chat import Chat, Turn, encodes_side_by_side
from target.reasoning import without_reasoning
from target.rendered import text_turns
from target.steps import Step, encode_talks, whole_turns
from target.turns import check_answer, split_turns

# Rows that are tokenised in one call: so many at most, and no further row once they have so many bytes.
FIRST_ROWS = 32
GROUP_ROWS = 512
GROUP_BYTES = 1 << 19
Encoded = list[list[Step]]
NOTHING_SUPERVISED = "nothing supervised within max length"
TOO_SHORT = "fewer than two supervised tokens"
EMPTY = "empty content"
NOT_RENDERED = "not rendered by the chat template"


@dataclass(frozen=True)
class SampleRules:
    """What decides a sample's tokens, the data aside. `target` is the name by which rows say that it wrote them."""

    tokenizer_sha256: str
    vocab_size: int
    max_length: int
    val_fraction: float
    skip_bad_rows: bool = False
    format: DataFormat = "auto"
    reasoning: Reasoning = "keep"
    target: str | None = None


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
    """What became of one row: its samples, or the reason why there are none, and `why`, which says where.

    `retokenised`: it brought another tokenizer's ids. `unnamed`: ids that name no tokenizer. `plain`: text that is no
    conversation, supervised whole. `foreign`: nothing says that the target wrote it.
    """

    samples: tuple[Sample, ...]
    skipped: str | None = None
    why: str = ""
    retokenised: bool = False
    unnamed: bool = False
    plain: bool = False
    foreign: bool = False


def samples_of(chat: Chat, lines: Iterable[Line], rules: SampleRules) -> Iterator[RowResult]:
    """The samples of each row, in order.

    Raises BadRow (`file:line: ...`) for the first row that is malformed or that the chat template cannot render, unless
    bad rows are skipped.
    """
    # Groups are tokenised outside of Python's lock, on every core, while the next ones are read and rendered. Two at a time where
    # the tokenizer allows it: while one waits for the lock, to hand over its ids, the other one keeps the cores busy.
    encoders = 2 if encodes_side_by_side(chat.tokenizer) else 1
    waiting: deque[tuple[list[_Prepared | RowResult], Future[Encoded]]] = deque()
    with heap_set_aside(), ThreadPoolExecutor(encoders) as pool:
        for prepared in _groups(chat, lines, rules):
            fault = prepared.pop() if isinstance(prepared[-1], BadRow) else None
            talks = [item.turns for item in prepared if isinstance(item, _Prepared)]
            waiting.append((prepared, pool.submit(encode_talks, chat, talks)))
            while waiting and (len(waiting) > encoders or fault is not None):
                yield from _finish_group(chat, *waiting.popleft(), rules)
            if fault is not None:
                raise fault
        while waiting:
            yield from _finish_group(chat, *waiting.popleft(), rules)


def _groups(chat: Chat, lines: Iterable[Line], rules: SampleRules) -> Iterator[list[Any]]:
    # Rows that are tokenised in one call. The last group ends with the BadRow that stops the reading, if one does.
    # The first ones are small: until one is there, no tokenizer has anything to do.
    group: list[_Prepared | RowResult | BadRow] = []
    size, most = 0, FIRST_ROWS
    for line in lines:
        try:
            group.append(_prepare(chat, line, rules))
        except BadRow as fault:
            yield [*group, fault]
            return
        size += len(line.data)
        if len(group) >= min(most, GROUP_ROWS) or size >= GROUP_BYTES:
            yield group
            group, size, most = [], 0, 2 * most
    if group:
        yield group


def _finish_group(
    chat: Chat, prepared: Sequence["_Prepared | RowResult"], encoded: Future[Encoded], rules: SampleRules
) -> Iterator[RowResult]:
    talks = iter(encoded.result())
    for item in prepared:
        if isinstance(item, RowResult):
            yield item
            continue
        try:
            yield _finish(chat, item, next(talks), rules)
        except BadRow as fault:
            yield _left_out(fault, rules)


@dataclass(frozen=True)
class _Prepared:
    conversation: Conversation
    turns: list[Turn]
    given: Given | None
    plain: bool = False


def _left_out(fault: BadRow, rules: SampleRules) -> RowResult:
    # A bad row stops unless asked to be skipped; a sound one with nothing to learn from is always left out.
    if fault.stops and not rules.skip_bad_rows:
        raise fault
    return RowResult((), fault.reason, str(fault))


def _prepare(chat: Chat, line: Line, rules: SampleRules) -> _Prepared | RowResult:
    # The rendered turns of a row, or why it is left out.
    try:
        conversation = parse_conversation(line, rules.format)
        given = conversation.given
        if given is not None and given.tokenizer_sha256 in (None, rules.tokenizer_sha256):
            return _Prepared(conversation, [], given)
        if given is not None and not conversation.messages:
            raise BadRow(
                f"{line.where}: input_ids are of another tokenizer (sha256 {str(given.tokenizer_sha256)[:16]}); give "
                "rows with messages, or tokenise anew"
            )
        if conversation.text is not None:
            turns = text_turns(chat, conversation.text)
            return _Prepared(conversation, turns or [Turn("", conversation.text, False)], None, not turns)
        _check_contents(conversation)
        try:
            turns = split_turns(chat, conversation.messages, conversation.finished, conversation.tools)
        except DataError as fault:
            raise BadRow(f"{line.where}: {fault}", NOT_RENDERED) from None
        return _Prepared(conversation, turns, None)
    except BadRow as fault:
        return _left_out(fault, rules)


def _check_contents(conversation: Conversation) -> None:
    for number, message in enumerate(conversation.messages, 1):
        said = (message["content"] or "").strip() or "tool_calls" in message or "reasoning_content" in message
        if message["role"] in ("user", "assistant") and not said:
            raise BadRow(
                f"{conversation.line.where}: message {number} ({message['role']}) is empty", EMPTY, stops=False
            )


def _finish(chat: Chat, item: _Prepared, steps: Sequence[Step], rules: SampleRules) -> RowResult:
    conversation = item.conversation
    where = conversation.line.where
    pieces: Sequence[Piece]
    if item.given is not None:
        _check_ids(item.given.input_ids, where, rules.vocab_size)
        pieces = [(0, item.given.input_ids, item.given.loss_mask)]
    elif item.plain:
        pieces = [plain_piece(list(chat.lead), steps[0].answer.tolist())]
    else:
        for turn, step in zip(item.turns, steps, strict=True):
            try:
                check_answer(chat, step.answer, turn.ended)
            except DataError as fault:
                raise BadRow(f"{where}: {fault}", "end of turn") from None
        pieces = join_steps(steps) if conversation.text is None else _text_pieces(list(chat.lead), steps)
    samples, reason = [], NOTHING_SUPERVISED
    for turn_number, ids, mask in pieces:
        _check_bos(chat, ids, where)
        supervised = without_reasoning(chat, ids, mask) if rules.reasoning == "mask" else mask
        sample = _sample(item, turn_number, ids, mask, supervised, rules)
        if isinstance(sample, str):
            reason = sample
        else:
            samples.append(sample)
    given = conversation.given
    return RowResult(
        tuple(samples),
        None if samples else reason,
        where,
        retokenised=given is not None and item.given is None,
        unnamed=item.given is not None and item.given.tokenizer_sha256 is None,
        plain=item.plain,
        foreign=rules.target is not None and conversation.target != rules.target,
    )


def _text_pieces(lead: list[int], steps: Sequence[Step]) -> Sequence[Piece]:
    pairs = whole_turns(steps)
    return join_turns([(given if given[: len(lead)] == lead else lead + given, own) for given, own in pairs])


def _check_bos(chat: Chat, ids: Sequence[int], where: str) -> None:
    # The tokenizer is asked only where it may matter: it looks its BOS token up each time.
    if len(ids) > 1 and ids[0] == ids[1] == chat.tokenizer.bos_token_id:
        raise BadRow(
            f"{where}: begins with two {chat.tokenizer.bos_token} tokens, which the target never sees; remove the one in "
            "the text",
            "two BOS tokens",
        )


def _sample(
    item: _Prepared, turn: int, ids: Sequence[int], own: Sequence[int], mask: Sequence[int], rules: SampleRules
) -> Sample | str:
    # `own` marks all that the target wrote, `mask` what of it is supervised.
    kept = bytes(mask[: rules.max_length])
    supervised = kept.count(1)
    if supervised < 2:
        return TOO_SHORT if sum(mask) < 2 or supervised else NOTHING_SUPERVISED
    input_ids = np.array(ids[: rules.max_length], dtype=np.int32)
    loss_mask = np.frombuffer(kept, np.uint8)
    conversation, line = item.conversation, item.conversation.line
    # A plain text has no prompt: it is its own key.
    first_user = conversation.text if item.plain else conversation.first_user
    return Sample(
        sample_id=f"{line.sha256[:16]}-{turn}",
        row_id=conversation.row_id,
        input_ids=input_ids,
        loss_mask=loss_mask,
        truncated=len(ids) > rules.max_length,
        split=split_side(first_user, ids[: own.index(1)] if first_user is None else (), rules.val_fraction),
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
    return hashlib.sha256(input_ids.astype("<i4", copy=False).tobytes() + loss_mask.tobytes()).hexdigest()


def _check_ids(ids: Sequence[int], where: str, vocab_size: int) -> None:
    outside = next((i for i in ids if not 0 <= i < vocab_size), None)
    if outside is not None:
        raise BadRow(
            f"{where}: token id {outside} is no row of the target's embedding (0 to {vocab_size - 1}); regenerate with "
            "this target"
        )
