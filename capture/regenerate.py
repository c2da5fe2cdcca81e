"""`dflash regenerate`: the target's own greedy answers to prompts, with their token ids, for `dflash capture`.

The journal FILE.partial grows batch by batch; FILE appears whole, in the prompts' order, when every prompt is answered.
Which prompts share a batch follows from the prompts alone, so the finished file does not depend on how often the run
was killed.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache.device import resolve_device
from cache.store import check_place, write_whole
from capture.conversations import parse_conversation
from capture.generate import greedy_answers
from capture.journal import Answers, add_batch, begin_journal, open_journal, partial_path
from capture.lines import BadRow, parse_object, read_lines, scan_files
from capture.prompts import Prompt, read_prompts
from capture.samples import join_turns
from schemas.errors import DataError
from schemas.options import RegenerateOptions
from schemas.say import Say
from target.chat import Chat, encode_texts, open_chat, render
from target.head import check_head, head_traits
from target.load import load_target, read_config, resolve_dtype, resolve_target
from target.tokens import tokenizer_sha256

OUTPUT_KEYS = frozenset(
    {"messages", "input_ids", "loss_mask", "finished", "max_new_tokens", "tokenizer_sha256", "target"}
)


@dataclass(frozen=True)
class Regenerated:
    """What the finished file holds. A conversation may need several rows; `finished` answers ended by themselves."""

    prompts: int
    rows: int
    answer_tokens: int
    answers: int
    finished: int


def regenerate(options: RegenerateOptions, say: Say) -> Regenerated | None:
    """Answer every prompt of `options.prompts` into `options.out`; None where that file already holds these answers.

    Raises UserError (its kinds) before the weights are loaded, CaptureFault where the target's logits are not finite.
    """
    out = Path(options.out)
    if out.resolve() == Path(options.prompts).resolve():
        raise DataError(f"--out {options.out} is the prompts file: give another --out")
    if out.is_dir():
        raise DataError(f"--out {options.out} is a folder: give a file name")
    if not out.exists():
        check_place(options.out)
    ref = resolve_target(options.target, options.trust_remote_code)
    config, chat = read_config(ref), open_chat(ref)
    resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, config)
    (scan,) = scan_files((options.prompts,), options.limit)
    prompts = list(read_prompts(scan))
    common = {"max_new_tokens": options.max_new_tokens, "tokenizer_sha256": tokenizer_sha256(ref), "target": ref.name}
    if out.exists():
        _check_finished(out, prompts, common)
        partial_path(out).unlink(missing_ok=True)
        say.note(f"{options.out} already holds these answers: nothing to do")
        return None
    _render_all(chat, prompts)
    settings = {
        **common,
        "revision": ref.revision,
        "prompts_sha256": scan.sha256,
        "rows": scan.rows,
        "dtype": dtype,
        "batch_tokens": options.batch_tokens,
    }
    answers = open_journal(partial_path(out), settings)
    if answers:
        say.note(f"{partial_path(out)}: going on, {len(answers)} answers are there")
    target = load_target(ref, dtype, options.device, options.attn)
    traits = head_traits(target.config)
    check_head(target, traits)
    if not answers:
        begin_journal(partial_path(out), settings)

    def ask(contexts: Sequence[Sequence[int]]) -> list[list[int]]:
        return greedy_answers(target, traits, contexts, options.max_new_tokens, chat.eos)

    conversations = _answer_all(options, chat, prompts, answers, ask, say)
    rows = list(_rows(chat, prompts, conversations, common))
    write_whole(out, (json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows))
    partial_path(out).unlink()
    given = [answer for conversation in conversations for answer in conversation.answers]
    finished = sum(answer[-1] in chat.eos for answer in given)
    return Regenerated(len(prompts), len(rows), sum(map(len, given)), len(given), finished)


@dataclass
class _Conversation:
    # Grows by a turn at a time: what stands before the next answer, and each turn's (context, answer) ids.
    messages: list[dict[str, Any]]
    contexts: list[list[int]]
    answers: list[list[int]]


def _render_all(chat: Chat, prompts: Sequence[Prompt]) -> None:
    # A prompt that the template refuses must be found before an hour of answers, not after.
    for prompt in prompts:
        try:
            render(chat, prompt.first_messages(), True)
        except DataError as fault:
            raise BadRow(f"{prompt.line.where}: {fault}", "not rendered by the chat template") from None


def _answer_all(
    options: RegenerateOptions, chat: Chat, prompts: Sequence[Prompt], answers: Answers, ask: Any, say: Say
) -> list[_Conversation]:
    conversations = [_Conversation(list(prompt.opening), [], []) for prompt in prompts]
    total = sum(len(prompt.turns) for prompt in prompts)
    tokens, begun = 0, time.monotonic()
    for turn in range(max(len(prompt.turns) for prompt in prompts)):
        rows = [row for row, prompt in enumerate(prompts) if len(prompt.turns) > turn]
        for row in rows:
            conversations[row].messages.append({"role": "user", "content": prompts[row].turns[turn]})
        texts = [render(chat, conversations[row].messages, True) for row in rows]
        for row, ids in zip(rows, encode_texts(chat.tokenizer, texts), strict=True):
            conversations[row].contexts.append(ids)
        lengths = [len(conversations[row].contexts[turn]) for row in rows]
        for places in prompt_batches(lengths, options.max_new_tokens, options.batch_tokens):
            batch = [rows[place] for place in places]
            if any((row, turn) not in answers for row in batch):
                given = ask([conversations[row].contexts[turn] for row in batch])
                add_batch(partial_path(Path(options.out)), turn, batch, given)
                answers.update({(row, turn): ids for row, ids in zip(batch, given, strict=True)})
                tokens += sum(map(len, given))
                rate = tokens / max(time.monotonic() - begun, 1e-9)
                say.progress("regenerate", len(answers), total, tokens_per_s=rate)
        for row in rows:
            answer = answers[row, turn]
            conversations[row].answers.append(answer)
            conversations[row].messages.append({"role": "assistant", "content": answer_text(chat, answer)})
    return conversations


def prompt_batches(lengths: Sequence[int], max_new_tokens: int, batch_tokens: int) -> Iterator[list[int]]:
    """Prompts of like length together, longest first: at most `batch_tokens` with their answers, or one prompt."""
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    while order:
        size = max(1, batch_tokens // (lengths[order[0]] + max_new_tokens))
        yield order[:size]
        order = order[size:]


def answer_text(chat: Chat, answer: Sequence[int]) -> str:
    """An answer's text, without the end token."""
    ids = answer[:-1] if answer[-1] in chat.eos else answer
    return str(chat.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _rows(
    chat: Chat, prompts: Sequence[Prompt], conversations: Sequence[_Conversation], common: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    # One row per conversation; more where the template rewrites earlier turns: a later turn does not continue them.
    for prompt, conversation in zip(prompts, conversations, strict=True):
        pieces = join_turns(list(zip(conversation.contexts, conversation.answers, strict=True)))
        ends = [first for first, _, _ in pieces[1:]] + [len(prompt.turns)]
        for (_, ids, mask), end in zip(pieces, ends, strict=True):
            yield {
                **({} if prompt.row_id is None else {"id": prompt.row_id}),
                "messages": conversation.messages[: len(prompt.opening) + 2 * end],
                "input_ids": ids,
                "loss_mask": mask,
                "finished": conversation.answers[end - 1][-1] in chat.eos,
                **common,
            }


def _check_finished(out: Path, prompts: Sequence[Prompt], common: dict[str, Any]) -> None:
    # The file under the final name is whole. Are its answers the ones asked for?
    (scan,) = scan_files((str(out),), None)
    answered = 0
    for line in read_lines(scan):
        try:
            row, messages = parse_object(line), parse_conversation(line).messages
        except BadRow:
            row, messages = {}, []
        if not row.keys() >= OUTPUT_KEYS:
            raise DataError(
                f"--out {out} holds something else (line {line.number} is no row of regenerate): "
                "remove it or give another --out"
            )
        for name, value in common.items():
            if row[name] != value:
                raise DataError(
                    f"--out {out} was made with {name} {row[name]!r}, this command asks for {value!r}: "
                    "remove it or give another --out"
                )
        turns = [message["content"] for message in messages if message["role"] == "user"]
        if answered == len(prompts) or prompts[answered].turns[: len(turns)] != turns:
            raise DataError(f"--out {out} answers other prompts (line {line.number}): remove it or give another --out")
        answered += len(turns) == len(prompts[answered].turns)
    if answered != len(prompts):
        raise DataError(
            f"--out {out} answers {answered} prompts, {len(prompts)} are asked for: remove it or give another --out"
        )
