"""A small OpenAI-compatible server on loopback that answers with a real model, and misbehaves where a test asks it to."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from capture.generate import Sampling, greedy_answers, sampled_answers
from target.chat import Chat, prompt_ids
from target.head import head_traits
from target.load import Target


@dataclass
class Behaviour:
    """What the server knows and how it fails. `codes` are sent, one a request, before it answers any; 0 hangs up, -1 hangs.

    `dies_after`: that many answers, then 500s. `seen` are the bodies of the requests that it answered.
    """

    returns_ids: bool = True
    refuses_extras: bool = False
    completions: bool = True
    codes: list[int] = field(default_factory=list)
    dies_after: int | None = None
    reply: dict[str, Any] | bytes | None = None
    seen: list[dict[str, Any]] = field(default_factory=list)
    busiest: int = 0
    running: int = 0
    lock: Any = field(default_factory=threading.Lock)


@contextmanager
def serving(target: Target, chat: Chat, behaviour: Behaviour) -> Iterator[str]:
    """Serve until the block ends; gives the URL."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": "tiny-served"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with behaviour.lock:
                behaviour.running += 1
                behaviour.busiest = max(behaviour.busiest, behaviour.running)
                code = behaviour.codes.pop(0) if behaviour.codes else 200
                if code == 200 and behaviour.dies_after is not None and len(behaviour.seen) >= behaviour.dies_after:
                    code = 500
            try:
                self._answer(code, body)
            finally:
                with behaviour.lock:
                    behaviour.running -= 1

        def _answer(self, code: int, body: dict[str, Any]) -> None:
            if code == 0:
                self.connection.close()
                return
            if code == -1:
                time.sleep(1.0)
                return
            if code == 200 and self.path == "/v1/completions" and not behaviour.completions:
                code = 404
            if code == 200 and behaviour.refuses_extras and "return_token_ids" in body:
                code = 400
            if code != 200:
                self._send(code, {"error": f"code {code}"})
                return
            is_chat = self.path == "/v1/chat/completions"
            ids = prompt_ids(chat, body["messages"]) if is_chat else body["prompt"]
            with behaviour.lock:
                answer = self._generate(ids, body)
                behaviour.seen.append(body)
            finished = answer[-1] in chat.eos
            text = chat.tokenizer.decode(answer, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            choice: dict[str, Any] = {"finish_reason": "stop" if finished else "length"}
            if is_chat:
                choice["message"] = {"role": "assistant", "content": text}
            else:
                choice["text"] = text
                if behaviour.returns_ids and body.get("return_token_ids"):
                    choice["token_ids"] = answer
            self._send(200, behaviour.reply if behaviour.reply is not None else {"choices": [choice]})

        def _generate(self, ids: list[int], body: dict[str, Any]) -> list[int]:
            traits, limit = head_traits(target.config), body["max_tokens"]
            if not body["temperature"]:
                return greedy_answers(target, traits, [ids], limit, chat.eos)[0]
            sampling = Sampling(body["temperature"], body["top_p"], body["seed"])
            return sampled_answers(target, traits, [ids], limit, chat.eos, sampling, [(0, 0)])[0]

        def _send(self, code: int, body: dict[str, Any] | bytes) -> None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            if code == 429:
                self.send_header("Retry-After", "7")
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_args: None  # a client that gave up is what some tests are about
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
