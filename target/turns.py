"""Which text of a conversation is the target's own: each assistant turn as its context and its answer."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from schemas.errors import DataError
from target.chat import EMPTY_THINK, MARK, Chat, Message, Turn, render, render_blocks


def split_turns(chat: Chat, messages: Sequence[Message], finished: bool = True, tools: Any = None) -> list[Turn]:
    """Every assistant turn of a conversation, in order; the last one has no end token where `finished` is false.

    Raises DataError for a conversation that the template does not render as generation prompt, answer, end token.
    """
    places = [j for j, message in enumerate(messages) if message["role"] == "assistant"]
    return [
        _split_turn(chat, messages[: j + 1], finished or j != places[-1], tools, *texts)
        for j, texts in zip(places, _texts(chat, messages, places, tools), strict=True)
    ]


def _texts(
    chat: Chat, messages: Sequence[Message], places: Sequence[int], tools: Any
) -> Iterator[tuple[str, str | None]]:
    # For the answers at these places: what the target is given, and that with the answer, where it is known already.
    blocks = None
    if chat.frame is not None and tools is None and places:
        try:
            before, blocks, _, reach = render_blocks(chat, messages[: places[-1] + 1])
        except Exception:  # refused: reported below, for the turn whose history the template refuses
            blocks = None
    if chat.frame is None or blocks is None:
        yield from ((render(chat, messages[:j], True, tools), None) for j in places)
        return
    text, done = before, 0
    for j in places:
        text, done = text + "".join(blocks[done:j]), j
        if j < reach:
            yield render(chat, messages[:j], True), None
        else:
            yield text + chat.frame.asking, text + blocks[j] + chat.frame.ending


def _split_turn(
    chat: Chat, messages: Sequence[Message], ended: bool, tools: Any, prompt: str, whole: str | None
) -> Turn:
    message = messages[-1]
    content, reasoning = message.get("content") or "", message.get("reasoning_content")
    try:
        return _rendered(chat, prompt, messages, ended, tools, whole)
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


def _rendered(
    chat: Chat, prompt: str, messages: Sequence[Message], ended: bool, tools: Any, whole: str | None = None
) -> Turn:
    # The turn as the template writes it behind its own generation prompt; `whole` is the text of all messages, if known.
    whole = render(chat, messages, False, tools) if whole is None else whole
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
    certain = None if reasoning or not core or core[0] != content[0] else _certain_start(chat, tail, core)
    before = "" if certain is None else tail[:certain]
    if certain is None:
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


def _certain_start(chat: Chat, tail: str, core: str) -> int | None:
    # Where an answer stands in the tail, if that shows without another content in its place (a render more): at its beginning or
    # behind an empty think block, and nothing but blanks before the end token. An answer such as "<" may look like the beginning
    # of what the template inserts: then no end token follows it. One that holds think marks itself may be that block.
    block = EMPTY_THINK.match(tail) if "think>" not in core else None
    starts = (0, block.end()) if block else (0,)
    found = (start for start in starts if tail.startswith(core, start))
    return next((start for start in found if tail[start + len(core) :].lstrip().startswith(chat.eos_texts)), None)


def check_answer(chat: Chat, answer_ids: Sequence[int], ended: bool) -> None:
    """DataError where an answer's ids do not end as its turn says, or go on after an end token."""
    if ended and (not answer_ids or answer_ids[-1] not in chat.eos):
        raise DataError(
            "the answer's end-of-turn text is not an end token of the tokenizer; correct eos_token_id in "
            "generation_config.json"
        )
    if not chat.eos.isdisjoint(answer_ids[:-1] if ended else answer_ids):
        raise DataError("an answer holds an end-of-turn token before its end; remove the token's text from the message")
