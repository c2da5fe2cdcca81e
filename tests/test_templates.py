"""The templates of well-known families: which tokens are supervised, by hand.

In an expected sample the target's own text stands in ⟦ ⟧.
"""

import re

import pytest
from conversation_fixtures import CHAT, NOTHING, THINKING, E, chat_of, samples
from template_fixtures import FAMILIES, SMOLLM2, Family

from capture.replies import answer_message
from target.chat import Chat, encode_texts

TAGGED = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "<think>\neasy\n</think>\n\n4"},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": "<think>\nalso\n</think>\n\n6"},
]
# Arguments as OpenAI writes them: a text of JSON.
TOOLS = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "abcdef123", "type": "function", "function": {"name": "get", "arguments": '{"city":"Rome"}'}}
        ],
    },
    {"role": "tool", "name": "get", "tool_call_id": "abcdef123", "content": "sunny"},
    {"role": "assistant", "content": "Sunny."},
]
TOOL = {"type": "function", "function": {"name": "get", "description": "Weather of a city"}}
TOOL_TEXT = '{"type": "function", "function": {"name": "get", "description": "Weather of a city"}}'

S, U, A = "<|im_start|>system\n", "<|im_start|>user\n", "<|im_start|>assistant\n"
QWEN_TOOLS = f"{S}# Tools\n{TOOL_TEXT}\n{E}\n{U}Weather?{E}\n"
QWEN_CALL = '<tool_call>\n{"name": "get", "arguments": {"city": "Rome"}}\n</tool_call>'
LH = "<|start_header_id|>{}<|end_header_id|>\n\n"
LLAMA = f"<|begin_of_text|>{LH.format('system')}Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
OSS = "<|start|>system<|message|>You are ChatGPT.\nCurrent date: 2024-07-26<|end|>"
OSS_ASK, FINAL = "<|start|>user<|message|>{}<|end|><|start|>assistant", "<|channel|>final<|message|>"
DS, DSE = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"

