"""Train a tiny Qwen3 chat model from scratch on `messages` JSONL, on a CPU, within a wall-clock budget.

    python train_tiny_target.py DATA.jsonl OUT SECONDS [hidden layers mlp vocabulary]

demo/tiny-chat was made by this (192 6 512 2048, 12 minutes on one core) from greedy answers of SmolLM2-135M-Instruct to
demo/prompts.jsonl and TruthfulQA's questions: training loss 0.51, held-out 2.99; fluent near its data, and it loops on 2.5%
of prompts. It is a fixture, not a good model: its own greedy answers are easy to predict, which is what a demonstration of
drafting needs.
"""

import json
import random
import sys
import time

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, START, END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WINDOW, BATCH = 256, 12


def render(row: dict) -> str:
    """The template's text; an answer that was cut has no end."""
    text = "".join(f"{START}{m['role']}\n{m['content']}{END}\n" for m in row["messages"])
    return text if row.get("finished", True) else text[: -len(END) - 1]


def make_tokenizer(documents: list[str], size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of its own, with a MASK token."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[PAD, START, END, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(documents, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=PAD, mask_token=MASK)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def loss_of(model: Qwen3ForCausalLM, stream: torch.Tensor) -> torch.Tensor:
    """Next-token loss on random windows of a stream of tokens."""
    starts = torch.randint(0, len(stream) - WINDOW - 1, (BATCH,))
    windows = torch.stack([stream[start : start + WINDOW + 1] for start in starts])
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(windows[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def main(data: str, out: str, budget: float, hidden: int, layers: int, mlp: int, vocabulary: int) -> None:
    """Train for `budget` seconds with Muon on the matrices and AdamW on the rest, then save in bfloat16."""
    random.seed(0)
    torch.manual_seed(0)
    with open(data, encoding="utf-8") as file:
        documents = [render(json.loads(line)) for line in file]
    random.shuffle(documents)
    held_out, documents = documents[: len(documents) // 20], documents[len(documents) // 20 :]
    tokenizer = make_tokenizer(documents, vocabulary)
    encode = tokenizer.backend_tokenizer.encode_batch
    train, val = (torch.tensor([t for e in encode(texts) for t in [*e.ids, 0]]) for texts in (documents, held_out))
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=hidden, num_hidden_layers=layers, intermediate_size=mlp, head_dim=64,
        num_attention_heads=hidden // 64, num_key_value_heads=max(1, hidden // 128), max_position_embeddings=1024,
        tie_word_embeddings=True, rope_theta=1e4, eos_token_id=tokenizer.eos_token_id, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = [
        (torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.1), 0.02),
        (torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0), 3e-3),
    ]
    start, step = time.time(), 0
    while (done := (time.time() - start) / budget) < 1:
        scale = min(1, (step + 1) / 20) * (1 if done < 0.4 else max(0.02, (1 - done) / 0.6))
        loss = loss_of(model, train)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, rate in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        if step % 100 == 0:
            print(f"step {step} {time.time() - start:.0f}s train {loss.item():.3f}", flush=True)
    with torch.no_grad():
        print("held-out", sum(loss_of(model, val).item() for _ in range(20)) / 20)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), *(int(word) for word in (sys.argv[4:8] or (192, 6, 512, 2048))))
