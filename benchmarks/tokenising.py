"""Reading, tokenising and masking conversations, as a ratio to the bare tokenizer on the same text in the same run.

    python benchmarks/tokenising.py [--target demo/tiny-chat] [--rows 2000] [--turns 1,4]

The rows are the shipped conversations, joined to `turns` question-answer pairs each, written as JSONL: `rows` of the most
turns, as many times more of fewer, so that each figure is over as many tokens. The bare tokenizer is given the texts that
the template makes of them, in groups as large as ours. The two run in turns, and the best pass of each counts.
TOKENIZERS_PARALLELISM decides for both.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable

from capture.lines import read_lines, scan_files
from capture.samples import GROUP_ROWS, SampleRules, samples_of
from capture.settings import DEFAULT_DATA
from target.chat import open_chat, render
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
    """Write the rows, tokenise their text bare and read them as a capture does, print the ratio."""
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
        texts = [render(chat, messages, False) for messages in talks]
        groups = [texts[start : start + GROUP_ROWS] for start in range(0, len(texts), GROUP_ROWS)]
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
            file.writelines(json.dumps({"messages": messages}) + "\n" for messages in talks)
            file.flush()
            scans = scan_files((file.name,), None)
            tokens = sum(
                len(s.input_ids) for scan in scans for r in samples_of(chat, read_lines(scan), rules) for s in r.samples
            )
            bare, ours = seconds(
                lambda groups=groups: [chat.tokenizer(group, add_special_tokens=False) for group in groups],
                lambda scans=scans: [list(samples_of(chat, read_lines(scan), rules)) for scan in scans],
            )
        print(
            f"{rows:,} rows of {turns} turns, {tokens:,} tokens: bare tokenizer {tokens / bare:,.0f} tokens/s, "
            f"read, tokenised and masked {tokens / ours:,.0f} tokens/s, ratio {bare / ours:.2f}"
        )


if __name__ == "__main__":
    main()
