"""The ids of a conversation's turns, each as what it adds to the turn before, so that one costs what its text costs."""

import re
from array import array
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple, TypeAlias

from target.chat import Chat, Turn, encode_arrays

# A text's ids depend on what stands before it only through its first word and the blanks around that: merges stop there,
# or, in a script without spaces, long before so many characters.
SEAM_CHARS = 32
# What follows a text's last end token is looked up rather than tokenised if it has no more characters than this.
REST_CHARS = 128
FIRST_WORD = re.compile(r"\s*\S*\s?")
Ids: TypeAlias = "array[int]"


class Step(NamedTuple):
    """A turn's ids. `extends`: the target is given all ids of the turn before, its answer's too, and `context`; else that alone."""

    extends: bool
    context: Ids
    answer: Ids


class New(NamedTuple):
    """What is tokenised of a turn's context: what follows the turn before, which it `continues`, or what follows `kept`.

    With `kept` begins `first` too, the context of the last turn that continues none.
    """

    text: str
    continues: bool
    first: str = ""
    kept: str = ""


def encode_turns(chat: Chat, turns: Sequence[Turn]) -> list[tuple[list[int], list[int]]]:
    """(context ids, answer ids) of each turn, both whole."""
    (steps,) = encode_talks(chat, [turns])
    return whole_turns(steps)


def whole_turns(steps: Iterable[Step]) -> list[tuple[list[int], list[int]]]:
    """(context ids, answer ids) of each step, both whole."""
    pairs: list[tuple[list[int], list[int]]] = []
    for step in steps:
        before = [*pairs[-1][0], *pairs[-1][1]] if step.extends else []
        pairs.append(([*before, *step.context], step.answer.tolist()))
    return pairs


def encode_talks(chat: Chat, talks: Sequence[Sequence[Turn]]) -> list[list[Step]]:
    """The ids of each turn of some conversations: the context's as the target is given it, the answer's as it generated it.

    A turn that continues the text of the one before it is tokenised from that one's end token on: conversations cost
    what their text costs, not its square. One that rewrites earlier turns is tokenised from the last mark on before it
    differs; nothing merges across that. Tokenizers that change a text's beginning (a prepended space) tokenise each
    turn whole, and take the answer's ids from there where the context's come out the same.
    """
    turns = [turn for talk in talks for turn in talk]
    news = [new for talk in talks for new in _news(chat, talk)]
    steps = iter(_steps(chat, turns, news) if chat.splits_anywhere else _encode_whole(chat, turns))
    return [list(islice(steps, len(talk))) for talk in talks]


def _steps(chat: Chat, turns: Sequence[Turn], news: Sequence[New]) -> list[Step]:
    seams = {
        place: (new.text[-SEAM_CHARS:], _first_word(turns[place].answer))
        for place, new in enumerate(news[:-1])
        if news[place + 1].continues
    }
    around = dict.fromkeys(text for one, other in set(seams.values()) for text in (one, other, one + other))
    pairs, known = _encode_apart(chat, turns, news, list(around))
    # Where context and answer merge, later turns are given what both come to as one text.
    merging = [place for place, (one, other) in seams.items() if known[one] + known[other] != known[one + other]]
    texts = [news[place].text + turns[place].answer for place in merging]
    merged = dict(zip(merging, encode_arrays(chat.tokenizer, texts), strict=True))
    steps: list[Step] = []
    before: list[Ids] = []
    first: Ids = array("i")  # the context's of the last turn that continues none
    for place, (new, (context, answer)) in enumerate(zip(news, pairs, strict=True)):
        if not new.continues:
            before, first = [], _behind(chat, new, first, context, turns[place])
            context = first
        extends = new.continues and place - 1 not in merged
        steps.append(Step(extends, context if extends else _joined([*before, context]), answer))
        before.extend([merged[place]] if place in merged else [context, answer])
    return steps


def _joined(parts: Iterable[Ids]) -> Ids:
    ids = array("i")
    for part in parts:
        ids.extend(part)
    return ids


def _news(chat: Chat, turns: Sequence[Turn]) -> list[New]:
    news: list[New] = []
    whole = first = ""
    for turn in turns:
        if whole and turn.context.startswith(whole):
            news.append(New(turn.context[len(whole) :], True))
        else:
            kept = _through_mark(chat, first, turn.context)
            news.append(New(turn.context[len(kept) :], False, first, kept))
            first = turn.context
        whole = turn.context + turn.answer if turn.ended else ""
    return news


