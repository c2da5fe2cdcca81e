"""The target's chat template: what it is given before an answer, and which text of an answer is its own.

For assistant turn j the target is given template(messages[:j]) with the generation prompt; what it generates is the
answer and the end-of-turn token. Text that the template puts between the two (an empty think block) is context, never
the target's own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schemas.errors import DataError, TargetError
from target.load import TargetRef, eos_ids, load_tokenizer

Message = Mapping[str, Any]
# Private-use characters: no template trims, splits or interprets them.
MARK = "\ue000answer\ue001"


@dataclass(frozen=True)
class Chat:
    """A tokenizer with its template and the ids, with their texts, that end an answer.

    `splits_anywhere` is false where the tokenizer treats the beginning of a text differently (it prepends a space).
    """

    tokenizer: Any
    eos: frozenset[int]
    eos_texts: tuple[str, ...]
    splits_anywhere: bool


@dataclass(frozen=True)
class Turn:
    """One answer: all the text before it, and the target's own; `ended` where that closes with an end token."""

    context: str
    answer: str
    ended: bool


def open_chat(ref: TargetRef) -> Chat:
    """Load the tokenizer and the end tokens of a target. Raises TargetError."""
    tokenizer = load_tokenizer(ref)
    eos = eos_ids(ref, tokenizer)
    texts = tuple(text for text in (tokenizer.decode([i], skip_special_tokens=False) for i in eos) if text)
    if not texts:
        raise TargetError(f"target {ref.name!r}: its tokenizer has none of the end tokens {eos}; correct eos_token_id")
    end = texts[0]
    spaced, x, a, closed, ended, b = encode_texts(tokenizer, ["x a", "x", " a", f"{end}b", end, "b"])
    return Chat(tokenizer, frozenset(eos), texts, spaced == x + a and closed == ended + b)


def encode_texts(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Ids of each text, without any token that the text does not spell out."""
    if not texts:
        return []
    encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
    return [list(ids) for ids in encoded["input_ids"]]


def render(chat: Chat, messages: Sequence[Message], generation_prompt: bool, tools: Any = None) -> str:
    """The template's text for the messages. Raises DataError where the template refuses them."""
    try:
        text = chat.tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=tools,
            tokenize=False,
            add_generation_prompt=generation_prompt,
        )
    except Exception as fault:  # a template may raise anything: its own refusals, undefined names, wrong types
        lines = str(fault).strip().splitlines() or [""]
        raise DataError(
            f"the target's chat template refuses the conversation ({type(fault).__name__}: {lines[0][:200]})"
        ) from None
    return str(text)


def prompt_ids(chat: Chat, messages: Sequence[Message], tools: Any = None) -> list[int]:
    """What the target is given to answer these messages."""
    return encode_texts(chat.tokenizer, [render(chat, messages, True, tools)])[0]


def split_turns(chat: Chat, messages: Sequence[Message], finished: bool = True, tools: Any = None) -> list[Turn]:
    """Every assistant turn of a conversation, in order; the last one has no end token where `finished` is false.

    Raises DataError for a conversation that the template does not render as generation prompt, answer, end token.
    """
    places = [j for j, message in enumerate(messages) if message["role"] == "assistant"]
    return [_split_turn(chat, messages[: j + 1], finished or j != places[-1], tools) for j in places]


def _split_turn(chat: Chat, messages: Sequence[Message], ended: bool, tools: Any) -> Turn:
    prompt, whole = render(chat, messages[:-1], True, tools), render(chat, messages, False, tools)
    if not whole.startswith(prompt):
        raise DataError(
            f"message {len(messages)}: the chat template does not continue its generation prompt with the answer; "
            "answer the prompts with `dflash regenerate`, whose rows hold the ids"
        )
    tail = whole[len(prompt) :]
    start, content_end = _own_text(chat, messages, tail, len(prompt), tools)
    ends = [(place, text) for text in chat.eos_texts if (place := tail.find(text, content_end)) >= 0]
    if not ended:
        # A cut answer that calls tools: the calls stand between the content and the end token.
        stop = min(ends)[0] if ends and messages[-1].get("tool_calls") else content_end
        return Turn(prompt + tail[:start], tail[start:stop], False)
    if not ends:
        raise DataError(
            f"message {len(messages)}: the chat template ends the answer with none of the target's end tokens "
            f"({', '.join(chat.eos_texts)}); add its end-of-turn token to eos_token_id in generation_config.json"
        )
    place, text = min(ends)
    return Turn(prompt + tail[:start], tail[start : place + len(text)], True)


def _own_text(chat: Chat, messages: Sequence[Message], tail: str, prompt_chars: int, tools: Any) -> tuple[int, int]:
    # Where the target's own text begins in the tail, and where the message's content ends in it. Templates trim
    # contents and put text before them; what they put there shows when another content stands in its place.
    message = messages[-1]
    content = message.get("content") or ""
    core, trailing = content.strip(), content[len(content.rstrip()) :]
    reasoned = bool(message.get("reasoning_content"))
    begin = 0
    # An answer such as "<" may look like the beginning of what the template inserts: then no end token follows it.
    plain = tail.startswith(core) and tail[len(core) :].lstrip().startswith(chat.eos_texts)
    if reasoned or not core or core[0] != content[0] or not plain:
        marked = render(chat, [*messages[:-1], {**message, "content": MARK}], False, tools)[prompt_chars:]
        before, mark, _ = marked.partition(MARK)
        begin = len(before)
        if not mark or not tail.startswith(before) or not tail[begin:].lstrip().startswith(core):
            raise DataError(
                f"message {len(messages)}: the chat template changes the answer's text, so which tokens are the "
                "target's own is unknown; answer the prompts with `dflash regenerate`, whose rows hold the ids"
            )
    content_end = tail.index(core, begin) + len(core)
    content_end += len(trailing) if tail.startswith(trailing, content_end) else 0
    # A space that the template sets before the answer is a part of the answer's first token.
    return 0 if reasoned or not tail[:begin].strip(" ") else begin, content_end


def encode_turns(chat: Chat, turns: Sequence[Turn]) -> list[tuple[list[int], list[int]]]:
    """(context ids, answer ids) of each turn, in one call of the tokenizer.

    An answer is tokenised apart from its context, as it was generated. Tokenizers that change a text's beginning (a
    prepended space) tokenise both together, where the context's ids come out the same.
    """
    texts = [text for turn in turns for text in (turn.context, turn.answer)]
    if not chat.splits_anywhere:
        texts += [turn.context + turn.answer for turn in turns]
    ids = encode_texts(chat.tokenizer, texts)
    pairs = [(ids[2 * i], ids[2 * i + 1]) for i in range(len(turns))]
    if chat.splits_anywhere:
        return pairs
    return [
        (context, both[len(context) :] if both[: len(context)] == context else answer)
        for (context, answer), both in zip(pairs, ids[2 * len(turns) :], strict=True)
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
