"""Drives the inventors' runtime in a process of its own: loads a draft folder, decodes prompts, prints what it did as JSON.

Its console module has our own package's name, so it lives in a folder of its own, which PYTHONPATH names here alone.
"""

import json
import sys
import time
from pathlib import Path

import torch
from dflash import model as runtime
from transformers import AutoModelForCausalLM


def main(request: dict) -> dict:
    torch.set_num_threads(1)
    # Its statistics synchronise a GPU; on a CPU a clock is the same.
    runtime._cuda_time = time.perf_counter
    target = AutoModelForCausalLM.from_pretrained(request["target"], dtype=torch.float32).eval()
    results = []
    for folder in request["drafts"]:
        kind = json.loads((Path(folder) / "config.json").read_text())["architectures"][0]
        draft, info = getattr(runtime, kind).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        draft.eval()
        decoded = []
        for prompt in request["prompts"]:
            output = runtime.dflash_generate(
                draft, target, torch.tensor([prompt]), request["max_new_tokens"], request["stop"], return_stats=True
            )
            tokens = output.output_ids[0, len(prompt) :].tolist()
            decoded.append({"tokens": tokens, "produced": output.acceptance_lengths})
        loading = {key: sorted(map(str, info[key])) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}
        results.append(
            {"kind": kind, "loading": loading, "inv_freq": draft.rotary_emb.inv_freq.tolist(), "decoded": decoded}
        )
    return {"results": results}


if __name__ == "__main__":
    json.dump(main(json.load(sys.stdin)), sys.stdout)
