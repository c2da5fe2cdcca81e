"""Conversations: rows of `messages`, and the rows of `dflash regenerate` that bring their token ids along."""

from dataclasses import dataclass
from typing import Any

from capture.lines import BadRow, Line, check_messages, parse_object


@dataclass(frozen=True)
class Given:
    """Token ids that came with the row, and the tokenizer they belong to."""

    input_ids: list[int]
    loss_mask: list[int]
    tokenizer_sha256: str


@dataclass(frozen=True)
class Conversation:
    """A valid row: at least one assistant turn. `finished` false: the last answer was cut and has no end of turn."""

    line: Line
    row_id: str | None
    messages: list[dict[str, Any]]
    finished: bool
    tools: list[Any] | None
    given: Given | None

    @property
    def first_user(self) -> str | None:
        """The first user message, by which a conversation belongs to the training or the held-out part."""
        return next((m["content"] for m in self.messages if m["role"] == "user"), None)


def parse_conversation(line: Line) -> Conversation:
    """Read a row; unknown keys are left alone. Raises BadRow (`file:line: ...`) for a row that is no conversation."""
    row, where = parse_object(line), line.where
    if "messages" not in row:
        hint = (
            "; ShareGPT's `conversations` (from, value) must be rewritten as `messages` (role, content)"
            if "conversations" in row
            else ""
        )
        raise BadRow(f"{where}: the row has no `messages`{hint}", "malformed messages")
    messages = check_messages(row["messages"], where)
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRow(
            f"{where}: the conversation has no assistant turn, so nothing in it is the target's own; answer it with "
            "`dflash regenerate`, "
            "or leave such rows out with --skip-bad-rows",
            "no assistant turn",
        )
    finished, tools, row_id = row.get("finished", True), row.get("tools"), row.get("id")
    if not isinstance(finished, bool):
        raise BadRow(f"{where}: finished must be true or false, not {finished!r}", "malformed row")
    if tools is not None and not isinstance(tools, list):
        raise BadRow(f"{where}: tools must be a list, not {type(tools).__name__}", "malformed row")
    return Conversation(line, None if row_id is None else str(row_id), messages, finished, tools, _given(row, where))


def _given(row: dict[str, Any], where: str) -> Given | None:
    if "input_ids" not in row:
        return None
    ids, mask, sha = row["input_ids"], row.get("loss_mask"), row.get("tokenizer_sha256")
    if not isinstance(sha, str):
        raise BadRow(
            f"{where}: input_ids without tokenizer_sha256 belong to no known tokenizer; take the rows of `dflash "
            "regenerate`",
            "malformed ids",
        )
    # type() and not isinstance: JSON's true and false are no ids.
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise BadRow(f"{where}: input_ids must be a list of whole numbers", "malformed ids")
    if not isinstance(mask, list) or any(type(m) is not int or m not in (0, 1) for m in mask):
        raise BadRow(f"{where}: loss_mask must be a list of 0 and 1", "malformed ids")
    if len(ids) != len(mask):
        raise BadRow(
            f"{where}: input_ids has {len(ids)} entries, loss_mask {len(mask)}; they must be as long", "malformed ids"
        )
    return Given(ids, mask, sha)
