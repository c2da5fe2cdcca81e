"""The draft: a short Qwen3-like trunk over blocks of MASK slots, conditioned on hidden states of the frozen target.

T packed tokens, L captured layers, H hidden, N blocks, B block size, K key-value heads, D head size.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from draft.attention import Attend, Layout, Pair, layout_of
from draft.blocks import Blocks
from draft.convolution import BlockConvolution
from draft.flex import flex_attention_of
from draft.linear import linear
from draft.norm import RMSNorm
from draft.rotary import Rotary, rotate
from draft.selector import CandidateSelector
from draft.split import split_attention
from schemas.draft import DraftConfig
from schemas.errors import DraftError

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_pytorch_tanh": lambda states: nn.functional.gelu(states, approximate="tanh"),
    "relu": nn.functional.relu,
}


class ContextStates(NamedTuple):
    """Projected and normed states [T, H] of context rows, and their rotary angles: what a layer makes its keys and values of."""

    states_TH: Tensor
    angles: Pair


class Attention(nn.Module):
    """The projections of grouped-query attention, with per-head norms of queries and keys; the scores are `attend`'s."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = linear(config.hidden_size, query_size)
        self.k_proj = linear(config.hidden_size, key_size)
        self.v_proj = linear(config.hidden_size, key_size)
        self.o_proj = linear(query_size, config.hidden_size)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def key_value(self, states: Tensor, angles: Pair) -> Pair:
        """Keys (normed, rotated) and values, each [..., K, D], of states [..., H]."""
        key, value = (layer(states).unflatten(-1, (-1, self.head_dim)) for layer in (self.k_proj, self.v_proj))
        return rotate(self.k_norm(key), *angles), value

    def query(self, states: Tensor, angles: Pair) -> Tensor:
        """Queries (normed, rotated) [..., A, D] of states [..., H]."""
        return rotate(self.q_norm(self.q_proj(states).unflatten(-1, (-1, self.head_dim))), *angles)


class MLP(nn.Module):
    """The gated feed-forward sublayer."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = linear(config.hidden_size, config.intermediate_size)
        self.up_proj = linear(config.hidden_size, config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, config.hidden_size)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, states: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        output: Tensor = self.down_proj(self.activation(self.gate_proj(states)) * self.up_proj(states))
        return output


class Layer(nn.Module):
    """Attention and MLP, each after a norm and, in DFlash 2, between the two sides of a convolution."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        own = config.dflash_config
        self.attention_conv: BlockConvolution | None = None
        self.mlp_conv: BlockConvolution | None = None
        if own.conv_kernel_size is not None and own.conv_group_size is not None:
            self.attention_conv = BlockConvolution(config.hidden_size, own.conv_kernel_size, own.conv_group_size)
            self.mlp_conv = BlockConvolution(config.hidden_size, own.conv_kernel_size, own.conv_group_size)

    def forward(
        self, states_NBH: Tensor, angles: Pair, context: Pair | ContextStates, attend: Attend, halves: "Halves"
    ) -> Tensor:
        """[N, B, H] -> [N, B, H], residuals included."""
        inputs, after = halves.before(self, states_NBH, angles, context)
        return halves.after(self, states_NBH, attend(*inputs), after)


class Halves(NamedTuple):
    """What a layer computes before and after its scores: `before_attention` and `after_attention`, or the same compiled."""

    before: Callable[[Layer, Tensor, Pair, Pair | ContextStates], tuple[tuple[Tensor, Pair, Pair], Tensor | None]]
    after: Callable[[Layer, Tensor, Tensor, Tensor | None], Tensor]


def before_attention(
    layer: Layer, states_NBH: Tensor, angles: Pair, context: Pair | ContextStates
) -> tuple[tuple[Tensor, Pair, Pair], Tensor | None]:
    """What the scores are made of (query, own keys and values, the context's), and what the convolution after them needs."""
    attention = layer.self_attn
    if isinstance(context, ContextStates):
        context = attention.key_value(*context)
    normed_NBH, after = _enter(layer.attention_conv, layer.input_layernorm(states_NBH))
    return (attention.query(normed_NBH, angles), attention.key_value(normed_NBH, angles), context), after


def after_attention(layer: Layer, states_NBH: Tensor, attended: Tensor, after: Tensor | None) -> Tensor:
    """The layer's output [N, B, H], of its input and of what attention gave [N, B, A * D]."""
    states_NBH = states_NBH + _leave(layer.attention_conv, layer.self_attn.o_proj(attended), after)
    normed_NBH, after = _enter(layer.mlp_conv, layer.post_attention_layernorm(states_NBH))
    return states_NBH + _leave(layer.mlp_conv, layer.mlp(normed_NBH), after)


def _enter(convolution: BlockConvolution | None, normed_NBH: Tensor) -> tuple[Tensor, Tensor | None]:
    """A sublayer's input, and the deltas of the convolution of its output."""
    if convolution is None:
        return normed_NBH, None
    before, after = convolution.deltas(normed_NBH)
    return convolution.convolve(normed_NBH, before, 0), after


def _leave(convolution: BlockConvolution | None, output_NBH: Tensor, after: Tensor | None) -> Tensor:
    return output_NBH if convolution is None or after is None else convolution.convolve(output_NBH, after, 1)


