"""Which text of a conversation is the target's own: each assistant turn as its context and its answer, and their ids."""

import re
from collections.abc import Sequence
from typing import Any

from schemas.errors import DataError
from target.chat import EMPTY_THINK, MARK, Chat, Message, Turn, encode_texts, render

# A text's ids depend on what stands before it only through its first word and the blanks around that: merges stop there,
# or, in a script without spaces, long before so many characters.
SEAM_CHARS = 32
FIRST_WORD = re.compile(r"\s*\S*\s?")


def split_turns(chat: Chat, messages: Sequence[Message], finished: bool = True, tools: Any = None) -> list[Turn]:
    """Every assistant turn of a conversation, in order; the last one has no end token where `finished` is false.

    Raises DataError for a conversation that the template does not render as generation prompt, answer, end token.
    """
    places = [j for j, message in enumerate(messages) if message["role"] == "assistant"]
    return [_split_turn(chat, messages[: j + 1], finished or j != places[-1], tools) for j in places]


def _split_turn(chat: Chat, messages: Sequence[Message], ended: bool, tools: Any) -> Turn:
    prompt, message = render(chat, messages[:-1], True, tools), messages[-1]
    content, reasoning = message.get("content") or "", message.get("reasoning_content")
    try:
        return _rendered(chat, prompt, messages, ended, tools)
    except DataError:
        if "</think>" not in content and not (reasoning and "</think>" in chat.template):
            raise
    # The template takes the thinking elsewhere, or leaves it out, though the target wrote it before its answer.
    before, _, rest = content.rpartition("</think>")
    thinking = (reasoning or before.partition("<think>")[2] or before).strip("\n")
    history = messages[:-1]
    if not reasoning:
        apart = {**message, "content": rest.lstrip("\n"), "reasoning_content": thinking}
        try:
            return _rendered(chat, prompt, [*history, apart], ended, tools)
        except DataError:
            pass
    own = f"<think>\n{thinking}\n</think>\n\n{content}" if reasoning else content
    if opened := re.search(r"<think>(\n?)$", prompt):
        own = own.lstrip().removeprefix("<think>").removeprefix(opened[1])
    plain = {**message, "content": MARK, "reasoning_content": None}
    end = _end_text(chat, [*history, plain], tools) if ended else ""
    return Turn(prompt, own.rstrip() + end if ended else own, ended)


def _end_text(chat: Chat, messages: Sequence[Message], tools: Any) -> str:
    # What stands after the last message's content (MARK), through the first end token: tool calls and that token.
    after = render(chat, messages, False, tools).rpartition(MARK)[2]
    ends = [(place, text) for text in chat.eos_texts if (place := after.find(text)) >= 0]
    if not ends:
        raise _no_end(chat, messages)
    return after[: min(ends)[0]] + min(ends)[1]


def _rendered(chat: Chat, prompt: str, messages: Sequence[Message], ended: bool, tools: Any) -> Turn:
    # The turn as the template writes it behind its own generation prompt.
    whole = render(chat, messages, False, tools)
    if not whole.startswith(prompt):
        raise DataError(
            f"message {len(messages)}: the chat template does not continue its generation prompt with the answer; "
            "answer the prompts with `dflash regenerate`, whose rows hold the ids"
        )
    tail = whole[len(prompt) :]
    start, content_end = _own_text(chat, prompt, messages, tail, tools)
    ends = [(place, text) for text in chat.eos_texts if (place := tail.find(text, content_end)) >= 0]
    if not ended:
        # A cut answer that calls tools: the calls stand between the content and the end token.
        stop = min(ends)[0] if ends and messages[-1].get("tool_calls") else content_end
        return Turn(prompt + tail[:start], tail[start:stop], False)
    if not ends:
        raise _no_end(chat, messages)
    place, text = min(ends)
    return Turn(prompt + tail[:start], tail[start : place + len(text)], True)


def _no_end(chat: Chat, messages: Sequence[Message]) -> DataError:
    return DataError(
        f"message {len(messages)}: the chat template ends the answer with none of the target's end tokens "
        f"({', '.join(chat.eos_texts)}); add its end-of-turn token to eos_token_id in generation_config.json"
    )


