"""The target's chat template: what it is given before an answer, and which text of an answer is its own.

For assistant turn j the target is given template(messages[:j]) with the generation prompt; what it generates follows:
the answer and its end-of-turn token. An empty think block that the template puts between the two is context: it says
that the target was asked not to think. Everything else that stands there is the target's own (GPT-OSS's channels).
"""

import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from schemas.errors import DataError, TargetError
from target.frame import Frame, Written, frame_of, written
from target.load import TargetRef, eos_ids, load_tokenizer
from target.sandbox import quick

Message = Mapping[str, Any]
# Private-use characters: no template trims, splits or interprets them.
MARK = "\ue000answer\ue001"
# What a template inserts for an answer without reasoning; the first half may stand in the generation prompt already.
EMPTY_THINK = re.compile(r"\s*(?:<think>)?\s*</think>\s*")
# Templates that write today's date would make a cache depend on the day of its capture: they are given this one, the day
# that Llama's own template falls back to.
TEMPLATE_DATE = date(2024, 7, 26)
# What a token of its own may stand between.
AROUND = (("", ""), ("x", "b"), ("x ", " b"), ("x\n", "\nb"))
DATE_CALL = re.compile(r"""strftime_now\(\s*(?:"([^"]*)"|'([^']*)')\s*\)""")


@dataclass(frozen=True)
class Chat:
    """A tokenizer with its template and the ids, with their texts, that end an answer.

    `splits_anywhere` is false where the tokenizer treats the beginning of a text differently (it prepends a space).
    `lead` is what it sets before a text by itself: the BOS token, or nothing.
    `template` is the tokenizer's, its date frozen; `dated` says that it writes one. `compiled` renders it without
    transformers' checks of its input, where the tokenizer has no rendering of its own; `names` are what it may use.
    `frame` is there where it writes one message after the other. `ends_exactly`: a text holds as many end tokens as it
    spells out, each of them with nothing around it. `marks` are all the tokens of which that holds, by their texts.
    """

    tokenizer: Any
    eos: frozenset[int]
    eos_texts: tuple[str, ...]
    splits_anywhere: bool
    lead: tuple[int, ...]
    template: str
    dated: bool
    compiled: Any = None
    names: Mapping[str, Any] = field(default_factory=dict)
    frame: Frame | None = None
    ends_exactly: bool = False
    marks: Mapping[str, int] = field(default_factory=dict)


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
    template = frozen_date(tokenizer.chat_template)
    dated = template != tokenizer.chat_template
    splits, compiled = _splits_anywhere(tokenizer, texts), _compiled(tokenizer, template)
    names = {} if compiled is None else {**compiled.globals, **tokenizer.special_tokens_map}
    lead, marks = _leading_ids(tokenizer), _marks(tokenizer, template, eos)
    exact = [marks.get(text) for text in texts] == list(eos)
    chat = Chat(tokenizer, frozenset(eos), texts, splits, lead, template, dated, compiled, names, None, exact, marks)
    return replace(chat, frame=_frame(chat))


def _leading_ids(tokenizer: Any) -> tuple[int, ...]:
    plain, full = encode_texts(tokenizer, ["x"])[0], tuple(tokenizer("x")["input_ids"])
    place = next((i for i in range(len(full)) if full[i : i + len(plain)] == tuple(plain)), 0)
    return full[:place]


def _compiled(tokenizer: Any, template: str) -> Any:
    # apply_chat_template copies and checks every message each time: half of what tokenising costs. Ours are plain already.
    if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
        return None
    compile_template = getattr(chat_template_utils, "_compile_jinja_template", None)
    try:
        return None if compile_template is None else quick(compile_template(template), template)
    except Exception:  # a template with a fault of syntax: reported where it is rendered
        return None


def _frame(chat: Chat) -> Frame | None:
    if chat.compiled is None:
        return None
    try:
        tree = chat.compiled.environment.parse(chat.template)
        return frame_of(tree, lambda messages, asking: _write(chat, messages, asking))
    except Exception:  # a template that refuses even no messages
        return None


def _marks(tokenizer: Any, template: str, eos: Sequence[int]) -> dict[str, int]:
    # The end tokens and those that the template writes, if they are found before anything else is done to a text, wherever it
    # spells them (no token of its own text holds or overlaps one), and the texts on both sides are tokenised apart.
    added = tokenizer.added_tokens_decoder
    if not encodes_side_by_side(tokenizer) or tokenizer.split_special_tokens:
        return {}
    if any(token.single_word for token in added.values()):  # whether it is one depends on what stands beside it
        return {}
    texts = [token.content for token in added.values()]
    found = {
        token.content: i
        for i, token in added.items()
        if (i in eos or token.content in template)
        and not (token.normalized or token.lstrip or token.rstrip)
        and not any(_hides(other, token.content) for other in texts)
    }
    return {mark: i for mark, i in found.items() if _parts(tokenizer, mark, i)}