EXPECTED = {
    ("qwen3", "chat"): [
        f"{S}Be brief.{E}\n{U}Hi{E}\n{A}{NOTHING}⟦Hello{E}⟧",
        f"{S}Be brief.{E}\n{U}Hi{E}\n{A}Hello{E}\n{U}More?{E}\n{A}{NOTHING}⟦Yes{E}⟧",
    ],
    ("qwen3", "thinking"): [
        f"{U}2+2?{E}\n{A}⟦<think>\neasy\n</think>\n\n4{E}⟧",
        f"{U}2+2?{E}\n{A}4{E}\n{U}3+3?{E}\n{A}⟦<think>\nalso\n</think>\n\n6{E}⟧",
    ],
    ("qwen3", "tools"): [
        f"{QWEN_TOOLS}{A}{NOTHING}⟦{QWEN_CALL}{E}⟧",
        f"{QWEN_TOOLS}{A}{QWEN_CALL}{E}\n{U}<tool_response>\nsunny\n</tool_response>{E}\n{A}{NOTHING}⟦Sunny.{E}⟧",
    ],
    ("qwen3.5", "chat"): [
        f"{S}Be brief.{E}\n{U}Hi{E}\n{A}{NOTHING}⟦Hello{E}⟧",
        f"{S}Be brief.{E}\n{U}Hi{E}\n{A}Hello{E}\n{U}More?{E}\n{A}{NOTHING}⟦Yes{E}⟧",
    ],
    ("qwen3.5", "thinking"): [
        f"{U}2+2?{E}\n{A}<think>\n⟦easy\n</think>\n\n4{E}⟧",
        f"{U}2+2?{E}\n{A}4{E}\n{U}3+3?{E}\n{A}<think>\n⟦also\n</think>\n\n6{E}⟧",
    ],
    ("llama3.1", "chat"): [
        f"{LLAMA}Be brief.<|eot_id|>{LH.format('user')}Hi<|eot_id|>{LH.format('assistant')}⟦Hello<|eot_id|>⟧"
        f"{LH.format('user')}More?<|eot_id|>{LH.format('assistant')}⟦Yes<|eot_id|>⟧",
    ],
    ("llama3.1", "tools"): [
        f"{LLAMA}<|eot_id|>{LH.format('user')}Weather?<|eot_id|>{LH.format('assistant')}"
        '⟦{"name": "get", "parameters": {"city": "Rome"}}<|eom_id|>⟧'
        f'{LH.format("ipython")}"sunny"<|eot_id|>{LH.format("assistant")}⟦Sunny.<|eot_id|>⟧',
    ],
    ("gemma3", "chat"): [
        "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n⟦Hello<end_of_turn>⟧\n"
        "<start_of_turn>user\nMore?<end_of_turn>\n<start_of_turn>model\n⟦Yes<end_of_turn>⟧",
    ],
    ("gpt-oss", "chat"): [
        f"{OSS}<|start|>developer<|message|>Be brief.<|end|>{OSS_ASK.format('Hi')}⟦{FINAL}Hello<|return|>⟧",
        f"{OSS}<|start|>developer<|message|>Be brief.<|end|>{OSS_ASK.format('Hi')}{FINAL}Hello<|end|>"
        f"{OSS_ASK.format('More?')}⟦{FINAL}Yes<|return|>⟧",
    ],
    ("gpt-oss", "thinking"): [
        f"{OSS}{OSS_ASK.format('2+2?')}⟦<|channel|>analysis<|message|>easy<|end|><|start|>assistant{FINAL}4<|return|>⟧",
        f"{OSS}{OSS_ASK.format('2+2?')}{FINAL}4<|end|>"
        f"{OSS_ASK.format('3+3?')}⟦<|channel|>analysis<|message|>also<|end|><|start|>assistant{FINAL}6<|return|>⟧",
    ],
    ("gpt-oss", "tools"): [
        f"{OSS}{OSS_ASK.format('Weather?')}"
        '⟦ to=functions.get<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>⟧'
        f"<|start|>functions.get to=assistant<|channel|>commentary<|message|>sunny<|end|><|start|>assistant"
        f"⟦{FINAL}Sunny.<|return|>⟧",
    ],
    ("mistral", "chat"): [
        "<s>[INST] Be brief.\n\nHi[/INST]⟦ Hello</s>⟧",
        "<s>[INST] Hi[/INST] Hello</s>[INST] Be brief.\n\nMore?[/INST]⟦ Yes</s>⟧",
    ],
    ("mistral", "tools"): [
        f"<s>[AVAILABLE_TOOLS] [{TOOL_TEXT}][/AVAILABLE_TOOLS][INST] Weather?[/INST]"
        '⟦[TOOL_CALLS] [{"name": "get", "arguments": {"city": "Rome"}}]</s>⟧[TOOL_RESULTS] "sunny"[/TOOL_RESULTS]'
        "⟦ Sunny.</s>⟧",
    ],
    ("deepseek-v3", "chat"): [
        f"{DS}Be brief.<｜User｜>Hi<｜Assistant｜>⟦Hello{DSE}⟧<｜User｜>More?<｜Assistant｜>⟦Yes{DSE}⟧",
    ],
    ("deepseek-v3", "thinking"): [
        f"{DS}<｜User｜>2+2?<｜Assistant｜>⟦<think>\neasy\n</think>\n\n4{DSE}⟧",
        f"{DS}<｜User｜>2+2?<｜Assistant｜>4{DSE}<｜User｜>3+3?<｜Assistant｜>⟦<think>\nalso\n</think>\n\n6{DSE}⟧",
    ],
    ("deepseek-v3", "tools"): [
        f"{DS}<｜User｜>Weather?<｜Assistant｜>"
        f'⟦<｜tool▁calls▁begin｜>get\n{{"city": "Rome"}}<｜tool▁calls▁end｜>{DSE}⟧'
        f"<｜tool▁outputs▁begin｜>sunny<｜tool▁outputs▁end｜><｜Assistant｜>⟦Sunny.{DSE}⟧",
    ],
    ("phi4", "chat"): [
        f"<|im_start|>system<|im_sep|>Be brief.{E}<|im_start|>user<|im_sep|>Hi{E}<|im_start|>assistant<|im_sep|>⟦Hello{E}⟧"
        f"<|im_start|>user<|im_sep|>More?{E}<|im_start|>assistant<|im_sep|>⟦Yes{E}⟧",
    ],
    ("smollm2", "chat"): [f"{S}Be brief.{E}\n{U}Hi{E}\n{A}⟦Hello{E}⟧\n{U}More?{E}\n{A}⟦Yes{E}⟧"],
    ("smollm2", "bare"): [f"{S}You are a helpful assistant.{E}\n{U}Hi{E}\n{A}⟦Hello{E}⟧\n{U}More?{E}\n{A}⟦Yes{E}⟧"],
}
ROWS = {
    "chat": {"messages": CHAT},
    "bare": {"messages": CHAT[1:]},
    "thinking": {"messages": THINKING},
    "tools": {"messages": TOOLS, "tools": [TOOL]},
}


