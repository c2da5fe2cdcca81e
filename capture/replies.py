"""From what a target or a server said to an answer: its message, and its ids with the end token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from capture.journal import Answer
from capture.server import Reply, Server, chat, complete
from schemas.errors import ServerFault
from target.chat import Chat, encode_texts
from target.steps import encode_turns
from target.turns import split_turns

# GPT-OSS's channels: special tokens around what it thinks and what it says.
THINKS, SAYS, BREAK = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|end|>"


def answer_message(chat: Chat, answer: Sequence[int]) -> dict[str, Any]:
    """An answer as a message of the conversation, without the end token. One that was cut while it thought has no content."""
    ids = list(answer[:-1] if answer and answer[-1] in chat.eos else answer)
    spelled = str(chat.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    if SAYS in spelled or spelled.startswith(THINKS):
        thought, _, said = spelled.partition(SAYS)
        thinking = thought.partition(THINKS)[2].partition(BREAK)[0]
        return {"role": "assistant", "content": said} | ({"reasoning_content": thinking} if thinking else {})
    text = str(chat.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    return {"role": "assistant", "content": text}


@dataclass(frozen=True)
class ServerAnswers:
    """A server's replies as answers of the target: `chat` is the target's tokenizer and template, here."""

    chat: Chat
    server: Server

    @cached_property
    def end_id(self) -> int:
        """The token that ends an answer in the target's template."""
        talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
        (turn,) = split_turns(self.chat, talk)
        ((_, ids),) = encode_turns(self.chat, [turn])
        return ids[-1]

    def answer(self, messages: Sequence[Mapping[str, Any]], context: Sequence[int], row: int, turn: int) -> Answer:
        """The answer to a conversation whose ids are `context`. Raises ServerFault."""
        if self.server.api == "chat":
            return self._said(messages, chat(self.server, messages, row, turn))
        reply = complete(self.server, context, row, turn)
        ids = encode_texts(self.chat.tokenizer, [reply.text])[0] if reply.ids is None else reply.ids
        if reply.finished and (not ids or ids[-1] not in self.chat.eos):
            ids = [*ids, self.end_id]
        if not ids:
            raise ServerFault(
                f"{self.server.url}: an answer of no tokens that was cut: see that the server runs the target"
            )
        finished = reply.finished or ids[-1] in self.chat.eos
        return Answer(ids, finished, answer_message(self.chat, ids), reply.ids is None)

    def _said(self, messages: Sequence[Mapping[str, Any]], reply: Reply) -> Answer:
        # The template says which tokens stand around the text.
        message = {"role": "assistant", "content": reply.text}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        turn = split_turns(self.chat, [*messages, message], reply.finished)[-1]
        ((context, ids),) = encode_turns(self.chat, [turn])
        if not ids:
            raise ServerFault(
                f"{self.server.url}: an answer of no tokens that was cut: see that the server runs the target"
            )
        return Answer(ids, reply.finished, message, True, context)