def _through_mark(chat: Chat, one: str, other: str) -> str:
    # What both begin with, through its last mark. All that follows is tokenised by itself, whatever it is.
    same, most = 0, min(len(one), len(other))
    while same < most:
        middle = (same + most + 1) // 2
        same, most = (middle, most) if one.startswith(other[same:middle], same) else (same, middle - 1)
    return one[
        : max((one.rfind(mark, 0, same) + len(mark) for mark in chat.marks if one.find(mark, 0, same) >= 0), default=0)
    ]


def _behind(chat: Chat, new: New, first: Ids, context: Ids, turn: Turn) -> Ids:
    # The ids of a context of which `kept` was tokenised already, as the beginning of `first`, and the rest as `context`.
    if not new.kept:
        return context
    mark = next(mark for mark in chat.marks if new.kept.endswith(mark))
    if first.count(chat.marks[mark]) != new.first.count(mark):  # one that no text spells: which is which is not known
        return encode_arrays(chat.tokenizer, [turn.context])[0]
    stop = 0
    for _ in range(new.kept.count(mark)):
        stop = first.index(chat.marks[mark], stop) + 1
    return first[:stop] + context


def _encode_apart(
    chat: Chat, turns: Sequence[Turn], news: Sequence[New], others: Sequence[str]
) -> tuple[list[tuple[Ids, Ids]], dict[str, Ids]]:
    # The ids of each new text and answer, each as it is by itself, and those of the other texts.
    #
    # What follows a text's last end token is the same in every turn (the next header): it is tokenised once. An answer
    # that ends with its only end token is tokenised together with what follows it, and both are cut there. A text more
    # costs as much as ten tokens.
    parts = [_after_last_end(chat, new.text) for new in news]
    follows = [
        bool(new.continues and head) and _ends_once(chat, turns[place - 1].answer)
        for place, (new, (head, _)) in enumerate(zip(news, parts, strict=True))
    ]
    apart = [place for place in range(len(turns)) if not (place + 1 < len(turns) and follows[place + 1])]
    spans = [(turns[p - 1].answer if follows[p] else "") + head for p, (head, _) in enumerate(parts)]
    more = list(dict.fromkeys([*others, *(tail for _, tail in parts)]))
    ids = iter(encode_arrays(chat.tokenizer, [*spans, *(turns[place].answer for place in apart), *more]))
    heads = [next(ids) for _ in spans]
    answers = {place: next(ids) for place in apart}
    known = dict(zip(more, ids, strict=True))
    again = [place for place, span in enumerate(spans) if follows[place] and not _spelled(chat, span, heads[place])]
    for place in set(range(len(turns))).difference(again):
        if follows[place]:
            cut = 1 + min(heads[place].index(end) for end in chat.eos if end in heads[place])
            answers[place - 1], heads[place] = heads[place][:cut], heads[place][cut:]
    both = iter(encode_arrays(chat.tokenizer, [t for p in again for t in (turns[p - 1].answer, parts[p][0])]))
    for place in again:
        answers[place - 1], heads[place] = next(both), next(both)
    return [(heads[p] + known[tail], answers[p]) for p, (_, tail) in enumerate(parts)], known


def _after_last_end(chat: Chat, text: str) -> tuple[str, str]:
    # A text in two: through its last end token, and a short rest.
    if not chat.ends_exactly:
        return "", text
    stop = max(text.rfind(end) + len(end) if end in text else 0 for end in chat.eos_texts)
    return (text[:stop], text[stop:]) if len(text) - stop <= REST_CHARS else ("", text)


def _ends_once(chat: Chat, answer: str) -> bool:
    first = min((found + len(end) for end in chat.eos_texts if (found := answer.find(end)) >= 0), default=0)
    return bool(answer) and first == len(answer)


def _spelled(chat: Chat, text: str, ids: Ids) -> bool:
    # Whether the end tokens are those that the text spells out.
    return sum(map(text.count, chat.eos_texts)) == sum(map(ids.count, chat.eos))


def _first_word(text: str) -> str:
    found = FIRST_WORD.match(text, 0, SEAM_CHARS)
    assert found is not None
    return found[0]


def _encode_whole(chat: Chat, turns: Sequence[Turn]) -> list[Step]:
    texts = [text for turn in turns for text in (turn.context, turn.answer, turn.context + turn.answer)]
    ids = encode_arrays(chat.tokenizer, texts)
    return [
        Step(False, context, both[len(context) :] if both[: len(context)] == context else answer)
        for context, answer, both in zip(ids[::3], ids[1::3], ids[2::3], strict=True)
    ]
