"""Prompt files: rows that hold `messages`, `turns` or `prompt`, to be answered by the target."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from capture.lines import BadRow, Line, Scan, check_messages, parse_object, read_lines


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


def read_prompts(scan: Scan) -> Iterator[Prompt]:
    """Every row of a scanned prompt file, in order. Raises BadRow (`file:line: ...`)."""
    return (parse_prompt(line) for line in read_lines(scan))


def parse_prompt(line: Line) -> Prompt:
    """Read a row: `prompt` (a text), `turns` (the user's texts) or `messages` (answered anew). Raises BadRow."""
    row, where = parse_object(line), line.where
    row_id = None if row.get("id") is None else str(row["id"])
    forms = [key for key in ("messages", "turns", "prompt") if key in row]
    if not forms:
        raise BadRow(f"{where}: the row has none of `messages`, `turns`, `prompt`; add one of them", "malformed prompt")
    if forms[0] == "messages":
        messages = check_messages(row["messages"], where)
        return Prompt(line, row_id, *_split_messages(messages, where))
    turns = row["turns"] if forms[0] == "turns" else [row["prompt"]]
    if not isinstance(turns, list) or not turns or any(not isinstance(turn, str) for turn in turns):
        raise BadRow(
            f"{where}: {forms[0]} must be {'a non-empty list of texts' if forms[0] == 'turns' else 'a text'}",
            "malformed prompt",
        )
    return Prompt(line, row_id, [], turns)


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
                "assistant",
                "malformed prompt",
            )
    if not turns:
        raise BadRow(f"{where}: the prompt has no user message, so there is nothing to answer", "malformed prompt")
    return opening, turns
