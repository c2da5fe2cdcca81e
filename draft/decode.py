"""Greedy speculative decoding against the real target, and plain greedy decoding with the same calls, to compare it with.

T tokens, L captured layers, H hidden, B block size, K key-value heads, D head size.
"""

import inspect
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from cache.codecs import HiddenCodec
from cache.head import TargetHead
from draft.attention import Layout, Pair
from draft.model import Draft, cast
from draft.propose import propose
from draft.walk import figure_of
from schemas.errors import DraftError
from schemas.say import Say, Silent
from target.layers import tap_layers
from target.load import Target


@dataclass(frozen=True)
class Decoded:
    """One answer. `accepted` has an entry per block: drafted tokens that are part of the answer. `forwards` are the target's."""

    tokens: list[int]
    accepted: list[int]
    forwards: int


class DraftContext:
    """Keys and values of the draft's context, grown in place: a block of decoding adds a few rows to thousands."""

    def __init__(self, draft: Draft, capacity: int) -> None:
        self.draft, self.length = draft, 0
        weight = draft.fc.weight
        shape = (capacity, draft.config.num_key_value_heads, draft.config.head_dim)
        self._pairs = [tuple(weight.new_empty(shape) for _ in range(2)) for _ in draft.layers]

    def extend(self, hidden_TLH: Tensor) -> None:
        """Add the states of the next T tokens."""
        start, self.length = self.length, self.length + hidden_TLH.shape[0]
        position_T = torch.arange(start, self.length, device=hidden_TLH.device)
        for stored, fresh in zip(self._pairs, self.draft.context_kv(hidden_TLH, position_T), strict=True):
            for buffer, rows in zip(stored, fresh, strict=True):
                buffer[start : self.length] = rows

    def block(self, embeds_BH: Tensor) -> Tensor:
        """States [1, B, H] of the block whose anchor comes right after the context."""
        size = self.length
        layout = Layout((1,), (size,), torch.tensor([size], device=embeds_BH.device), len(embeds_BH), whole=True)
        pairs: list[Pair] = [(key[:size], value[:size]) for key, value in self._pairs]
        return self.draft.over_context(embeds_BH[None], pairs, layout)


@torch.inference_mode()
def decode_plain(target: Target, prompt: Sequence[int], max_new_tokens: int, eos: Collection[int]) -> Decoded:
    """The target's own greedy answer, one token a forward, up to and with the first end token."""
    cached = _with_cache(target, DynamicCache(config=target.config))
    step = torch.tensor([list(prompt)], device=target.device)
    tokens: list[int] = []
    while not _ended(tokens, max_new_tokens, eos):
        logits = target.model(input_ids=step, **cached, logits_to_keep=1).logits
        step = logits[:, -1:].argmax(-1)
        tokens.append(int(step))
    return Decoded(tokens, [], len(tokens))


@torch.inference_mode()
def decode_speculative(
    draft: Draft,
    target: Target,
    head: TargetHead,
    prompt: Sequence[int],
    max_new_tokens: int,
    eos: Collection[int],
    codec: HiddenCodec | None = None,
) -> Decoded:
    """The same answer by blocks: the draft proposes B - 1 tokens after the verified one, the target checks them in one forward.

    A block is never shrunk. Drafted tokens behind the answer's end (an end token, `max_new_tokens`) do not count as accepted.
    With `codec` the target's states reach the draft as a cache of that codec would give them.
    """
    own, size = draft.config.dflash_config, draft.config.block_size
    cache = DynamicCache(config=target.config)
    cache.activate_past_recording()
    cached = _with_cache(target, cache)
    context = DraftContext(draft, len(prompt) + max_new_tokens + size)
    masks = head.embed(torch.full((size - 1,), own.mask_token_id, device=target.device))
    accepted: list[int] = []
    with tap_layers(target.layers, own.target_layer_ids) as states:

        def see(rows: int) -> None:
            hidden_TLH = torch.stack([states[layer][0, :rows] for layer in own.target_layer_ids], 1)
            context.extend(hidden_TLH if codec is None else codec.roundtrip(hidden_TLH, own.target_layer_ids))

        step = torch.tensor([list(prompt)], device=target.device)
        logits = target.model(input_ids=step, **cached, logits_to_keep=1).logits
        see(len(prompt))
        verified = logits[0, -1:].argmax(-1)
        tokens = [int(verified)]
        while not _ended(tokens, max_new_tokens, eos):
            hidden_1BH = context.block(torch.cat([head.embed(verified), masks]))
            drafted = propose(draft, head.logits, hidden_1BH, verified).token[0]
            block = torch.cat([verified, drafted])
            checked = target.model(input_ids=block[None], **cached).logits[0].argmax(-1)
            matches = int((drafted == checked[:-1]).int().cumprod(0).sum())
            fresh = _until_end([*drafted[:matches].tolist(), int(checked[matches])], max_new_tokens - len(tokens), eos)
            accepted.append(min(matches, len(fresh)))
            tokens.extend(fresh)
            cache.crop(matches + 1 - size)
            see(matches + 1)
            verified = checked[matches : matches + 1]
    return Decoded(tokens, accepted, len(accepted) + 1)


