"""Messages as the chat template takes them, whatever schema the row wrote them in: OpenAI's or ShareGPT's."""

import json
from typing import Any

from capture.lines import BadRow

UNKNOWN_ROLE = "unknown role"
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
PLAIN = frozenset({"role", "content"})
# ShareGPT's `from`, and what its relatives write there.
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "bot": "assistant", "model": "assistant"}
# OpenAI-compatible servers disagree on the name of what a model thought.
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


def read_messages(messages: Any, where: str, name: str = "messages") -> list[dict[str, Any]]:
    """A non-empty list of objects with role (or from) and content (or value), normalised; a text of JSON stands for its list.

    Content becomes one text (None only where an assistant calls tools), tool calls' arguments an object, what was
    thought `reasoning_content`. Keys that are null are left out. Raises BadRow naming the message at fault.
    """
    items = from_text(messages)
    if not isinstance(items, list) or not items:
        raise BadRow(f"{where}: {name} must be a non-empty list, not {short(messages)}")
    return [
        item if _is_plain(item) else _message(item, f"{where}: message {number}")
        for number, item in enumerate(items, 1)
    ]


def _is_plain(item: Any) -> bool:
    # As nearly all messages are: what `_message` would return as it is.
    if type(item) is not dict or item.keys() != PLAIN:
        return False
    return type(item["content"]) is str and type(item["role"]) is str and item["role"] in ROLES


def from_text(value: Any) -> Any:
    """A list that was stored as a text of JSON, as exporters do for nested columns; anything else as it is."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _message(item: Any, at: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise BadRow(f"{at} must be an object with role and content, not {short(item)}")
    role, content = item.get("role", item.get("from")), item.get("content", item.get("value"))
    if not isinstance(role, str) or not role:
        raise BadRow(f'{at}: role must be a name such as "user" or "assistant", not {short(role)}')
    role = SHAREGPT_ROLES.get(role, role)
    if role not in ROLES:
        raise BadRow(f"{at}: role {short(role)} is none of {', '.join(sorted(ROLES))}", UNKNOWN_ROLE, stops=False)
    message = {key: value for key, value in item.items() if value is not None}
    for key in ("from", "value", *REASONING_KEYS):
        message.pop(key, None)
    calls = message.pop("tool_calls", None)
    if role == "assistant" and calls:
        message["tool_calls"] = _tool_calls(calls, at)
    reasoning = next((item[key] for key in REASONING_KEYS if item.get(key)), None)
    if reasoning is not None and not isinstance(reasoning, str):
        raise BadRow(f"{at}: reasoning_content must be a text, not {short(reasoning)}")
    if role == "assistant" and reasoning:
        message["reasoning_content"] = reasoning
    text = _text(content, at)
    if text is None and "tool_calls" not in message:
        raise BadRow(f"{at}: content must be a text, not {short(content)}")
    return {**message, "role": role, "content": text}


def _text(content: Any, at: str) -> str | None:
    # A text, or the texts of its parts one after the other.
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list) or any(not isinstance(part, dict) for part in content):
        raise BadRow(f"{at}: content must be a text, not {short(content)}")
    texts = []
    for number, part in enumerate(content, 1):
        if part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            raise BadRow(f"{at}: content part {number} is no text but {short(part)}; only text can be captured")
        texts.append(part["text"])
    return "".join(texts)


def _tool_calls(calls: Any, at: str) -> list[dict[str, Any]]:
    # OpenAI writes the arguments as a text of JSON; templates write an object as JSON, a text as a quoted text.
    calls = from_text(calls)
    if not isinstance(calls, list) or any(not isinstance(call, dict) for call in calls):
        raise BadRow(f"{at}: tool_calls must be a list of objects, not {short(calls)}")
    return [
        {**call, "function": _function(call["function"])} if isinstance(call.get("function"), dict) else _function(call)
        for call in calls
    ]


def _function(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return function
        if isinstance(parsed, dict):
            return {**function, "arguments": parsed}
    return function


def short(value: Any) -> str:
    """A value for a message, at most 60 characters of JSON."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
