"""Speculative decoding: the target's own answer, token for token, and the blocks that the walk over that answer foretells."""

import copy
from typing import Any

import pytest
import torch
from reference import MASK, lively_draft, random_samples, small_config
from torch import Tensor
from trained import EOS, NEW_TOKENS, answered_samples, answers, prompts, tiny_head, tiny_target, trained_draft
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from cache.codecs import HiddenCodec
from draft.accept import evaluate_samples
from draft.decode import DraftContext, decode_plain, decode_prompts, decode_speculative, head_of
from schemas.errors import DraftError
from target.load import Target

DRAFTS = [("dflash", None), ("dflash2", None), ("dflash2", 8)]


def test_plain_decoding_is_the_librarys_greedy_search() -> None:
    target = tiny_target()
    for (_, ids), answer in list(zip(prompts(), answers(), strict=True))[:3]:
        expected = target.model.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False)[0, len(ids) :]
        assert answer == expected.tolist()


@pytest.mark.parametrize(("kind", "window"), DRAFTS)
def test_the_walk_is_decoding_block_for_block(kind: str, window: int | None) -> None:
    draft, target = trained_draft(kind, window), tiny_target()
    names, samples = answered_samples()
    walk = evaluate_samples(draft, tiny_head(), [(names, samples)], lengths=True)
    found = decode_prompts(draft, target, prompts(), NEW_TOKENS, EOS, codec=HiddenCodec("f32"), lengths=True)
    assert found["lossless"] == {"equal": len(names), "prompts": len(names)}
    assert found["accepted_per_block"] == walk["accepted_per_block"]
    assert found["decoded"] == walk["walk"]
    lengths = {length for blocks in found["accepted_per_block"].values() for length in blocks}
    assert len(lengths) >= 4, f"accepted lengths {lengths} vary too little to prove anything"
    forwards = found["target_forwards"]
    assert forwards["plain"] == sum(map(len, answers()))
    assert forwards["speculative"] == found["decoded"]["blocks"] + len(names) < forwards["plain"]
    assert found["speedup"] == found["seconds"]["plain"] / found["seconds"]["speculative"] > 0


def test_an_answer_ends_at_the_end_token_or_at_the_limit() -> None:
    """Cut anywhere, the speculative answer is the plain one's beginning, and accepted tokens behind the end do not count."""
    draft, target, head = trained_draft("dflash2"), tiny_target(), tiny_head()
    (_, ids), answer = prompts()[1], answers()[1]
    for limit in range(1, 20):
        plain = decode_plain(target, ids, limit, EOS)
        quick = decode_speculative(draft, target, head, ids, limit, EOS)
        assert plain.tokens == quick.tokens == answer[:limit]
        assert sum(quick.accepted) + len(quick.accepted) >= len(quick.tokens) - 1
        assert sum(quick.accepted) <= len(quick.tokens) - 1
    stop = answer[9]
    cut = answer[: answer.index(stop) + 1]
    assert decode_speculative(draft, target, head, ids, NEW_TOKENS, (stop,)).tokens == cut
    assert decode_plain(target, ids, NEW_TOKENS, (stop,)).tokens == cut
    first = decode_speculative(draft, target, head, ids, NEW_TOKENS, (answer[0],))
    assert first.tokens == answer[:1] and first.accepted == [] and first.forwards == 1


def test_the_draft_sees_the_states_as_a_cache_of_the_codec_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    draft, target, (_, ids) = trained_draft("dflash2"), tiny_target(), prompts()[0]
    seen: list[Tensor] = []
    real = DraftContext.extend

    def watched(self: DraftContext, hidden_TLH: Tensor) -> None:
        seen.append(hidden_TLH)
        real(self, hidden_TLH)

    monkeypatch.setattr(DraftContext, "extend", watched)
    codecs: tuple[HiddenCodec | None, ...] = (None, HiddenCodec("f32"), HiddenCodec("bf16"))
    for codec in codecs:
        decode_speculative(draft, target, tiny_head(), ids, 1, EOS, codec)
    exact, same, coarse = seen
    assert exact.dtype == same.dtype == torch.float32 and torch.equal(same, exact)
    assert torch.equal(coarse.float(), exact.bfloat16().float()) and not torch.equal(coarse.float(), exact)


def test_the_codec_never_changes_the_answer() -> None:
    draft, target = trained_draft("dflash2"), tiny_target()
    exact = decode_prompts(draft, target, prompts()[:4], 24, EOS, lengths=True)
    coarse = decode_prompts(draft, target, prompts()[:4], 24, EOS, codec=HiddenCodec("bf16"), lengths=True)
    assert exact["lossless"] == coarse["lossless"] == {"equal": 4, "prompts": 4}
    assert (
        decode_prompts(draft, target, prompts()[:4], 24, EOS, codec=HiddenCodec("f32"), lengths=True)[
            "accepted_per_block"
        ]
        == exact["accepted_per_block"]
    )


@pytest.mark.parametrize("window", [None, 6])
@torch.no_grad()
def test_a_context_grown_in_steps_is_the_packed_forward(window: int | None) -> None:
    draft, samples = lively_draft(small_config("dflash2", window)), random_samples((20,))
    head = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    from draft.blocks import make_blocks

    context, grown = DraftContext(draft, 24), 0
    for step in (5, 1, 4, 8):
        context.extend(samples.hidden_TLH[grown : grown + step])
        grown += step
        blocks = make_blocks(samples, torch.tensor([grown]), 4)
        expected = draft(samples.hidden_TLH, samples.lengths, head[None], blocks)
        assert (context.block(head) - expected).abs().max() < 1e-5


def sliding_target(window: int) -> Target:
    """A random target whose own attention slides, so that its cache must take back what it already dropped."""
    config = Qwen3Config(
        vocab_size=41,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        use_sliding_window=True,
        sliding_window=window,
        max_window_layers=3,
        tie_word_embeddings=False,
        eos_token_id=None,
    )
    torch.manual_seed(11)
    model = Qwen3ForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(4.0)
    decoder = model.get_decoder()
    return Target(
        model, decoder, model.get_output_embeddings(), model.config, decoder.layers, torch.float32, torch.device("cpu")
    )


def test_a_target_with_a_sliding_window_stays_lossless() -> None:
    target, draft = sliding_target(8), lively_draft(small_config("dflash", target_layer_ids=[1, 3]))
    head = head_of(draft, target)
    ids = torch.randint(0, MASK, (14,), generator=torch.Generator().manual_seed(0)).tolist()
    plain = decode_plain(target, ids, 40, ())
    assert len(set(plain.tokens)) > 5, "the target repeats itself: the test shows little"
    assert decode_speculative(draft, target, head, ids, 40, ()).tokens == plain.tokens
    assert isinstance(DynamicCache(config=target.config).layers[5], type(DynamicCache(config=target.config).layers[3]))


def test_without_prompts_there_is_nothing_to_decode() -> None:
    with pytest.raises(DraftError, match="no prompt to decode"):
        decode_prompts(trained_draft("dflash"), tiny_target(), [], 4, EOS)


def test_the_draft_takes_the_targets_type() -> None:
    target = tiny_target()
    model: Any = copy.deepcopy(target.model).bfloat16()
    half = Target(
        model,
        model.get_decoder(),
        model.get_output_embeddings(),
        target.config,
        model.get_decoder().layers,
        torch.bfloat16,
        target.device,
    )
    found = decode_prompts(
        copy.deepcopy(trained_draft("dflash2")), half, prompts()[:2], 12, EOS, codec=HiddenCodec("bf16")
    )
    assert found["decoded"]["blocks"] > 0 and found["decoded"]["acceptance"] >= 1