def expected_tokens(chat: Chat, marked: str) -> tuple[list[int], list[int]]:
    ids, mask = [], []
    for piece in re.split("(⟦[^⟧]*⟧)", marked):
        tokens = encode_texts(chat.tokenizer, [piece.strip("⟦⟧")])[0] if piece else []
        ids += tokens
        mask += [int(piece.startswith("⟦"))] * len(tokens)
    return ids, mask


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])
@pytest.mark.parametrize(("name", "kind"), EXPECTED)
def test_supervised_is_what_is_marked_by_hand(name, kind, fast):
    chat = chat_of(FAMILIES[name], fast)
    assert chat.tokenizer.is_fast == fast
    found = samples(chat, ROWS[kind])
    shown = [marked(chat, sample) for sample in found]
    assert shown == EXPECTED[name, kind]
    for sample, wanted in zip(found, EXPECTED[name, kind], strict=True):
        ids, mask = expected_tokens(chat, wanted)
        assert sample.input_ids.tolist() == ids
        assert sample.loss_mask.tolist() == mask
    assert len({sample.split for sample in found}) == 1, "all turns of a conversation on one side of the split"


def marked(chat: Chat, sample) -> str:
    text, ids, mask = "", sample.input_ids.tolist(), sample.loss_mask.tolist()
    start = 0
    while start < len(ids):
        stop = next((i for i in range(start, len(ids)) if mask[i] != mask[start]), len(ids))
        piece = chat.tokenizer.decode(ids[start:stop], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        text += f"⟦{piece}⟧" if mask[start] else piece
        start = stop
    return text


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "deepseek-v3"])
def test_thinking_in_the_content_is_thinking(name):
    chat = chat_of(FAMILIES[name])
    found = [marked(chat, sample) for sample in samples(chat, {"messages": TAGGED})]
    assert found == EXPECTED[name, "thinking"]


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "gpt-oss", "deepseek-v3"])
def test_thinking_is_masked_where_asked(name):
    chat = chat_of(FAMILIES[name])
    kept, masked = (samples(chat, {"messages": THINKING}, reasoning=how) for how in ("keep", "mask"))
    for whole, part, answer in zip(kept, masked, "46", strict=True):
        assert part.input_ids.tolist() == whole.input_ids.tolist()
        assert part.split == whole.split
        (own,) = re.findall("⟦([^⟧]*)⟧", marked(chat, part))
        assert "easy" not in own and "also" not in own
        head = f"<|start|>assistant{FINAL}" if name == "gpt-oss" else ""
        end = {"gpt-oss": "<|return|>", "deepseek-v3": DSE}.get(name, E)
        assert own == f"{head}{answer}{end}"


def test_an_answer_in_channels_is_a_message_that_renders_to_its_ids():
    chat = chat_of(FAMILIES["gpt-oss"])
    said = f"<|channel|>analysis<|message|>easy<|end|><|start|>assistant{FINAL}4<|return|>"
    ids = encode_texts(chat.tokenizer, [said])[0]
    message = answer_message(chat, ids)
    assert message == {"role": "assistant", "content": "4", "reasoning_content": "easy"}
    (sample,) = samples(chat, {"messages": [{"role": "user", "content": "2+2?"}, message]})
    assert sample.input_ids[sample.loss_mask.astype(bool)].tolist() == ids
    cut = answer_message(chat, encode_texts(chat.tokenizer, ["<|channel|>analysis<|message|>well, two and"])[0])
    assert cut == {"role": "assistant", "content": "", "reasoning_content": "well, two and"}
    quick = answer_message(chat, encode_texts(chat.tokenizer, [f"{FINAL}4<|return|>"])[0])
    assert quick == {"role": "assistant", "content": "4"}


def test_an_answer_cut_while_thinking_is_all_thinking():
    row = {
        "messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "<think>\nwell, two and"}],
        "finished": False,
    }
    chat = chat_of(FAMILIES["deepseek-v3"])
    assert samples(chat, row, reasoning="mask") == ()
    assert marked(chat, samples(chat, row)[0]).endswith("⟦<think>\nwell, two and⟧")


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])
def test_generation_marks_change_nothing(fast):
    plain = "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    marks = (
        "{{- '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{- m.content + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{- m.content + '<|im_end|>' }}{% endif %}{{- '\\n' }}"
    )
    assert plain in SMOLLM2.template
    template = SMOLLM2.template.replace(plain, marks)
    chat = chat_of(Family(template, SMOLLM2.specials, SMOLLM2.bos, SMOLLM2.ends), fast)
    (sample,) = samples(chat, ROWS["chat"])
    assert [marked(chat, sample)] == EXPECTED["smollm2", "chat"]
    if fast:  # transformers' own mask, which only fast tokenizers have
        theirs = chat.tokenizer.apply_chat_template(
            CHAT, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        count = len(sample.input_ids)
        assert theirs["input_ids"][:count] == sample.input_ids.tolist()
        assert theirs["assistant_masks"][:count] == sample.loss_mask.tolist()
