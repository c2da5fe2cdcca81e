"""Chat templates of our own writing that reproduce the quirks of well-known families, and tokenizers to go with them.

Each family's expected samples are written by hand in test_templates.py.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from target.chat import Chat, open_chat
from target.load import TargetRef

CORPUS = (
    "You are a helpful assistant. user assistant system model tool Hello there, how are you today? \n\n"
    "Be brief. <think> </think> Cutting Knowledge Date Today Date functions weather city Rome sunny "
) * 3


@dataclass(frozen=True)
class Family:
    """A template, its special tokens, its BOS (if any) and the tokens that end an answer."""

    template: str
    specials: tuple[str, ...]
    bos: str | None
    ends: tuple[str, ...]


# Thinking stands only after the last question; the last answer gets an empty block where it has none. Tool results are
# a user's.
QWEN3 = Family(
    r"""
{%- if tools %}{{- '<|im_start|>system\n# Tools\n' }}{% for tool in tools %}{{- tool | tojson + '\n' }}{% endfor %}{{- '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
  {%- if m.role == 'assistant' %}
    {%- set content, reasoning = m.content or '', m.reasoning_content or '' %}
    {%- if '</think>' in content %}
      {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
      {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>assistant\n' }}
    {%- if loop.index0 > ns.last and (loop.last or reasoning) %}{{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}{% endif %}
    {{- content.lstrip('\n') }}
    {%- for call in m.tool_calls or [] %}{{- '<tool_call>\n' + (call.function or call) | tojson + '\n</tool_call>' }}{% endfor %}
    {{- '<|im_end|>\n' }}
  {%- elif m.role == 'tool' %}
    {{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
  {%- else %}
    {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% if enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}
""".strip(),
    ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|endoftext|>"),
    None,
    ("<|im_end|>", "<|endoftext|>"),
)

# The generation prompt opens the thinking already.
QWEN35 = Family(
    QWEN3.template.replace(
        "{% if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}",
        "{% if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% else %}{{- '<think>\\n' }}{% endif %}",
    ),
    QWEN3.specials,
    None,
    QWEN3.ends,
)

# BOS and today's date in the template, contents trimmed, a tool call ends with another token than an answer.
LLAMA31 = Family(
    r"""
{{- bos_token }}
{%- if not date_string is defined %}{% if strftime_now is defined %}{% set date_string = strftime_now("%d %b %Y") %}{% else %}{% set date_string = "26 Jul 2024" %}{% endif %}{% endif %}
{%- if messages[0]['role'] == 'system' %}{% set system, messages = messages[0]['content'] | trim, messages[1:] %}{% else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: ' + date_string + '\n\n' + system + '<|eot_id|>' }}
{%- for m in messages %}
  {%- if 'tool_calls' in m %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' + m.tool_calls[0].function.arguments | tojson + '}<|eom_id|>' }}
  {%- elif m.role == 'tool' %}
    {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content | tojson + '<|eot_id|>' }}
  {%- else %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
""".strip(),
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
    "<|begin_of_text|>",
    ("<|eot_id|>", "<|eom_id|>"),
)

# No system role: it is folded into the first question. The assistant is "model"; roles must alternate.
GEMMA3 = Family(
    r"""
{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set prefix, messages = messages[0].content + '\n\n', messages[1:] %}{% else %}{% set prefix = '' %}{% endif %}
{%- for m in messages %}
  {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
  {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (prefix if loop.first else '') + m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{% endif %}
""".strip(),
    ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    "<bos>",
    ("<end_of_turn>", "<eos>"),
)

# Channels; a dated system message; the last answer ends with another token than earlier ones, which lose their analysis.
GPT_OSS = Family(
    r"""
{{- '<|start|>system<|message|>You are ChatGPT.\nCurrent date: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}
{%- for m in messages %}
  {%- if m.role == 'assistant' %}
    {%- if m.thinking and loop.last %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}
    {%- if m.tool_calls %}
      {{- '<|start|>assistant to=functions.' + m.tool_calls[0].function.name + '<|channel|>commentary json<|message|>' + m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
    {%- else %}
      {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}
    {%- endif %}
  {%- elif m.role == 'tool' %}
    {{- '<|start|>functions.' + m.name + ' to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}
  {%- else %}
    {{- '<|start|>' + ('developer' if m.role == 'system' else m.role) + '<|message|>' + m.content + '<|end|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}
""".strip(),
    ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|endoftext|>"),
    None,
    ("<|return|>", "<|call|>", "<|endoftext|>"),
)

# No generation prompt; a space before each answer; the system's words stand before the LAST question, so each turn
# rewrites the ones before it; tools too.
MISTRAL = Family(
    r"""
{%- if messages[0].role == 'system' %}{% set system, messages = messages[0].content, messages[1:] %}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{{- bos_token }}
{%- for m in messages %}
  {%- if m.role == 'user' %}
    {%- if loop.index0 == ns.last and tools %}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
    {{- '[INST] ' + (system + '\n\n' if system is defined and loop.index0 == ns.last else '') + m.content + '[/INST]' }}
  {%- elif m.role == 'tool' %}
    {{- '[TOOL_RESULTS] ' + m.content | tojson + '[/TOOL_RESULTS]' }}
  {%- elif m.tool_calls %}
    {{- '[TOOL_CALLS] ' + [m.tool_calls[0].function] | tojson + eos_token }}
  {%- else %}
    {{- ' ' + m.content | trim + eos_token }}
  {%- endif %}
{%- endfor %}
""".strip(),
    (
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_CALLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
    ),
    "<s>",
    ("</s>",),
)

# The system's words stand first without a header; everything up to </think> is dropped, even of the last answer.
DEEPSEEK_V3 = Family(
    r"""
{{- bos_token }}
{%- for m in messages %}{% if m.role == 'system' %}{{- m.content }}{% endif %}{% endfor %}
{%- for m in messages %}
  {%- if m.role == 'user' %}
    {{- '<｜User｜>' + m.content }}
  {%- elif m.role == 'assistant' and m.tool_calls %}
    {{- '<｜Assistant｜><｜tool▁calls▁begin｜>' + m.tool_calls[0].function.name + '\n' + m.tool_calls[0].function.arguments | tojson + '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
  {%- elif m.role == 'assistant' %}
    {{- '<｜Assistant｜>' + m.content.split('</think>')[-1].lstrip('\n') + '<｜end▁of▁sentence｜>' }}
  {%- elif m.role == 'tool' %}
    {{- '<｜tool▁outputs▁begin｜>' + m.content + '<｜tool▁outputs▁end｜>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}{% endif %}
""".strip(),
    (
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁outputs▁begin｜>",
        "<｜tool▁outputs▁end｜>",
    ),
    "<｜begin▁of▁sentence｜>",
    ("<｜end▁of▁sentence｜>",),
)

PHI4 = Family(
    r"""
{%- for m in messages %}{{- '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant<|im_sep|>' }}{% endif %}
""".strip(),
    ("<|im_start|>", "<|im_sep|>", "<|im_end|>", "<|endoftext|>"),
    "<|endoftext|>",
    ("<|im_end|>", "<|endoftext|>"),
)

# A system message of its own where there is none; BOS is the token that begins every message.
SMOLLM2 = Family(
    r"""
{%- for m in messages %}
  {%- if loop.first and m.role != 'system' %}{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}
  {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
""".strip(),
    ("<|im_start|>", "<|im_end|>"),
    "<|im_start|>",
    ("<|im_end|>",),
)

FAMILIES = {
    "qwen3": QWEN3,
    "qwen3.5": QWEN35,
    "llama3.1": LLAMA31,
    "gemma3": GEMMA3,
    "gpt-oss": GPT_OSS,
    "mistral": MISTRAL,
    "deepseek-v3": DEEPSEEK_V3,
    "phi4": PHI4,
    "smollm2": SMOLLM2,
}


def family_chat(family: Family, folder: Path, fast: bool = True) -> Chat:
    """The family's template on a small tokenizer: byte-level BPE in Rust, or bytes in Python (`fast` false)."""
    if fast:
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=420,
            special_tokens=list(family.specials),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        bpe.train_from_iterator([CORPUS], trainer)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=family.bos, eos_token=family.ends[0])
    else:
        # Not as this class makes an end token by itself: with the blanks around it swallowed.
        end = AddedToken(family.ends[0], lstrip=False, rstrip=False, special=True)
        tokenizer = ByT5Tokenizer(extra_ids=0, bos_token=family.bos, eos_token=end)
        tokenizer.add_tokens([AddedToken(name, special=True) for name in family.specials], special_tokens=True)
    tokenizer.chat_template = family.template
    tokenizer.save_pretrained(folder)
    ends = [tokenizer.convert_tokens_to_ids(end) for end in family.ends]
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": ends}))
    return open_chat(TargetRef("test", "local-0", folder, str(folder)))
