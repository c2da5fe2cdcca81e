"""Which supervised tokens are thinking: for `--reasoning mask`, which trains a draft on answers alone."""

from collections.abc import Sequence

from target.chat import Chat

# What begins and what ends a model's thinking, in the order in which they are looked for.
BLOCKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel|>analysis<|message|>", "<|end|>"))
# A generation prompt that opens the thinking ends with its beginning, within so many tokens.
OPENING_TOKENS = 8


def without_reasoning(chat: Chat, ids: Sequence[int], mask: Sequence[int]) -> list[int]:
    """The mask with each supervised run's thinking, its end mark and the blank text after that taken out.

    A token that holds thinking and answer both stays supervised. An answer that was cut while thinking is all thinking.
    """
    result, start = list(mask), 0
    while start < len(ids):
        stop = start
        while stop < len(ids) and mask[stop] == mask[start]:
            stop += 1
        if mask[start]:
            thinking = _thinking_tokens(chat, ids[max(0, start - OPENING_TOKENS) : start], ids[start:stop])
            result[start : start + thinking] = [0] * thinking
        start = stop
    return result


def _thinking_tokens(chat: Chat, before: Sequence[int], run: Sequence[int]) -> int:
    # How many tokens at the beginning of a run are thinking.
    text, prompt = _decode(chat, run), _decode(chat, before)
    for begin, end in BLOCKS:
        opened = text.lstrip().startswith(begin) or prompt.rstrip().endswith(begin)
        if not opened and end not in text:
            continue
        if end not in text:
            return len(run) if opened else 0
        chars = text.index(end) + len(end)
        chars += len(text[chars:]) - len(text[chars:].lstrip())
        low, high = 0, len(run)
        while low < high:  # the most tokens whose text ends within the thinking
            middle = (low + high + 1) // 2
            low, high = (middle, high) if len(_decode(chat, run[:middle])) <= chars else (low, middle - 1)
        return low
    return 0


def _decode(chat: Chat, ids: Sequence[int]) -> str:
    return str(chat.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