def _with_cache(target: Target, cache: DynamicCache) -> dict[str, Any]:
    # The library renames the argument; models that bring their own code keep the old name.
    name = "cache" if "cache" in inspect.signature(target.model.forward).parameters else "past_key_values"
    return {name: cache, "use_cache": True}


def _ended(tokens: list[int], max_new_tokens: int, eos: Collection[int]) -> bool:
    return len(tokens) >= max_new_tokens or (bool(tokens) and tokens[-1] in eos)


def _until_end(tokens: list[int], room: int, eos: Collection[int]) -> list[int]:
    ends = [index + 1 for index, token in enumerate(tokens) if token in eos]
    return tokens[: min([room, *ends])]


def head_of(draft: Draft, target: Target) -> TargetHead:
    """The loaded target's embedding and head, with the scales that the draft's config repeats."""
    own = draft.config.dflash_config
    lm_head_VH = target.lm_head.weight
    assert isinstance(lm_head_VH, Tensor)
    return TargetHead(
        target.model.get_input_embeddings().weight,
        lm_head_VH,
        1.0 if own.input_embedding_scale is None else own.input_embedding_scale,
        1.0 if own.output_multiplier is None else own.output_multiplier,
        own.final_logit_softcapping,
    )


def decode_prompts(
    draft: Draft,
    target: Target,
    prompts: Sequence[tuple[str, Sequence[int]]],
    max_new_tokens: int,
    eos: Collection[int],
    *,
    codec: HiddenCodec | None = None,
    lengths: bool = False,
    say: Say | None = None,
) -> dict[str, Any]:
    """Decode every prompt both ways, up to the first id of `eos`, and compare.

    Returns `decoded` (accepted, blocks, acceptance), `lossless` {equal, prompts}, `speedup` (wall time of plain over speculative
    decoding, prompts' forwards included), `seconds`, `target_forwards` and, with `lengths`, `accepted_per_block`. The draft is
    moved to the target's device and type. Raises DraftError where there is no prompt.
    """
    if not prompts:
        raise DraftError("there is no prompt to decode: give some")
    say = say or Silent()
    cast(draft, target.device, target.dtype).eval()
    head = head_of(draft, target)
    # The first calls of a process pay for memory and kernels, whichever way they decode.
    decode_plain(target, prompts[0][1], min(8, max_new_tokens), eos)
    decode_speculative(draft, target, head, prompts[0][1], min(8, max_new_tokens), eos, codec)
    seconds, forwards, equal = [0.0, 0.0], [0, 0], 0
    accepted: list[list[int]] = []
    for index, (_, prompt) in enumerate(prompts):
        started = time.perf_counter()
        plain = decode_plain(target, prompt, max_new_tokens, eos)
        between = time.perf_counter()
        quick = decode_speculative(draft, target, head, prompt, max_new_tokens, eos, codec)
        # Decoding reads every token back, so no work of a device is still under way when a clock is read.
        seconds = [seconds[0] + between - started, seconds[1] + time.perf_counter() - between]
        forwards = [forwards[0] + plain.forwards, forwards[1] + quick.forwards]
        equal += plain.tokens == quick.tokens
        accepted.append(quick.accepted)
        say.progress("decoding", index + 1, len(prompts))
    result: dict[str, Any] = {
        "decoded": figure_of(accepted).to_json(),
        "lossless": {"equal": equal, "prompts": len(prompts)},
        "speedup": seconds[0] / seconds[1],
        "seconds": {"plain": seconds[0], "speculative": seconds[1]},
        "target_forwards": {"plain": forwards[0], "speculative": forwards[1]},
    }
    if lengths:
        result["accepted_per_block"] = {name: blocks for (name, _), blocks in zip(prompts, accepted, strict=True)}
    return result