def _own_text(chat: Chat, prompt: str, messages: Sequence[Message], tail: str, tools: Any) -> tuple[int, int]:
    # Where the target's own text begins in the tail, and where the message's content ends in it. Templates trim
    # contents and put text before them; what they put there shows when another content stands in its place.
    message = messages[-1]
    content = message.get("content") or ""
    core, trailing = content.strip(), content[len(content.rstrip()) :]
    reasoning = (message.get("reasoning_content") or "").strip()
    before = ""
    # An answer such as "<" may look like the beginning of what the template inserts: then no end token follows it.
    plain = tail.startswith(core) and tail[len(core) :].lstrip().startswith(chat.eos_texts)
    if reasoning or not core or core[0] != content[0] or not plain:
        marked = render(chat, [*messages[:-1], {**message, "content": MARK}], False, tools)[len(prompt) :]
        before, mark, _ = marked.partition(MARK)
        if not mark and not core and message.get("tool_calls"):
            # Calls in place of a content: all of it is the target's own, but for an empty think block.
            block = EMPTY_THINK.match(tail)
            return (block.end(), block.end()) if block and not reasoning else (0, 0)
        if not mark or not tail.startswith(before) or not tail[len(before) :].lstrip().startswith(core):
            raise DataError(
                f"message {len(messages)}: the chat template changes the answer's text, so which tokens are the "
                "target's own is unknown; answer the prompts with `dflash regenerate`, whose rows hold the ids"
            )
        if reasoning not in before:
            raise DataError(
                f"message {len(messages)}: the chat template leaves the answer's reasoning out, so what the target "
                "wrote before its answer is unknown; answer the prompts with `dflash regenerate`"
            )
    content_end = tail.index(core, len(before)) + len(core)
    content_end += len(trailing) if tail.startswith(trailing, content_end) else 0
    empty = None if reasoning else EMPTY_THINK.match(before)
    if empty is None and before.strip() and prompt == render(chat, messages[:-1], False, tools):
        raise DataError(
            f"message {len(messages)}: the chat template writes {before.strip()[:60]!r} before the answer but has no "
            "generation prompt, so the target is not given it; add add_generation_prompt to the template"
        )
    return empty.end() if empty else 0, content_end


def encode_turns(chat: Chat, turns: Sequence[Turn]) -> list[tuple[list[int], list[int]]]:
    """(context ids, answer ids) of each turn: the context's as the target is given it, the answer's as it generated it.

    A turn that continues the text of the one before it is tokenised from that one's end token on: conversations cost
    what their text costs, not its square. Tokenizers that change a text's beginning (a prepended space) tokenise each
    turn whole, and take the answer's ids from there where the context's come out the same.
    """
    if not chat.splits_anywhere:
        return _encode_whole(chat, turns)
    continues = [False] * len(turns)
    news: list[str] = []
    for place, turn in enumerate(turns):
        before = turns[place - 1] if place else None
        whole = before.context + before.answer if before is not None and before.ended else ""
        continues[place] = bool(whole) and turn.context.startswith(whole)
        news.append(turn.context[len(whole) :] if continues[place] else turn.context)
    ids = encode_texts(
        chat.tokenizer, [text for new, turn in zip(news, turns, strict=True) for text in (new, turn.answer)]
    )
    joined = [place for place in range(len(turns) - 1) if continues[place + 1]]
    in_place = _encode_joined(chat, [(news[p], turns[p].answer, ids[2 * p], ids[2 * p + 1]) for p in joined])
    given = dict(zip(joined, in_place, strict=True))
    pairs: list[tuple[list[int], list[int]]] = []
    base: list[int] = []
    for place in range(len(turns)):
        base = base if continues[place] else []
        pairs.append((base + ids[2 * place], ids[2 * place + 1]))
        base = base + given.get(place, [])
    return pairs


def _encode_joined(chat: Chat, parts: Sequence[tuple[str, str, list[int], list[int]]]) -> list[list[int]]:
    # Ids of first + second for (first, second, its ids, its ids): the two after each other unless they merge at the seam,
    # which the few characters around it show.
    seams = [(first[-SEAM_CHARS:], _first_word(second)) for first, second, _, _ in parts]
    texts = sorted({text for one, other in seams for text in (one, other, one + other)})
    known = dict(zip(texts, encode_texts(chat.tokenizer, texts), strict=True))
    clean = [known[one] + known[other] == known[one + other] for one, other in seams]
    merging = [first + second for (first, second, _, _), apart in zip(parts, clean, strict=True) if not apart]
    merged = iter(encode_texts(chat.tokenizer, merging))
    return [ids + more if apart else next(merged) for (_, _, ids, more), apart in zip(parts, clean, strict=True)]


def _first_word(text: str) -> str:
    found = FIRST_WORD.match(text, 0, SEAM_CHARS)
    assert found is not None
    return found[0]


def _encode_whole(chat: Chat, turns: Sequence[Turn]) -> list[tuple[list[int], list[int]]]:
    texts = [text for turn in turns for text in (turn.context, turn.answer, turn.context + turn.answer)]
    ids = encode_texts(chat.tokenizer, texts)
    return [
        (context, both[len(context) :] if both[: len(context)] == context else answer)
        for context, answer, both in zip(ids[::3], ids[1::3], ids[2::3], strict=True)
    ]


def check_answer(chat: Chat, answer_ids: Sequence[int], ended: bool) -> None:
    """DataError where an answer's ids do not end as its turn says, or go on after an end token."""
    if ended and (not answer_ids or answer_ids[-1] not in chat.eos):
        raise DataError(
            "the answer's end-of-turn text is not an end token of the tokenizer; correct eos_token_id in "
            "generation_config.json"
        )
    if not chat.eos.isdisjoint(answer_ids[:-1] if ended else answer_ids):
        raise DataError("an answer holds an end-of-turn token before its end; remove the token's text from the message")
