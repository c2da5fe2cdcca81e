"""`dflash regenerate`: the target's own answers to prompts, with their token ids, for `dflash capture`.

The journal FILE.partial grows batch by batch, or with a server answer by answer; FILE appears whole, in the prompts'
order, when every prompt is answered. Which prompts share a batch follows from the prompts alone, and what is drawn for
an answer from the seed, its row and turn, so the finished file does not depend on how often the run was killed.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache.device import resolve_device
from cache.store import check_place
from cache.whole import write_whole
from capture import server as server_module
from capture.conversations import parse_conversation
from capture.generate import Sampling, greedy_answers, sampled_answers
from capture.journal import Answer, Answers, add_batch, begin_journal, open_journal, partial_path
from capture.lines import BadRow, Scan, parse_object, read_lines, scan_files
from capture.pieces import join_turns
from capture.prompts import Prompt, read_prompts
from capture.replies import ServerAnswers, answer_message
from capture.workers import side_by_side
from schemas.errors import DataError
from schemas.options import RegenerateOptions
from schemas.say import Say
from target.chat import Chat, encode_texts, open_chat, prompt_ids, render
from target.head import check_head, head_traits
from target.load import TargetRef, load_target, read_config, resolve_dtype, resolve_target
from target.tokens import tokenizer_sha256

OUTPUT_KEYS = frozenset(
    {"messages", "input_ids", "loss_mask", "finished", "max_new_tokens", "tokenizer_sha256", "target"}
)
# Further keys of sampled rows.
SAMPLED_KEYS = ("temperature", "top_p", "seed")
# Answers to (row, turn), as they come, with their batch.
Ask = Callable[[Sequence[tuple[int, int]]], Iterator[tuple[list[tuple[int, int]], list[Answer]]]]


@dataclass(frozen=True)
class Regenerated:
    """What the finished file holds. A conversation may need several rows; `finished` answers ended by themselves."""

    prompts: int
    rows: int
    answer_tokens: int
    answers: int
    finished: int


@dataclass
class _Conversation:
    # Grows by a turn at a time: what stands before the next answer, and each turn's context ids and answer.
    messages: list[dict[str, Any]]
    contexts: list[list[int]]
    answers: list[Answer]


@dataclass(frozen=True)
class _Work:
    # What every step of an unfinished run needs; `conversations` alone changes.
    options: RegenerateOptions
    chat: Chat
    prompts: list[Prompt]
    sampling: Sampling | None
    conversations: list[_Conversation]


def regenerate(options: RegenerateOptions, say: Say) -> Regenerated | None:
    """Answer every prompt of `options.prompts` into `options.out`; None where that file already holds these answers.

    Raises UserError (its kinds) before the weights are loaded, CaptureFault where the target's logits are not finite,
    ServerFault where a server does not answer.
    """
    out = Path(options.out)
    _check_out(options)
    ref = resolve_target(options.target, options.trust_remote_code)
    chat = open_chat(ref)
    sampling = Sampling(options.temperature, options.top_p, options.seed) if options.temperature else None
    scans = scan_files((options.prompts,), options.limit)
    prompts = [prompt for scan in scans for prompt in read_prompts(scan, options.format)]
    drawn = {name: getattr(options, name) for name in SAMPLED_KEYS} if sampling else {}
    common = {
        "max_new_tokens": options.max_new_tokens,
        "tokenizer_sha256": tokenizer_sha256(ref),
        "target": ref.name,
        **drawn,
    }
    if out.exists():
        _check_finished(out, prompts, common)
        partial_path(out).unlink(missing_ok=True)
        say.note(f"{options.out} already holds these answers: nothing to do")
        return None
    _render_all(chat, prompts)
    settings = {**common, "revision": ref.revision, **_data_of(scans), **_way_of(options, ref)}
    answers = open_journal(partial_path(out), settings)
    if answers:
        say.note(f"{partial_path(out)}: going on, {len(answers)} answers are there")
    work = _Work(options, chat, prompts, sampling, [_Conversation(list(p.opening), [], []) for p in prompts])
    ask = _ask_target(work, ref) if options.server is None else _ask_server(work, say)
    if not answers:
        begin_journal(partial_path(out), settings)
    _answer_all(work, answers, ask, say)
    rows = list(_rows(work, common))
    write_whole(out, (json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows))
    partial_path(out).unlink()
    given = [answer for conversation in work.conversations for answer in conversation.answers]
    finished = sum(_finished(chat, answer) for answer in given)
    if again := sum(answer.retokenised for answer in given):
        say.warn(f"the server gave no ids with {again} answers: their texts were tokenised, and their rows say so")
    return Regenerated(len(prompts), len(rows), sum(len(answer.ids) for answer in given), len(given), finished)


def _check_out(options: RegenerateOptions) -> None:
    out = Path(options.out)
    if out.resolve() == Path(options.prompts).resolve():
        raise DataError(f"--out {options.out} is the prompts file: give another --out")
    if out.is_dir():
        raise DataError(f"--out {options.out} is a folder: give a file name")
    if out.suffix == ".parquet":
        raise DataError(f"--out {options.out}: the answers are JSONL; give a name that ends in .jsonl")
    if not out.exists():
        check_place(options.out)


def _data_of(scans: Sequence[Scan]) -> dict[str, object]:
    sha256 = scans[0].sha256
    if len(scans) > 1:
        sha256 = hashlib.sha256("".join(scan.sha256 for scan in scans).encode()).hexdigest()
    return {"prompts_sha256": sha256, "rows": sum(scan.rows for scan in scans)}


def _way_of(options: RegenerateOptions, ref: TargetRef) -> dict[str, object]:
    if options.server is not None:
        return {"dtype": "the server's"}
    resolve_device(options.device)
    return {"dtype": resolve_dtype(options.dtype, read_config(ref)), "batch_tokens": options.batch_tokens}


def _render_all(chat: Chat, prompts: Sequence[Prompt]) -> None:
    # A prompt that the template refuses must be found before an hour of answers, not after.
    for prompt in prompts:
        try:
            render(chat, prompt.first_messages(), True)
        except DataError as fault:
            raise BadRow(f"{prompt.line.where}: {fault}", "not rendered by the chat template") from None


def _ask_target(work: _Work, ref: TargetRef) -> Ask:
    # In process: prompts of like length in one batch.
    options = work.options
    target = load_target(ref, resolve_dtype(options.dtype, read_config(ref)), options.device, options.attn)
    traits = head_traits(target.config)
    check_head(target, traits)

    def ask(places: Sequence[tuple[int, int]]) -> Iterator[tuple[list[tuple[int, int]], list[Answer]]]:
        given = [work.conversations[row].contexts[turn] for row, turn in places]
        if work.sampling is None:
            answers = greedy_answers(target, traits, given, options.max_new_tokens, work.chat.eos)
        else:
            answers = sampled_answers(
                target, traits, given, options.max_new_tokens, work.chat.eos, work.sampling, places
            )
        yield list(places), [Answer(ids) for ids in answers]

    return ask


def _ask_server(work: _Work, say: Say) -> Ask:
    # One request an answer, many at a time.
    probe = prompt_ids(work.chat, work.prompts[0].first_messages())
    server = server_module.open_server(work.options, work.sampling, probe)
    say.note(
        f"{server.url}: {server.model}, by {server.api} of {'token ids' if server.api == 'completions' else 'messages'}"
    )
    way = ServerAnswers(work.chat, server)

    def ask(places: Sequence[tuple[int, int]]) -> Iterator[tuple[list[tuple[int, int]], list[Answer]]]:
        def one(place: tuple[int, int]) -> Answer:
            conversation = work.conversations[place[0]]
            try:
                return way.answer(conversation.messages, conversation.contexts[place[1]], *place)
            except DataError as fault:  # the target's template, on an answer of the server's
                raise DataError(f"{work.prompts[place[0]].line.where}: {fault}") from None

        for place, answer in side_by_side(places, one, work.options.concurrency):
            yield [place], [answer]

    return ask


def _answer_all(work: _Work, answers: Answers, ask: Ask, say: Say) -> None:
    total = sum(len(prompt.turns) for prompt in work.prompts)
    tokens, begun = 0, time.monotonic()
    for turn in range(max(len(prompt.turns) for prompt in work.prompts)):
        rows = [row for row, prompt in enumerate(work.prompts) if len(prompt.turns) > turn]
        for row in rows:
            work.conversations[row].messages.append({"role": "user", "content": work.prompts[row].turns[turn]})
        texts = [render(work.chat, work.conversations[row].messages, True) for row in rows]
        for row, ids in zip(rows, encode_texts(work.chat.tokenizer, texts), strict=True):
            work.conversations[row].contexts.append(ids)
        for batch in _open_batches(work, rows, turn, answers):
            for places, given in ask(batch):
                add_batch(partial_path(Path(work.options.out)), turn, [row for row, _ in places], given)
                answers.update(zip(places, given, strict=True))
                tokens += sum(len(answer.ids) for answer in given)
                rate = tokens / max(time.monotonic() - begun, 1e-9)
                say.progress("regenerate", len(answers), total, tokens_per_s=rate)
        for row in rows:
            answer, conversation = answers[row, turn], work.conversations[row]
            conversation.answers.append(answer)
            conversation.messages.append(answer.message or answer_message(work.chat, answer.ids))
            if answer.context is not None:
                conversation.contexts[turn] = answer.context


def _open_batches(work: _Work, rows: Sequence[int], turn: int, answers: Answers) -> Iterator[list[tuple[int, int]]]:
    # What is not answered yet: whole batches in process, all that is missing for a server.
    if work.options.server is not None:
        if missing := [(row, turn) for row in rows if (row, turn) not in answers]:
            yield missing
        return
    lengths = [len(work.conversations[row].contexts[turn]) for row in rows]
    for places in prompt_batches(lengths, work.options.max_new_tokens, work.options.batch_tokens):
        batch = [(rows[place], turn) for place in places]
        if any(place not in answers for place in batch):
            yield batch


def prompt_batches(lengths: Sequence[int], max_new_tokens: int, batch_tokens: int) -> Iterator[list[int]]:
    """Prompts of like length together, longest first: at most `batch_tokens` with their answers, or one prompt."""
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    while order:
        size = max(1, batch_tokens // (lengths[order[0]] + max_new_tokens))
        yield order[:size]
        order = order[size:]


def _finished(chat: Chat, answer: Answer) -> bool:
    return answer.ids[-1] in chat.eos if answer.finished is None else answer.finished


def _rows(work: _Work, common: dict[str, Any]) -> Iterator[dict[str, Any]]:
    # One row per conversation; more where the template rewrites earlier turns: a later turn does not continue them.
    for prompt, conversation in zip(work.prompts, work.conversations, strict=True):
        answers = conversation.answers
        pieces = join_turns(list(zip(conversation.contexts, [answer.ids for answer in answers], strict=True)))
        ends = [first for first, _, _ in pieces[1:]] + [len(prompt.turns)]
        for (first, ids, mask), end in zip(pieces, ends, strict=True):
            again = any(answer.retokenised for answer in answers[first:end])
            yield {
                **({} if prompt.row_id is None else {"id": prompt.row_id}),
                "messages": conversation.messages[: len(prompt.opening) + 2 * end],
                "input_ids": ids,
                "loss_mask": mask,
                "finished": _finished(work.chat, answers[end - 1]),
                **common,
                **({"retokenised": True} if again else {}),
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
        for name in (*common, *SAMPLED_KEYS):
            if row.get(name) != common.get(name):
                raise DataError(
                    f"--out {out} was made with {name} {row.get(name)!r}, this command asks for {common.get(name)!r}: "
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