EAGER = Halves(before_attention, after_attention)


class Draft(nn.Module):
    """The whole draft. Its state dict has exactly the keys of the published layout (docs/design.md, section 5).

    `attention` says how scores are computed, not what they are: by the exact split, or by flex attention's kernel on CUDA; `halves`
    how the layers compute the rest.
    """

    attention: Literal["split", "flex"]
    halves: Halves

    def __init__(self, config: DraftConfig) -> None:
        """Parameters are not initialised: `new_draft` draws them, `draft.files.load_draft` reads them."""
        super().__init__()
        self.attention, self.halves = "split", EAGER
        if config.hidden_act not in ACTIVATIONS:
            raise DraftError(
                f"hidden_act {config.hidden_act!r} is not one of {', '.join(ACTIVATIONS)}: choose another target"
            )
        self.config = config
        own = config.dflash_config
        self.fc = linear(len(own.target_layer_ids) * config.hidden_size, config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.candidate_selector: CandidateSelector | None = None
        if own.selector_rank is not None and own.selector_top_k is not None:
            self.candidate_selector = CandidateSelector(
                config.vocab_size, config.hidden_size, own.selector_rank, own.selector_top_k
            )
        self.rotary = Rotary(config)

    def forward(self, hidden_TLH: Tensor, lengths: Sequence[int], embeds_NBH: Tensor, blocks: Blocks) -> Tensor:
        """Hidden states [N, B, H] after the final norm, of blocks over packed samples.

        `hidden_TLH` are the target's states of the config's layers, ascending; `embeds_NBH` the embeddings of each block's input
        tokens. A block sees the rows of its own sample strictly before its anchor, and itself.
        """
        # A layer makes its own keys and values here: its weights may be in one place only while it runs (FSDP).
        context = self._context_states(hidden_TLH, _positions(hidden_TLH, lengths))
        return self.over_context(embeds_NBH, [context] * len(self.layers), layout_of(lengths, blocks))

    def context_of(self, hidden_TLH: Tensor, lengths: Sequence[int]) -> list[Pair]:
        """`context_kv` of packed samples, whose positions count from each sample's first row."""
        return self.context_kv(hidden_TLH, _positions(hidden_TLH, lengths))

    def context_kv(self, hidden_TLH: Tensor, position_T: Tensor) -> list[Pair]:
        """Every layer's keys and values [T, K, D] of context rows at the given positions within their samples."""
        context = self._context_states(hidden_TLH, position_T)
        return [layer.self_attn.key_value(*context) for layer in self._trunk()]

    def _context_states(self, hidden_TLH: Tensor, position_T: Tensor) -> ContextStates:
        states_TH = self.hidden_norm(self.fc(hidden_TLH.flatten(1).to(self.fc.weight.dtype)))
        return ContextStates(states_TH, self.rotary.angles(position_T))

    def over_context(self, embeds_NBH: Tensor, context: Sequence[Pair | ContextStates], layout: Layout) -> Tensor:
        """The trunk over blocks whose context is already keys and values: what training and decoding share."""
        slot_B = torch.arange(layout.block_size, device=embeds_NBH.device)
        angles = self.rotary.angles(layout.relative_N[:, None] + slot_B)
        states_NBH = embeds_NBH.to(self.fc.weight.dtype)
        attends = {window: self._attend(layout, window) for window in set(self.config.windows)}
        for layer, window, pair in zip(self.layers, self.config.windows, context, strict=True):
            states_NBH = layer(states_NBH, angles, pair, attends[window], self.halves)
        output: Tensor = self.norm(states_NBH)
        return output

    def _attend(self, layout: Layout, window: int | None) -> Attend:
        causal = self.config.is_causal
        # A block whose context is all there is (decoding) has nothing to skip.
        if self.attention == "flex" and not layout.whole:
            return flex_attention_of(layout, window, causal)
        return split_attention(layout, window, self.config.num_attention_heads, causal)

    def _trunk(self) -> Iterator[Layer]:
        for layer in self.layers:
            assert isinstance(layer, Layer)
            yield layer


def _positions(hidden_TLH: Tensor, lengths: Sequence[int]) -> Tensor:
    return torch.cat([torch.arange(length, device=hidden_TLH.device) for length in lengths])


def new_draft(config: DraftConfig, generator: torch.Generator) -> Draft:
    """A fresh float32 draft on the CPU: weights normal with the config's `initializer_range` as deviation, norms 1.

    The convolutions start as the identity (tap 0 is 1, the projection 0), the selector as a no-op (the successor's codebook 0).
    """
    draft = Draft(config)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, config.initializer_range, generator=generator)
            if name.endswith("base_kernel"):
                parameter.zero_()[:, 0] = 1.0
            elif name.endswith(("kernel_projection.weight", "successor_codebook")):
                parameter.zero_()
    return draft


def cast(draft: Draft, device: torch.device | str, dtype: torch.dtype) -> Draft:
    """Move a draft, in place, and give its weights a type; the norms' stay float32."""
    for module in draft.modules():
        kind = torch.float32 if isinstance(module, RMSNorm) else dtype
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(device, kind)
    return draft