def _parts(tokenizer: Any, mark: str, i: int) -> bool:
    whole = encode_texts(tokenizer, [f"{one}{mark}{other}" for one, other in AROUND])
    ids = encode_texts(tokenizer, [text for pair in AROUND for text in pair])
    return whole == [[*one, i, *other] for one, other in zip(ids[::2], ids[1::2], strict=True)]


def _hides(other: str, text: str) -> bool:
    # Whether a token may be found where the text of this one begins, or before that, and reach into it.
    return (text in other and text != other) or any(other.endswith(text[:size]) for size in range(1, len(text)))


def _splits_anywhere(tokenizer: Any, ends: Sequence[str]) -> bool:
    pairs = [("x", " a"), *((end, after) for end in ends for after in ("b", " b", "\nb"))]
    whole = encode_texts(tokenizer, [first + second for first, second in pairs])
    parts = encode_texts(tokenizer, [text for pair in pairs for text in pair])
    return whole == [parts[2 * i] + parts[2 * i + 1] for i in range(len(pairs))]


def frozen_date(template: str) -> str:
    """The template with every call for today's date replaced by TEMPLATE_DATE in the format that it asks for."""

    def day(call: re.Match[str]) -> str:
        return repr(TEMPLATE_DATE.strftime(call[1] if call[1] is not None else call[2]))

    frozen = DATE_CALL.sub(day, template)
    if "strftime_now(" in frozen:
        # The format is an expression: it gets the date in one fixed format.
        return f"{{% macro strftime_now(format) %}}{TEMPLATE_DATE}{{% endmacro +%}}{frozen}"
    return frozen


def encode_texts(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Ids of each text, without any token that the text does not spell out."""
    return list(_encoded(tokenizer, texts))


def encode_arrays(tokenizer: Any, texts: Sequence[str]) -> list["array[int]"]:
    """`encode_texts` as arrays of C's int: Python's garbage collector looks at every element of a list, again and again."""
    return [array("i", ids) for ids in _encoded(tokenizer, texts)]


def _encoded(tokenizer: Any, texts: Sequence[str]) -> Iterable[list[int]]:
    if not texts:
        return []
    if encodes_side_by_side(tokenizer):
        # The same ids as the call below, without the offsets that it computes and drops: 1.6 times as fast.
        backend = tokenizer.backend_tokenizer
        # Set only where it differs: another thread may be encoding.
        if backend.padding is not None:
            backend.no_padding()
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.encode_special_tokens != tokenizer.split_special_tokens:
            backend.encode_special_tokens = tokenizer.split_special_tokens
        return (encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False))
    encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
    return (list(ids) for ids in encoded["input_ids"])


def encodes_side_by_side(tokenizer: Any) -> bool:
    """Whether several threads may encode at a time: nothing in the tokenizer is set for a call, and no other code of its class runs."""
    return getattr(type(tokenizer), "_encode_plus", None) is PreTrainedTokenizerFast._encode_plus


def render(chat: Chat, messages: Sequence[Message], generation_prompt: bool, tools: Any = None) -> str:
    """The template's text for the messages. Raises DataError where the template refuses them."""
    try:
        if chat.compiled is not None and tools is None:
            return "".join(_write(chat, _plain(messages), generation_prompt))
        text = chat.tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=tools,
            chat_template=chat.template,
            tokenize=False,
            add_generation_prompt=generation_prompt,
        )
    except Exception as fault:  # a template may raise anything: its own refusals, undefined names, wrong types
        lines = str(fault).strip().splitlines() or [""]
        raise DataError(
            f"the target's chat template refuses the conversation ({type(fault).__name__}: {lines[0][:200]})"
        ) from None
    return str(text)


def render_blocks(chat: Chat, messages: Sequence[Message]) -> Written:
    """The text of each message, where the chat has a `frame`. Raises LooksAhead, and whatever the template raises."""
    return written(lambda plain, asking: _write(chat, plain, asking), _plain(messages), False)


def _plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    # What apply_chat_template gives a template: no keys that are null, and reasoning under the names that templates read.
    plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
    for message in plain:
        if "reasoning_content" in message:
            message.setdefault("thinking", message["reasoning_content"])
    return plain


def _write(chat: Chat, plain: Any, generation_prompt: bool) -> Iterator[str]:
    # As Template.render does, without merging the names anew each time.
    given = {"messages": plain, "tools": None, "documents": None, "add_generation_prompt": generation_prompt}
    context = chat.compiled.new_context({**chat.names, **given}, shared=True)
    pieces: Iterator[str] = chat.compiled.root_render_func(context)
    return pieces


def prompt_ids(chat: Chat, messages: Sequence[Message], tools: Any = None) -> list[int]:
    """What the target is given to answer these messages."""
    return encode_texts(chat.tokenizer, [render(chat, messages, True, tools)])[0]
