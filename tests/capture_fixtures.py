"""What the capture tests share: small targets made on the spot, a listener that remembers, and JSONL files."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from schemas.options import CaptureOptions

ROOT = Path(__file__).resolve().parent.parent
TINY_CHAT = ROOT / "demo" / "tiny-chat"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")

# Reasoning models' habits: the last answer gets an empty think block where it brings none, earlier answers lose theirs,
# and leading newlines are trimmed.
THINKING_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% set content = m.content or '' %}{% set reasoning = m.reasoning_content or '' %}"
    "{% if '</think>' in content %}{% set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{% if loop.last %}<think>\n{{ reasoning.strip('\n') }}\n</think>\n\n{% endif %}{{ content.lstrip('\n') }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.name }}</call>{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Recorder:
    """A listener that keeps what it was told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self.steps: list[tuple[str, float, float]] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def progress(self, label: str, done: float, total: float, **_figures: float | str) -> None:
        self.steps.append((label, done, total))


def copy_tokenizer(folder: Path, template: str | None = None) -> None:
    """The shipped model's tokenizer, with another chat template if given."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        shutil.copy(TINY_CHAT / name, folder / name)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)


def random_target(folder: Path, layers: int = 4, dtype: torch.dtype = torch.float32, **config: Any) -> str:
    """A random Qwen3 of a few thousand weights with the shipped tokenizer. Returns its path."""
    shape = {
        "vocab_size": 2048,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**{**shape, **config}))
    with torch.no_grad():
        # Larger weights than a fresh model's: every layer then changes its input visibly.
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                parameter.mul_(8)
    model.to(dtype).save_pretrained(folder)
    copy_tokenizer(folder)
    return str(folder)


def write_jsonl(path: Path, rows: list[Any]) -> str:
    """A JSONL file of these rows. Returns its path."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def talk(*texts: str, **row: Any) -> dict[str, Any]:
    """A conversation row of alternating user and assistant texts."""
    return {
        "messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)],
        **row,
    }


def shipped_rows(count: int) -> list[dict[str, Any]]:
    """The first rows of the shipped conversations."""
    with open(ROOT / "capture" / "data" / "conversations.jsonl", encoding="utf-8") as file:
        return [json.loads(next(file)) for _ in range(count)]


def capture_options(target: str, data: str, out: Path, **options: Any) -> CaptureOptions:
    """Small shards and batches, float32."""
    small = {
        "codec": "f32",
        "dtype": "float32",
        "top_k": 8,
        "max_length": 256,
        "shard_tokens": 1024,
        "batch_tokens": 512,
    }
    return CaptureOptions(target=target, data=(data,), out=str(out), **{"val_fraction": 0.2, **small, **options})


def contents(path: Path) -> dict[str, bytes]:
    """Every file of a cache on a disk."""
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}
