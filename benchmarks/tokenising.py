"""Reading, tokenising and masking conversations, as a ratio to the bare tokenizer on the same text in the same run.

    python benchmarks/tokenising.py [--target demo/tiny-chat] [--rows 2000] [--turns 1,4]

The rows are the shipped conversations, joined to `turns` question-answer pairs each, written as JSONL: `rows` of the most
turns, as many times more of fewer, so that each figure is over as many answers. The bare tokenizer is given, in groups as
large as ours, the texts of all the samples that are made: both sides then come to as many tokens, and that is the ratio.
Where a template rewrites earlier turns, each answer is a sample of its own, with its history: together they hold more tokens
than the conversations, so the seconds that the bare tokenizer takes for the text of each conversation, once, stand beside it.
The three run in turns, and the best pass of each counts. TOKENIZERS_PARALLELISM decides for all.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable

from capture.lines import Scan, read_lines, scan_files
from capture.samples import GROUP_ROWS, RowResult, SampleRules, samples_of
from capture.settings import DEFAULT_DATA
from target.chat import Chat, open_chat, render
from target.load import resolve_target

PASSES = 8


def conversations(rows: int, turns: int) -> list[list[dict[str, str]]]:
    """`rows` conversations of `turns` pairs each, from those shipped."""
    shipped = [json.loads(line)["messages"] for line in DEFAULT_DATA.read_text(encoding="utf-8").splitlines()]
    return [
        [message for turn in range(turns) for message in shipped[(row * turns + turn) % len(shipped)]]
        for row in range(rows)
    ]


def seconds(*works: Callable[[], object]) -> list[float]:
    """The best of several passes of each, the least disturbed one; in turns, so that a slow minute slows all of them."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(PASSES):
        for work, own in zip(works, times, strict=True):
            started = time.perf_counter()
            work()
            own.append(time.perf_counter() - started)
    return [min(own) for own in times]


def main() -> None:
    """Write the rows, read them as a capture does, tokenise their samples' texts bare, print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="demo/tiny-chat")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--turns", default="1,4")
    given = parser.parse_args()
    chat = open_chat(resolve_target(given.target))
    rules = SampleRules("", len(chat.tokenizer), 1 << 20, 0.02)
    counts = [int(turns) for turns in given.turns.split(",")]
    for turns in counts:
        rows = given.rows * max(counts) // turns
        talks = conversations(rows, turns)
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
            file.writelines(json.dumps({"messages": messages}) + "\n" for messages in talks)
            file.flush()
            scans = scan_files((file.name,), None)

            def read(scans: list[Scan] = scans) -> list[RowResult]:
                return [result for scan in scans for result in samples_of(chat, read_lines(scan), rules)]

            found = [sample.input_ids for result in read() for sample in result.samples]
            texts = [chat.tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in found]
            once = [render(chat, messages, False) for messages in talks]
            same, least, ours = seconds(lambda t=texts: bare(chat, t), lambda t=once: bare(chat, t), read)
        tokens = sum(map(len, found))
        print(
            f"{rows:,} rows of {turns} turns, {len(found):,} samples of {tokens:,} tokens: the bare tokenizer {same:.3f} s "
            f"({tokens / same:,.0f} tokens/s), read, tokenised and masked {ours:.3f} s ({tokens / ours:,.0f}), ratio "
            f"{same / ours:.2f}; the bare tokenizer for each conversation once {least:.3f} s"
        )


def bare(chat: Chat, texts: list[str]) -> None:
    """Tokenise texts as a user of the tokenizer does, in groups as large as ours."""
    for start in range(0, len(texts), GROUP_ROWS):
        chat.tokenizer(texts[start : start + GROUP_ROWS], add_special_tokens=False)


if __name__ == "__main__":
    main()
