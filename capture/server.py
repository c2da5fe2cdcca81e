"""Answers from an OpenAI-compatible server that runs the target: completions of token ids, or chat completions.

Token ids in and out are asked for first: a text does not tokenise to the same ids for about one answer in a hundred.
"""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import urlsplit

from capture.generate import Sampling
from schemas.errors import OptionError, ServerFault
from schemas.options import RegenerateOptions

# Of a server that runs behind a key.
KEY_VARIABLE = "DFLASH_SERVER_KEY"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
BUSY = frozenset({408, 425, 429})
NO_SUCH_WAY = frozenset({404, 405, 501})
REFUSED = frozenset({400, 422})
LONGEST_WAIT = 60.0
FINISHED = {"stop": True, "length": False}


class Refusal(ServerFault):
    """The server understood and said no: `code` is HTTP's."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Server:
    """How to ask: `ids` whether it is asked to return token ids, which not every server allows. Times are in seconds."""

    url: str
    model: str
    api: Literal["completions", "chat"]
    timeout: float
    retries: int
    max_tokens: int
    sampling: Sampling | None
    ids: bool = True
    wait: Callable[[float], None] = time.sleep


@dataclass(frozen=True)
class Reply:
    """A server's answer: its text, its ids where it gave them, what it thought, and whether it ended by itself."""

    text: str
    ids: list[int] | None
    reasoning: str | None
    finished: bool


def open_server(
    options: RegenerateOptions,
    sampling: Sampling | None,
    probe: Sequence[int],
    wait: Callable[[float], None] = time.sleep,
) -> Server:
    """Find out which model the server runs and which way of asking it knows, with one token after the ids of `probe`.

    Raises OptionError for a URL that is none, ServerFault where the server cannot be reached.
    """
    assert options.server is not None
    parts = urlsplit(options.server)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise OptionError(f"--server {options.server}: write a URL such as http://localhost:8000/v1")
    url = options.server.rstrip("/") + ("" if parts.path.strip("/") else "/v1")
    api: Literal["completions", "chat"] = "chat" if options.server_api == "chat" else "completions"
    server = Server(
        url,
        options.server_model or "",
        api,
        options.timeout,
        options.retries,
        options.max_new_tokens,
        sampling,
        wait=wait,
    )
    if not server.model:
        listed = _ask(server, "models", None).get("data")
        names = [item.get("id") for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
        if not names or not isinstance(names[0], str):
            raise ServerFault(f"{url}/models lists no model: name the target's with --server-model")
        server = replace(server, model=names[0])
    return server if api == "chat" else _knows_completions(server, options.server_api == "auto", probe)


def _knows_completions(server: Server, or_chat: bool, probe: Sequence[int]) -> Server:
    one = replace(server, max_tokens=1)
    for ids in (True, False):
        try:
            complete(replace(one, ids=ids), probe, 0, 0)
            return replace(server, ids=ids)
        except Refusal as fault:
            if fault.code in REFUSED and ids:
                continue
            if or_chat and fault.code in NO_SUCH_WAY | REFUSED:
                return replace(server, api="chat")
            raise
    raise AssertionError("unreachable: the last way returns or raises")


def complete(server: Server, prompt_ids: Sequence[int], row: int, turn: int) -> Reply:
    """The continuation of token ids. Raises ServerFault."""
    asked = {"prompt": list(prompt_ids), "max_tokens": server.max_tokens, **_drawing(server, row, turn)}
    if server.ids:
        asked["return_token_ids"] = True
    choice = _choice(server, _ask(server, "completions", {"model": server.model, **asked}))
    text, ids = choice.get("text"), choice.get("token_ids")
    if not isinstance(text, str):
        raise ServerFault(f"{server.url}/completions: an answer without a text: it is no OpenAI-compatible server")
    sound = isinstance(ids, list) and all(type(token) is int for token in ids)
    return Reply(text, ids if sound else None, None, _finished(server, choice))


def chat(server: Server, messages: Sequence[Mapping[str, Any]], row: int, turn: int) -> Reply:
    """The answer to a conversation, through the server's own template. Raises ServerFault."""
    asked = {"messages": list(messages), "max_tokens": server.max_tokens, **_drawing(server, row, turn)}
    choice = _choice(server, _ask(server, "chat/completions", {"model": server.model, **asked}))
    message = choice.get("message")
    if not isinstance(message, dict) or not isinstance(message.get("content") or "", str):
        raise ServerFault(
            f"{server.url}/chat/completions: an answer without a message: it is no OpenAI-compatible server"
        )
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return Reply(
        message.get("content") or "",
        None,
        reasoning if isinstance(reasoning, str) else None,
        _finished(server, choice),
    )


def _drawing(server: Server, row: int, turn: int) -> dict[str, Any]:
    drawn = server.sampling
    if drawn is None:
        return {"temperature": 0}
    return {"temperature": drawn.temperature, "top_p": drawn.top_p, "seed": drawn.seed_of(row, turn)}


def _choice(server: Server, body: Mapping[str, Any]) -> dict[str, Any]:
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise ServerFault(
            f"{server.url}: an answer without choices ({json.dumps(body)[:120]}): it is no OpenAI-compatible server"
        )
    return choices[0]


def _finished(server: Server, choice: Mapping[str, Any]) -> bool:
    reason = choice.get("finish_reason")
    if reason not in FINISHED:
        raise ServerFault(f"{server.url}: an answer ended with {reason!r}, neither stop nor length: it cannot be used")
    return FINISHED[reason]


def _ask(server: Server, what: str, payload: Mapping[str, Any] | None) -> dict[str, Any]:
    # Ask again where the server is busy, fails or is not there, waiting twice as long each time, or as long as it says.
    where = f"{server.url}/{what}"
    for attempt in range(server.retries + 1):
        try:
            return _ask_once(server, where, payload)
        except urllib.error.HTTPError as fault:
            said = fault.read(400).decode("utf-8", "replace")
            why, after = f"HTTP {fault.code}: {' '.join(said.split())[:200]}", fault.headers.get("Retry-After", "")
            if (fault.code < 500 and fault.code not in BUSY) or fault.code == 501:
                raise Refusal(f"{where} refuses ({why})", fault.code) from None
        except (OSError, http.client.HTTPException) as fault:
            why, after = str(getattr(fault, "reason", fault)) or type(fault).__name__, ""
        except ValueError:
            raise ServerFault(f"{where} does not answer in JSON: it is no OpenAI-compatible server") from None
        if attempt < server.retries:
            server.wait(min(LONGEST_WAIT, float(after) if after.isdigit() else 0.5 * 2**attempt))
    raise ServerFault(
        f"{where} does not answer ({why}) after {server.retries + 1} tries: see that the server runs, or raise --retries or "
        "--timeout; what is answered is kept"
    )


def _ask_once(server: Server, where: str, payload: Mapping[str, Any] | None) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(KEY_VARIABLE):
        headers["Authorization"] = f"Bearer {key}"
    data = None if payload is None else json.dumps(payload).encode()
    local = urlsplit(where).hostname in LOOPBACK
    opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if local else []))
    with opener.open(urllib.request.Request(where, data, headers), timeout=server.timeout) as response:
        body = json.loads(response.read())
    if not isinstance(body, dict):
        raise ValueError
    return body
