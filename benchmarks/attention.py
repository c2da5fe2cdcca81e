"""Block attention there and back, of a straightforward one, as ratios in the same run.

    python benchmarks/attention.py [--rounds 3]

9 heads, 3 of keys and values, of 64; blocks of 16; bfloat16, as training computes where it is asked to. The straightforward one
cuts each sample out of the pack, masks its scores over the whole context, and leaves the way back to autograd, for which every cut
is a gradient of the size of the whole pack.
"""

import argparse
import time

import torch
from torch import Tensor

from draft.attention import Attend, Layout, Pair
from draft.split import split_attention

HEADS, KV_HEADS, WIDTH, BLOCK = 9, 3, 64, 16
# Samples, tokens of each, blocks of each.
PACKS = ((66, 120, 16), (8, 1024, 64), (2, 2048, 128))


def straightforward(layout: Layout) -> Attend:
    """Attention sample by sample."""

    def attend(query: Tensor, own: Pair, context: Pair) -> Tensor:
        outputs, first = [], 0
        for start, tokens, count in zip(layout.starts, layout.tokens, layout.blocks, strict=True):
            blocks, rows = slice(first, first + count), slice(start, start + tokens)
            first += count
            query_KnRD = (query[blocks] * WIDTH**-0.5).view(count, BLOCK, KV_HEADS, -1, WIDTH).permute(2, 0, 1, 3, 4)
            query_KnRD = query_KnRD.reshape(KV_HEADS, count, -1, WIDTH)
            own_key, own_value = (part[blocks].permute(2, 0, 1, 3) for part in own)
            key, value = (part[rows].transpose(0, 1)[:, None] for part in context)
            hidden_nS = torch.arange(tokens) >= layout.relative_N[blocks, None]
            scores = (query_KnRD @ key.mT).masked_fill(hidden_nS[:, None], -torch.inf)
            scores = torch.cat([scores, query_KnRD @ own_key.mT], -1)
            weights = scores.softmax(-1, torch.float32).to(own_value.dtype)
            output_KnRD = weights[..., :tokens] @ value + weights[..., tokens:] @ own_value
            outputs.append(output_KnRD.view(KV_HEADS, count, BLOCK, -1, WIDTH).permute(1, 2, 0, 3, 4))
        return torch.cat(outputs).reshape(len(query), BLOCK, -1)

    return attend


def main() -> None:
    """Print both ways' seconds and their ratio, for packs of short and of long samples."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    generator = torch.Generator().manual_seed(0)
    for samples, tokens, each in PACKS:
        count = samples * each
        anchor_N = torch.randint(1, tokens, (samples, each), generator=generator).sort(1).values.flatten()
        layout = Layout((each,) * samples, (tokens,) * samples, anchor_N, BLOCK)
        shapes = [
            (count, BLOCK, HEADS, WIDTH),
            *[(count, BLOCK, KV_HEADS, WIDTH)] * 2,
            *[(samples * tokens, KV_HEADS, WIDTH)] * 2,
        ]
        inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
        ways = {"straightforward": straightforward(layout), "split": split_attention(layout, None, HEADS)}
        best, found = dict.fromkeys(ways, float("inf")), dict[str, list[Tensor]]()
        for _ in range(rounds):
            for name, attend in ways.items():
                started = time.perf_counter()
                query, own_key, own_value, key, value = inputs
                with torch.autocast("cpu", torch.bfloat16):
                    output = attend(query, (own_key, own_value), (key, value))
                found[name] = list(torch.autograd.grad(output.float().square().sum(), inputs))
                best[name] = min(best[name], time.perf_counter() - started)
        for one, other in zip(*found.values(), strict=True):
            assert (one - other).norm() < 0.03 * one.norm()
        print(
            f"{samples} samples of {tokens} tokens, {each} blocks each: "
            + ", ".join(f"{n} {s:.2f} s" for n, s in best.items())
        )
        print(f"  split / straightforward {best['split'] / best['straightforward']:.2f}")


if __name__ == "__main__":
    main()
