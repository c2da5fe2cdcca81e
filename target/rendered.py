"""Texts that a chat template rendered already: where in them the target's own words stand, by what the template writes around."""

from schemas.errors import DataError
from target.chat import EMPTY_THINK, MARK, Chat, Turn, render

QUESTION = MARK.replace("answer", "question")


def text_header(chat: Chat) -> str | None:
    """The text that the template writes between a user's words and the answer, from a conversation made for it.

    The generation prompt alone where there is one; else all that follows the user's content. None where that is blank.
    """
    user = [{"role": "user", "content": QUESTION}]
    try:
        asked, bare = render(chat, user, True), render(chat, user, False)
    except DataError:
        return None
    header = asked[len(bare) :] if asked.startswith(bare) else ""
    header = header or asked.rpartition(QUESTION)[2]
    # A prompt that opens the thinking does so for this answer; earlier ones of the text may have none.
    header = header.partition("<think>")[0]
    return header if header.strip() else None


def text_turns(chat: Chat, text: str) -> list[Turn]:
    """The answers in a rendered text, each with all the text before it as its context; none in a plain text."""
    header = text_header(chat)
    turns: list[Turn] = []
    place = -1 if header is None else text.find(header)
    while header is not None and place >= 0:
        start = place + len(header)
        empty = EMPTY_THINK.match(text, start)
        start = empty.end() if empty else start
        ends = [(found, end) for end in chat.eos_texts if (found := text.find(end, start)) >= 0]
        stop = min(ends)[0] + len(min(ends)[1]) if ends else len(text)
        turns.append(Turn(text[:start], text[start:stop], bool(ends)))
        place = text.find(header, stop)
    return turns
