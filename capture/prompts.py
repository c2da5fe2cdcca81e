"""Prompt files: rows that hold `messages`, `conversations`, `turns` or `prompt`, to be answered by the target."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from capture.conversations import read_prompt
from capture.lines import BadRow, Line, Scan, parse_object, read_lines
from capture.messages import read_messages
from schemas.options import PromptFormat

FORMS: tuple[PromptFormat, ...] = ("messages", "conversations", "turns", "prompt")


@dataclass(frozen=True)
class Prompt:
    """What to answer: `opening` (system messages) and the user's turns, one after the other."""

    line: Line
    row_id: str | None
    opening: list[dict[str, Any]]
    turns: list[str]

    @property
    def sample_id(self) -> str:
        """The name of its first answer, made as an index's: 16 digits of the row's hash and the turn."""
        return f"{self.line.sha256[:16]}-0"

    def first_messages(self) -> list[dict[str, Any]]:
        """The conversation up to the first answer."""
        return [*self.opening, {"role": "user", "content": self.turns[0]}]


def read_prompts(scan: Scan, asked: PromptFormat = "auto") -> Iterator[Prompt]:
    """Every row of a scanned prompt file, in order. Raises BadRow (`file:line: ...`)."""
    return (parse_prompt(line, asked) for line in read_lines(scan))


def parse_prompt(line: Line, asked: PromptFormat = "auto") -> Prompt:
    """Read a row: `prompt` (a text or messages), `turns` (the user's texts), or a conversation, which is answered anew.

    Raises BadRow.
    """
    row, where = parse_object(line), line.where
    row_id = None if row.get("id") is None else str(row["id"])
    form = next((form for form in FORMS if form in row and asked in ("auto", form)), None)
    if form is None:
        wanted = ", ".join(f"`{form}`" for form in FORMS) if asked == "auto" else f"`{asked}`"
        raise BadRow(f"{where}: the row has none of {wanted}; add one of them")
    if form == "turns":
        turns = row["turns"]
        if not isinstance(turns, list) or not turns or any(not isinstance(turn, str) for turn in turns):
            raise BadRow(f"{where}: turns must be a non-empty list of texts")
        return Prompt(line, row_id, [], turns)
    messages = read_prompt(row["prompt"], where) if form == "prompt" else read_messages(row[form], where, form)
    system = row.get("system")
    if form != "messages" and isinstance(system, str) and system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return Prompt(line, row_id, *_split_messages(messages, where))


def _split_messages(messages: list[dict[str, Any]], where: str) -> tuple[list[dict[str, Any]], list[str]]:
    opening: list[dict[str, Any]] = []
    turns: list[str] = []
    for number, message in enumerate(messages, 1):
        if message["role"] == "user":
            turns.append(message["content"])
        elif message["role"] in ("system", "developer") and not turns:
            opening.append({"role": message["role"], "content": message["content"]})
        elif message["role"] != "assistant":
            raise BadRow(
                f"{where}: message {number}: a {message['role']!r} message cannot be replayed; keep system, user and "
                "assistant"
            )
    if not turns:
        raise BadRow(f"{where}: the prompt has no user message, so there is nothing to answer")
    return opening, turns
