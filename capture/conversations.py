"""Rows of data as conversations: OpenAI's and ShareGPT's messages, a prompt with its response, text, or token ids."""

from dataclasses import dataclass
from typing import Any

from capture.lines import BadRow, Line, parse_object
from capture.messages import from_text, read_messages, short
from schemas.options import DataFormat

NO_ASSISTANT = "no assistant turn"
ANSWERS = ("response", "completion")


@dataclass(frozen=True)
class Given:
    """Token ids that came with the row, and the tokenizer they belong to (None: the row does not say)."""

    input_ids: list[int]
    loss_mask: list[int]
    tokenizer_sha256: str | None


@dataclass(frozen=True)
class Conversation:
    """A valid row: messages with at least one assistant turn, a text, or ids. `finished` false: the last answer was cut.

    `target` is who the row says wrote the answers.
    """

    line: Line
    row_id: str | None
    messages: list[dict[str, Any]]
    finished: bool
    tools: list[Any] | None
    given: Given | None
    text: str | None = None
    target: str | None = None

    @property
    def first_user(self) -> str | None:
        """The first user message, by which a conversation belongs to the training or the held-out part."""
        return next((m["content"] for m in self.messages if m["role"] == "user"), None)


def parse_conversation(line: Line, asked: DataFormat = "auto") -> Conversation:
    """Read a row of the format asked for, "auto" by its columns; unknown keys are left alone.

    Raises BadRow (`file:line: ...`) for a row that is no conversation.
    """
    row, where = parse_object(line), line.where
    kind = format_of(row, where) if asked == "auto" else asked
    text = _text(row, where) if kind == "text" else None
    given = _given(row, kind, where) if kind in ("messages", "tokens") else None
    messages = messages_of(row, kind, where) if kind not in ("text", "tokens") else []
    if messages and not any(message["role"] == "assistant" for message in messages):
        raise BadRow(
            f"{where}: the conversation has no assistant turn, so nothing in it is the target's own; answer it with "
            "`dflash regenerate`",
            NO_ASSISTANT,
            stops=False,
        )
    finished, tools, row_id = row.get("finished"), from_text(row.get("tools")), row.get("id")
    if finished is not None and not isinstance(finished, bool):
        raise BadRow(f"{where}: finished must be true or false, not {finished!r}")
    if tools is not None and not isinstance(tools, list):
        raise BadRow(f"{where}: tools must be a list, not {type(tools).__name__}")
    target = row.get("target")
    return Conversation(
        line,
        None if row_id is None else str(row_id),
        messages,
        finished is not False,
        tools or None,
        given,
        text,
        target if isinstance(target, str) else None,
    )


def format_of(row: dict[str, Any], where: str) -> DataFormat:
    """The format that a row's columns tell; the first of several. Raises BadRow where they tell none."""
    if "messages" in row:
        return "messages"
    if "conversations" in row:
        return "sharegpt"
    if "input_ids" in row:
        return "tokens"
    if "prompt" in row and any(key in row for key in ANSWERS):
        return "response"
    if "text" in row:
        return "text"
    raise BadRow(
        f"{where}: the row has no `messages`, `conversations`, `prompt` with `response`, `text` or `input_ids` "
        f"(it has {', '.join(sorted(map(str, row)))[:80] or 'nothing'}); rename its columns"
    )


def messages_of(row: dict[str, Any], kind: DataFormat, where: str) -> list[dict[str, Any]]:
    """The normalised messages of a row that has some. Raises BadRow."""
    if kind == "response":
        answer = next((row[key] for key in ANSWERS if row.get(key) is not None), None)
        messages = [
            *read_prompt(row.get("prompt"), where),
            *_side(answer, "assistant", where, "response"),
        ]
    else:
        key = "messages" if kind == "messages" else "conversations"
        if key not in row:
            raise BadRow(f"{where}: the row has no `{key}`, which --format {kind} asks for")
        messages = read_messages(row[key], where, key)
    system = row.get("system")
    if kind != "messages" and isinstance(system, str) and system and messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    return messages


def read_prompt(prompt: Any, where: str) -> list[dict[str, Any]]:
    """What `prompt` says: a user's text, or messages. Raises BadRow."""
    return _side(prompt, "user", where, "prompt")


def _side(value: Any, role: str, where: str, name: str) -> list[dict[str, Any]]:
    if isinstance(value, list):
        return read_messages(value, where, name)
    if not isinstance(value, str):
        raise BadRow(f"{where}: {name} must be a text, not {short(value)}")
    return [{"role": role, "content": value}]


def _text(row: dict[str, Any], where: str) -> str:
    text = row.get("text")
    if not isinstance(text, str):
        raise BadRow(f"{where}: text must be a text, not {short(text)}")
    return text


def _given(row: dict[str, Any], kind: DataFormat, where: str) -> Given | None:
    if row.get("input_ids") is None and kind == "messages":
        return None
    ids, mask, sha = row.get("input_ids"), row.get("loss_mask"), row.get("tokenizer_sha256")
    if not isinstance(sha, str) and (kind == "messages" or sha is not None):
        raise BadRow(
            f"{where}: input_ids without tokenizer_sha256 belong to no known tokenizer; take the rows of `dflash "
            "regenerate`, or take them as this target's with --format tokens"
        )
    # type() and not isinstance: JSON's true and false are no ids.
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise BadRow(f"{where}: input_ids must be a list of whole numbers")
    length = row.get("prompt_length")
    if mask is None and length is not None:
        if type(length) is not int or not 0 <= length <= len(ids):
            raise BadRow(f"{where}: prompt_length must be a whole number from 0 to {len(ids)}, not {short(length)}")
        mask = [0] * length + [1] * (len(ids) - length)
    if not isinstance(mask, list) or any(type(m) is not int or m not in (0, 1) for m in mask):
        raise BadRow(f"{where}: loss_mask must be a list of 0 and 1 (or prompt_length a number)")
    if len(ids) != len(mask):
        raise BadRow(f"{where}: input_ids has {len(ids)} entries, loss_mask {len(mask)}; they must be as long")
    return Given(ids, mask, sha)
