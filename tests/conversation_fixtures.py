"""What the tests of templates share: two conversations, a chat of each family, and the samples it makes of a row."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from capture_fixtures import talk
from template_fixtures import Family, family_chat

from capture.lines import Line
from capture.samples import Sample, SampleRules, samples_of
from target.chat import Chat

CHAT = [
    {"role": "system", "content": "Be brief."},
    *talk("Hi", "Hello", "More?", "Yes")["messages"],
]
THINKING = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4", "reasoning_content": "easy"},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": "6", "reasoning_content": "also"},
]
E = "<|im_end|>"
NOTHING = "<think>\n\n</think>\n\n"


@cache
def chat_of(family: Family, fast: bool = True) -> Chat:
    """A chat with the family's template, made once."""
    return family_chat(family, Path(mkdtemp(prefix="family-")), fast)


def samples(chat: Chat, row: dict[str, Any], **rules: Any) -> tuple[Sample, ...]:
    """The samples of one row, by these rules."""
    line = Line("rows.jsonl", 1, 0, json.dumps(row).encode())
    (result,) = samples_of(chat, [line], SampleRules("sha", 1 << 20, 4096, 0.5, **rules))
    return result.samples
