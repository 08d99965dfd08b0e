"""The decode step for capture in a CUDA graph: one token a row through a decoder with a preallocated cache.

No Python number changes from token to token, nothing is read back to the host, and every tensor that outlives a step
keeps its address. The weights are the model's own; only the operations between them are fused:

    plain   the model's modules one after the other, attention reading its cache up to the row's length
    few     norm, product, activation and residual in one launch: five launches a layer       (a few rows)
    many    bias and activation inside a product, residual and norm after it in one launch    (many rows)

``TorchOps`` defines what the kernels in ``kernels.decoding`` compute, and runs on every device.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import MultiHeadAttention
from ..attention.cache import ModelCache, StaticCache
from ..attention.mechanisms import Dot
from ..layers import FeedForward, LayerNorm, Learned, RMSNorm
from ..layers.feedforward import activation_function
from ..models import Block, Decoder, Model
from .cached_engine import step_obstacle
from .sampling import token_log_probs

Form = Literal["plain", "few", "many"]
MAX_FEW = 4  # rows up to which reading a weight once for each of them is faster than a matrix product

Norm = tuple[str, Tensor, Tensor | None, float]  # ("layer" or "rms", gain, shift, eps)


class DecodeState(NamedTuple):
    """What changes from step to step, on the device and at fixed addresses."""

    tokens: Tensor  # (R,) the token to read
    lengths: Tensor  # (R,) its position
    last: Tensor  # (R,) the last position of a row, where a finished row stays
    steps: Tensor  # (R,) tokens chosen so far
    history: Tensor  # (n, R) the tokens chosen
    log_probs: Tensor  # (n, R) of each, by the model alone

    @classmethod
    def empty(cls, rows: int, n_steps: int, device: torch.device) -> DecodeState:
        tokens, lengths, last, steps = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(4))
        history = torch.zeros(n_steps, rows, dtype=torch.int64, device=device)
        return cls(tokens, lengths, last, steps, history, torch.zeros(n_steps, rows, device=device))

    def begin(self, lengths: Tensor, last: Tensor) -> None:
        self.lengths.copy_(lengths)
        self.last.copy_(last)
        self.steps.zero_()

    def advance(self) -> None:
        self.lengths.copy_(torch.minimum(self.lengths + 1, self.last))

    def append(self, tokens: Tensor, log_probs: Tensor) -> None:
        """Write the chosen tokens into the history; the next step reads them."""
        self.history.scatter_(0, self.steps[None], tokens[None])
        self.log_probs.scatter_(0, self.steps[None], log_probs[None].to(self.log_probs.dtype))
        self.tokens.copy_(tokens)
        self.steps.add_(1)


class TorchOps:
    """The operations of a step in plain torch: the reference for the kernels, and what runs without them."""

    @staticmethod
    def attend_one(
        q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, scale: float
    ) -> Tensor:
        """Write k, v (R, G, D) at ``lengths``, then q (R, H, D) over k_cache, v_cache (R, G, S, D) → (R, H · D)."""
        index = lengths[:, None, None, None].expand(-1, *k.shape[1:2], 1, k.shape[2])
        k_cache.scatter_(2, index, k[:, :, None])
        v_cache.scatter_(2, index, v[:, :, None])
        visible = torch.arange(k_cache.shape[2], device=q.device) <= lengths[:, None]  # (R, S)
        gqa = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(
            q[:, :, None], k_cache, v_cache, attn_mask=visible[:, None, None], scale=scale, enable_gqa=gqa
        )
        return out.flatten(1)

    @staticmethod
    def linear(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        norm: Norm | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        y = F.linear(x if norm is None else apply_norm(x, norm), weight, bias)
        y = y if activation is None else activation_function(activation)(y)
        y = y if residual is None else residual + y
        return y if dtype is None else y.to(dtype)

    @staticmethod
    def product_is_faster(rows: int, dtype: torch.dtype, widths: set[int]) -> bool:
        """Whether ``product`` and ``product_in_parts`` are faster here than in torch."""
        return True

    @staticmethod
    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
        if x.is_cuda and activation == "gelu_tanh" and bias is not None:  # torch fuses this one
            return torch.ops.aten._addmm_activation(bias, x, weight.t(), use_gelu=True)
        y = F.linear(x, weight, bias)
        return y if activation is None else activation_function(activation)(y)

    @staticmethod
    def product_in_parts(x: Tensor, weight: Tensor) -> Tensor:
        """x Wᵀ as P partial sums (P, R, N); here P = 1."""
        return F.linear(x, weight)[None]

    @staticmethod
    def add_norm(x: Tensor, y: Tensor | None, bias: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        """x + y + bias and its norm, both (R, K), with y as partial sums (P, R, K) or None."""
        if y is not None:
            x = x + y.sum(0) if bias is None else x + (y.sum(0) + bias)
        return x, apply_norm(x, norm)

    @staticmethod
    def embed(
        tokens: Tensor, lengths: Tensor, table: Tensor, scale: float, positions: Tensor | None, offset: int = 0
    ) -> Tensor:
        x = F.embedding(tokens, table) * scale
        return x if positions is None else x + F.embedding(lengths + offset, positions)

    @staticmethod
    def store_greedy_tokens(
        logits: Tensor,
        tokens: Tensor,
        lengths: Tensor,
        last: Tensor,
        steps: Tensor,
        history: Tensor,
        log_probs: Tensor,
        advance: bool,
    ) -> None:
        state = DecodeState(tokens, lengths, last, steps, history, log_probs)
        chosen = logits.argmax(-1)
        state.append(chosen, token_log_probs(logits.float(), chosen))
        if advance:
            state.advance()


def apply_norm(x: Tensor, norm: Norm) -> Tensor:
    kind, gain, shift, eps = norm
    if kind == "layer":
        return F.layer_norm(x, gain.shape, gain, shift, eps)
    return F.rms_norm(x, gain.shape, gain, eps)


def ops_for(weight: Tensor) -> Any:
    """The kernels where they run, else plain torch; kernels sum in float32, so float64 models use torch."""
    if not weight.is_cuda or weight.dtype == torch.float64:
        return TorchOps
    try:
        from ..kernels import decoding
    except ImportError:  # CUDA without triton
        return TorchOps
    return decoding


class DecodeStep:
    """Logits (R, V) of what follows ``state.tokens``, which the step writes into the cache.

    It refers to the model's modules but not to the model, so that a weak dictionary keyed by model can hold it.
    """

    def __init__(
        self, model: Model, cache: ModelCache, state: DecodeState, form: Form | None = None, ops: Any = None
    ) -> None:
        if (obstacle := capture_obstacle(model)) is not None:
            raise ValueError(f"this model's step cannot be written out: {obstacle}")
        decoder = cast(Decoder, model)
        assert decoder.head is not None
        self.token, self.embeddings, self.head = decoder.token, decoder.embeddings, decoder.head
        self.norm, blocks = decoder.decoder.norm, blocks_of(decoder)
        self.state, self.ops = state, ops_for(decoder.token.weight) if ops is None else ops
        can_be_fused = can_fuse(decoder)
        if form not in (None, "plain") and not can_be_fused:
            raise ValueError(f"form={form!r} needs plain pre-norm layers; this model takes form='plain'")
        best: Form = "plain" if not can_be_fused else "few" if len(state.tokens) <= MAX_FEW else "many"
        self.form: Form = best if form is None else form
        self.cache: list[tuple[Tensor, Tensor]] = []  # keys and values of each layer, (R, G, S, D)
        for layer in cache.layers:
            if type(layer) is not StaticCache:
                raise ValueError(
                    f"a step written out needs a StaticCache for every layer, not a {type(layer).__name__}"
                )
            k, v = layer._slots.data
            self.cache.append((k, v))
        self.blocks = [blocks[number % len(blocks)] for number in range(len(self.cache))]
        widths = {linear.in_features for linear in decoder.decoder.modules() if isinstance(linear, nn.Linear)}
        faster = self.ops.product_is_faster(len(state.tokens), decoder.token.weight.dtype, widths)
        self.products = self.ops if faster else TorchOps

    def logits(self) -> Tensor:
        x = self._embed()  # (R, M)
        if self.form == "many":
            return self._many(x)
        for block, (k, v) in zip(self.blocks, self.cache, strict=True):
            x = self._few(x, block, k, v) if self.form == "few" else self._plain(x, block, k, v)
        if self.form == "few" and self.head.scale == 1.0 and self.head.cap is None:
            assert self.norm is not None
            weight, bias = self._output_weight(), self.head.bias
            return self.ops.linear(x, weight, bias, norm=norm_of(self.norm), dtype=torch.float32)
        return self.head(x if self.norm is None else self.norm(x), self.token.weight)

    def _embed(self) -> Tensor:
        tokens, lengths, part = self.state.tokens, self.state.lengths, self.embeddings
        position = part.position
        simple = part.norm is None and part.projection is None and part.segment is None
        if self.form == "plain" or not simple or not isinstance(position, Learned | None):
            return part(self.token(tokens[:, None]), lengths[:, None])[:, 0]
        weight, offset = (None, 0) if position is None else (position.weight, position.offset)
        return self.ops.embed(tokens, lengths, self.token.weight, self.token.scale, weight, offset)

    def _plain(self, x: Tensor, block: Block, k: Tensor, v: Tensor) -> Tensor:
        def attend(y: Tensor) -> Tensor:
            attention = attention_of(block)
            return attention.w_o(self._attend(attention, attention.w_qkv(y), k, v))

        return block.residuals().run(x, attend, None, block.ff)

    def _few(self, x: Tensor, block: Block, k: Tensor, v: Tensor) -> Tensor:
        attention, ff, linear = attention_of(block), ff_of(block), self.ops.linear
        y = linear(x, attention.w_qkv.weight, attention.w_qkv.bias, norm=norm_of(block.attention_norm))
        x = linear(self._attend(attention, y, k, v), attention.w_o.weight, attention.w_o.bias, residual=x)
        activation = None if ff.gated else ff.activation
        y = linear(x, ff.w_in.weight, ff.w_in.bias, norm=norm_of(block.ff_norm), activation=activation)
        return linear(apply_gate(ff, y), ff.w_out.weight, ff.w_out.bias, residual=x)

    def _many(self, x: Tensor) -> Tensor:
        assert self.norm is not None
        product, in_parts, add_norm = self.products.product, self.products.product_in_parts, self.ops.add_norm
        y, bias = None, None  # what the previous sublayer adds to x
        for block, (k, v) in zip(self.blocks, self.cache, strict=True):
            attention, ff = attention_of(block), ff_of(block)
            x, z = add_norm(x, y, bias, norm_of(block.attention_norm))
            z = self._attend(attention, product(z, attention.w_qkv.weight, attention.w_qkv.bias), k, v)
            y, bias = in_parts(z, attention.w_o.weight), attention.w_o.bias
            x, z = add_norm(x, y, bias, norm_of(block.ff_norm))
            z = apply_gate(ff, product(z, ff.w_in.weight, ff.w_in.bias, None if ff.gated else ff.activation))
            y, bias = in_parts(z, ff.w_out.weight), ff.w_out.bias
        _, z = add_norm(x, y, bias, norm_of(self.norm))
        return self.head.cap_logits(product(self.head.hidden(z), self._output_weight(), self.head.bias))

    def _output_weight(self) -> Tensor:
        return self.token.weight if self.head.weight is None else self.head.weight

    def _attend(self, attention: MultiHeadAttention, qkv: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """qkv (R, (H + 2G) · D) → (R, H · D)."""
        n_kv_heads, lengths = attention.n_kv_heads, self.state.lengths
        q, k, v = attention._heads(qkv[:, None], attention.n_heads, n_kv_heads, n_kv_heads)  # (R, heads, 1, D)
        q, k = attention._normalise_qk(q, k)
        if attention.rope is not None:
            q, k = attention.rope(q, lengths[:, None]), attention.rope(k, lengths[:, None])
        assert isinstance(attention.mechanism, Dot)
        scale = attention.mechanism.factor(attention.d_head)
        return self.ops.attend_one(q[:, :, 0], k[:, :, 0], v[:, :, 0], k_cache, v_cache, lengths, scale)


def attention_of(block: Block) -> MultiHeadAttention:
    assert isinstance(block.attention, MultiHeadAttention)
    return block.attention


def ff_of(block: Block) -> FeedForward:
    assert isinstance(block.ff, FeedForward)
    return block.ff


def norm_of(norm: nn.Module | None) -> Norm:
    if isinstance(norm, LayerNorm):
        return "layer", norm.weight, norm.bias, norm.eps
    assert isinstance(norm, RMSNorm)
    return "rms", norm.weight, None, norm.eps


def apply_gate(ff: FeedForward, y: Tensor) -> Tensor:
    """The gate of a gated network; a plain network's activation was part of its product."""
    if not ff.gated:
        return y
    gate, up = y.chunk(2, dim=-1)
    return ff.f(gate) * up


def capture_obstacle(model: Model) -> str | None:
    """Why a model's step cannot be captured, in a few words; None where it can."""
    if not model.is_decoder_only or model.head is None:
        return "it is no decoder with a head"
    return "its attention is sparse" if model.config.sparsity != "none" else step_obstacle(model)


def blocks_of(model: Decoder) -> list[Block]:
    return [cast(Block, block) for block in model.decoder.blocks]


def can_fuse(model: Decoder) -> bool:
    """Whether norms, products and residuals are of the kinds that can be fused."""
    head, norms = model.head, [model.decoder.norm]
    linears: list[nn.Module] = []
    for block in blocks_of(model):
        if block.norm_place != "pre" or not block.residual or block.parallel or not isinstance(block.ff, FeedForward):
            return False
        attention = attention_of(block)
        norms += [block.attention_norm, block.ff_norm]
        linears += [attention.w_qkv, attention.w_o, block.ff.w_in, block.ff.w_out]
    if head is None or head.transform is not None:
        return False
    plain_norms = all(type(norm) is LayerNorm or (type(norm) is RMSNorm and norm.offset == 0.0) for norm in norms)
    return plain_norms and all(type(linear) is nn.Linear for linear in linears)
