"""The decode step that a CUDA graph captures: one token a row through a decoder with preallocated keys and values.

No Python number changes from token to token, nothing is read back to the host, and every tensor that outlives a step
keeps its address. The weights are the model's own; only the operations between them are fused:

    plain   the model's modules one after the other, attention reading its keys up to the row's length
    few     norm, product, activation and residual in one launch: two or three launches a sublayer    (a few rows)
    many    bias and activation inside a product, residual and norm after it in one launch             (many rows)

Beams: row r holds the keys of the tokens that were read in row r, and ``StepKeys.origin`` says in which row each
position of a beam's past lies. When a beam continues another one, that index changes and no key is copied. An encoder's
keys are held once a source. ``TorchOps`` defines what the kernels in ``kernels.decoding`` compute, on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import MultiHeadAttention
from ..attention.biases import RelativeBias
from ..attention.cache import GrowingCache, ModelCache
from ..attention.mechanisms import Dot
from ..layers import FeedForward, LayerNorm, Learned, RMSNorm
from ..layers.feedforward import activation_function
from ..models import Block, Model
from ..models.base_model import DecoderShape
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


class StepKeys:
    """Keys and values at fixed addresses: of R rows' texts, and of the encoder's output for R / copies sources.

    The copies of a prompt, rows side by side, share its keys: beams, or several texts that are drawn.
    """

    def __init__(self, model: Model, rows: int, max_len: int, copies: int = 1, source_len: int = 0) -> None:
        shape, self.max_len, self.copies = DecoderShape.of(model.config), max_len, copies
        like = next(model.parameters())

        def pairs(n_rows: int, length: int) -> list[tuple[Tensor, Tensor]]:
            sizes = (n_rows, shape.n_kv_heads, length, shape.d_head)
            return [(like.new_zeros(sizes), like.new_zeros(sizes)) for _ in range(shape.n_layers)]

        self.layers = pairs(rows, max_len + 1)  # (R, G, S + 1, D) each; the last slot is for padding, and never read
        self.memory = pairs(rows // copies, source_len) if source_len else []  # (B, G, M, D) each
        self.row = torch.arange(rows, device=like.device)
        self.source = self.row // copies  # (R,) the source that a row is about
        self.source_lengths = torch.ones(rows // copies, dtype=torch.int64, device=like.device)
        # (R, S) the row that holds each position of a row's past; without copies it is the row itself
        self.origin = self.row[:, None].repeat(1, max_len) if copies > 1 else None
        bias = model.decoder.position_bias
        self.bias = None if bias is None else like.new_zeros(shape.n_heads, max_len)  # (H, S) by distance back

    def begin(
        self,
        cache: ModelCache,
        lengths: Tensor,
        positions: Tensor | None = None,
        padding_mask: Tensor | None = None,
        bias: RelativeBias | None = None,
    ) -> None:
        """Take over what a pass over n prompts left in a growing cache: each prompt in the first of its copies.

        ``lengths`` (R,) are the prompts', ``positions`` (n, P) are -1 for padding, ``padding_mask`` (n, M) is that of
        the sources, ``bias`` the model's.
        """
        for pair in self.layers:
            for x in pair:
                x.zero_()  # a leftover infinity times weight 0 would be NaN
        for pair, layer in zip(self.layers, cache.layers, strict=True):
            assert isinstance(layer, GrowingCache)
            for held, new in zip(pair, layer.keys_and_values(), strict=True):
                first = held[:: self.copies][: len(new)]
                if positions is None:
                    first[:, :, : new.shape[2]] = new
                else:
                    slots = torch.where(positions < 0, self.max_len, positions)
                    first.scatter_(2, slots[:, None, :, None].expand_as(new), new)
        for pair, cross in zip(self.memory, cache.cross, strict=True):
            for held, new in zip(pair, cross.update(), strict=True):
                held[: len(new), :, : new.shape[2]] = new
                n_source = new.shape[2] if padding_mask is None else padding_mask.sum(1)
                self.source_lengths[: len(new)] = n_source
        if self.origin is not None:
            past = torch.arange(self.max_len, device=lengths.device) < lengths[:, None]
            self.origin.copy_(torch.where(past, (self.source * self.copies)[:, None], self.row[:, None]))
        if self.bias is not None:
            assert bias is not None
            self.bias.copy_(bias.at(-torch.arange(self.max_len, device=self.row.device)))

    def select(self, rows: Tensor, lengths: Tensor) -> None:
        """Row r continues row rows[r]; ``lengths`` (R,) are those of all rows."""
        n = len(rows)
        if self.origin is None:
            for pair in self.layers:
                for x in pair:
                    x[:n] = x[:n].index_select(0, rows)
            return
        past = torch.arange(self.max_len, device=rows.device) < lengths[:n, None]
        self.origin[:n] = torch.where(past, self.origin.index_select(0, rows), self.row[:n, None])


class TorchOps:
    """The operations of a step in plain torch: the reference for the kernels, and what runs without them."""

    @staticmethod
    def attend_one(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        lengths: Tensor,
        scale: float,
        origin: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Write k, v (R, G, D) at ``lengths``, then q (R, H, D) over k_cache, v_cache (R, G, S, D) → (R, H · D).

        ``origin`` (R, S) is the row that holds each position, ``bias`` (H, S) is added to the key so many back.
        """
        index = lengths[:, None, None, None].expand(-1, *k.shape[1:2], 1, k.shape[2])
        k_cache.scatter_(2, index, k[:, :, None])
        v_cache.scatter_(2, index, v[:, :, None])
        positions = torch.arange(k_cache.shape[2], device=q.device)
        back = lengths[:, None] - positions  # (R, S)
        if origin is not None:
            own = torch.arange(len(q), device=q.device)[:, None]
            rows = torch.where(back > 0, F.pad(origin, (0, len(positions) - origin.shape[1])), own)
            k_cache, v_cache = (x.gather(0, rows[:, None, :, None].expand_as(x)) for x in (k_cache, v_cache))
        mask = (back >= 0)[:, None, None]
        if bias is not None:
            added = bias[:, back.clamp(0, bias.shape[1] - 1)].transpose(0, 1)[:, :, None]  # (R, H, 1, S)
            mask = added.masked_fill(~mask, -torch.inf)
        gqa = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(
            q[:, :, None], k_cache, v_cache, attn_mask=mask, scale=scale, enable_gqa=gqa
        )
        return out.flatten(1)

    @staticmethod
    def attend_memory(q: Tensor, k: Tensor, v: Tensor, source: Tensor, lengths: Tensor, scale: float) -> Tensor:
        """q (R, H, D) over an encoder's k and v (B, G, S, D), those of source (R,) up to lengths (B,) → (R, H · D)."""
        k, v = k.index_select(0, source), v.index_select(0, source)
        mask = torch.arange(k.shape[2], device=q.device) < lengths[source][:, None]
        gqa = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(
            q[:, :, None], k, v, attn_mask=mask[:, None, None], scale=scale, enable_gqa=gqa
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
        residual_norm: Norm | None = None,
        scale: float = 1.0,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """residual_norm(residual) + activation(scale · norm(x) Wᵀ + bias)."""
        x = x if norm is None else apply_norm(x, norm)
        y = F.linear(x if scale == 1.0 else x * scale, weight, bias)
        y = y if activation is None else activation_function(activation)(y)
        if residual is not None:
            y = (residual if residual_norm is None else apply_norm(residual, residual_norm)) + y
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
    def best_tokens(logits: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """log P and tokens (R, m), m ≥ n, of the n best by logits (R, V), and perhaps of others."""
        best = logits.log_softmax(-1, dtype=torch.float32).topk(n)
        return best.values, best.indices

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
        eos_id: int | None = None,
        min_steps: int = 0,
    ) -> None:
        """Append the likeliest token of logits (R, V), which is not ``eos_id`` in the first ``min_steps`` steps."""
        state = DecodeState(tokens, lengths, last, steps, history, log_probs)
        scores = logits
        if eos_id is not None and min_steps:
            is_end = torch.arange(logits.shape[1], device=logits.device) == eos_id
            scores = logits.masked_fill(is_end & (steps < min_steps)[:, None], -torch.inf)
        chosen = scores.argmax(-1)
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


class Sublayer(NamedTuple):
    """product → inner → product, in a residual: attention, attention to the encoder's output, or feed-forward."""

    w_in: nn.Linear
    activation: str | None  # that follows the first product
    inner: Callable[[Tensor], Tensor]
    w_out: nn.Linear


class DecodeStep:
    """Logits (R, V) of what follows ``state.tokens``, whose keys and values the step writes.

    It refers to the model's modules but not to the model, so that a weak dictionary keyed by model can hold it.
    """

    def __init__(
        self, model: Model, keys: StepKeys, state: DecodeState, form: Form | None = None, ops: Any = None
    ) -> None:
        if (obstacle := capture_obstacle(model)) is not None:
            raise ValueError(f"this model's step cannot be written out: {obstacle}")
        source: Any = model
        self.table = source.token if model.is_decoder_only else source.target_table
        self.embeddings = source.embeddings if model.is_decoder_only else source.target_embeddings
        assert model.head is not None
        self.head, stack, self.keys, self.state = model.head, model.decoder, keys, state
        self.ops = ops_for(self.table.weight) if ops is None else ops
        if form not in (None, "plain") and not can_fuse(model):
            raise ValueError(f"form={form!r} needs plain pre-norm or post-norm layers; this model takes form='plain'")
        best: Form = "plain" if not can_fuse(model) else "few" if len(state.tokens) <= MAX_FEW else "many"
        self.form: Form = best if form is None else form
        self.blocks = [cast(Block, stack.blocks[number % len(stack.blocks)]) for number in range(stack.n_layers)]
        self.norm, self.is_post = stack.norm, self.blocks[0].norm_place == "post"
        if self.form != "plain":
            self.sublayers = [sub for number, block in enumerate(self.blocks) for sub in self._sublayers(number, block)]
            self.norms = self._norms()
        widths = {linear.in_features for linear in stack.modules() if isinstance(linear, nn.Linear)}
        faster = self.ops.product_is_faster(len(state.tokens), self.table.weight.dtype, widths)
        self.products = self.ops if faster else TorchOps
        position = self.embeddings.position
        if isinstance(position, Learned):
            self.positions: tuple[Tensor | None, int] = position.weight, position.offset
        elif position is None:
            self.positions = None, 0
        else:  # sinusoids, computed once
            self.positions = position(torch.arange(keys.max_len, device=model.device), self.table.weight.dtype), 0

    def logits(self) -> Tensor:
        x = self._embed()  # (R, M)
        if self.form == "few":
            return self._few(x)
        if self.form == "many":
            return self._many(x)
        for number, block in enumerate(self.blocks):
            x = self._plain(x, number, block)
        return self.head(x if self.norm is None else self.norm(x), self.table.weight)

    def _embed(self) -> Tensor:
        tokens, lengths, part = self.state.tokens, self.state.lengths, self.embeddings
        if part.segment is not None:
            return part(self.table(tokens[:, None]), lengths[:, None])[:, 0]
        x = self.ops.embed(tokens, lengths, self.table.weight, self.table.scale, *self.positions)
        x = x if part.norm is None else part.norm(x)
        return x if part.projection is None else part.projection(x)

    def _plain(self, x: Tensor, number: int, block: Block) -> Tensor:
        attention, cross = attention_of(block), block.cross_attention
        attend = lambda y: attention.w_o(self._attend(number, attention.w_qkv(y)))  # noqa: E731
        attend_memory = None
        if cross is not None:
            attend_memory = lambda y: cross.w_o(self._attend_memory(number, cross.w_query(y)))  # noqa: E731
        return block.residuals().run(x, attend, attend_memory, block.ff)

    def _sublayers(self, number: int, block: Block) -> list[Sublayer]:
        attention, cross, ff = attention_of(block), block.cross_attention, ff_of(block)
        found = [Sublayer(attention.w_qkv, None, lambda y: self._attend(number, y), attention.w_o)]
        if cross is not None:
            found.append(Sublayer(cross.w_query, None, lambda y: self._attend_memory(number, y), cross.w_o))
        activation = None if ff.gated else ff.activation
        return [*found, Sublayer(ff.w_in, activation, lambda y: apply_gate(ff, y), ff.w_out)]

    def _norms(self) -> list[Norm | None]:
        """The norm before each sublayer and before the head; of a post-norm model the one after the sublayer before."""
        norms: list[Norm | None] = []
        for block in self.blocks:
            own = (block.attention_norm, block.cross_norm, block.ff_norm)
            norms += [norm_of(norm) for norm in own if norm is not None]
        return [None, *norms] if self.is_post else [*norms, norm_of(self.norm)]

    def _few(self, x: Tensor) -> Tensor:
        linear = self.ops.linear
        for sub, norm in zip(self.sublayers, self.norms, strict=False):
            y = linear(x, sub.w_in.weight, sub.w_in.bias, norm=norm, activation=sub.activation)
            own = norm if self.is_post else None
            x = linear(sub.inner(y), sub.w_out.weight, sub.w_out.bias, residual=x, residual_norm=own)
        weight, head = self._output_weight(), self.head
        logits = linear(x, weight, head.bias, norm=self.norms[-1], scale=head.scale, dtype=torch.float32)
        return head.cap_logits(logits)

    def _many(self, x: Tensor) -> Tensor:
        product, in_parts = self.products.product, self.products.product_in_parts
        y, bias = None, None  # what the previous sublayer adds to x
        for sub, norm in zip(self.sublayers, self.norms, strict=False):
            x, z = self._add_norm(x, y, bias, norm)
            z = sub.inner(product(z, sub.w_in.weight, sub.w_in.bias, sub.activation))
            y, bias = in_parts(z, sub.w_out.weight), sub.w_out.bias
        _, z = self._add_norm(x, y, bias, self.norms[-1])
        return self.head.cap_logits(product(self.head.hidden(z), self._output_weight(), self.head.bias))

    def _add_norm(self, x: Tensor, y: Tensor | None, bias: Tensor | None, norm: Norm | None) -> tuple[Tensor, Tensor]:
        """What the next residual adds to, and what the next sublayer reads."""
        if norm is None:  # the embeddings of a post-norm model
            return x, x
        total, normed = self.ops.add_norm(x, y, bias, norm)
        return (normed if self.is_post else total), normed

    def _output_weight(self) -> Tensor:
        return self.table.weight if self.head.weight is None else self.head.weight

    def _attend(self, number: int, qkv: Tensor) -> Tensor:
        """qkv (R, (H + 2G) · D) → (R, H · D)."""
        attention, keys, lengths = attention_of(self.blocks[number]), self.keys, self.state.lengths
        n_kv_heads = attention.n_kv_heads
        q, k, v = attention._heads(qkv[:, None], attention.n_heads, n_kv_heads, n_kv_heads)  # (R, heads, 1, D)
        q, k = attention._normalise_qk(q, k)
        if attention.rope is not None:
            q, k = attention.rope(q, lengths[:, None]), attention.rope(k, lengths[:, None])
        new = (x[:, :, 0] for x in (q, k, v))
        return self.ops.attend_one(*new, *keys.layers[number], lengths, scale_of(attention), keys.origin, keys.bias)

    def _attend_memory(self, number: int, q: Tensor) -> Tensor:
        """q (R, H · D) → (R, H · D)."""
        attention, keys = self.blocks[number].cross_attention, self.keys
        assert attention is not None
        (heads,) = attention._heads(q[:, None], attention.n_heads)
        heads = attention._normalise(heads, attention.q_norm)[:, :, 0]
        return self.ops.attend_memory(
            heads, *keys.memory[number], keys.source, keys.source_lengths, scale_of(attention)
        )


def attention_of(block: Block) -> MultiHeadAttention:
    assert isinstance(block.attention, MultiHeadAttention)
    return block.attention


def ff_of(block: Block) -> FeedForward:
    assert isinstance(block.ff, FeedForward)
    return block.ff


def scale_of(attention: MultiHeadAttention) -> float:
    assert isinstance(attention.mechanism, Dot)
    return attention.mechanism.factor(attention.d_head)


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
    if model.head is None or model.is_recurrent or not (model.is_decoder_only or model.is_encoder_decoder):
        return "it is no decoder with a head"
    if model.config.sparsity != "none":
        return "its attention is sparse"
    return step_obstacle(model, takes_bias=lambda bias: isinstance(bias, RelativeBias))


def can_fuse(model: Model) -> bool:
    """Whether norms, products and residuals are of the kinds that can be fused."""
    head, stack = model.head, model.decoder
    norms: list[nn.Module] = [] if stack.norm is None else [stack.norm]
    linears: list[nn.Module] = []
    for block in stack.blocks:
        if block.norm_place not in ("pre", "post") or not block.residual or block.parallel:
            return False
        if not isinstance(block.ff, FeedForward):
            return False
        if block.ff.fp32_output and block.ff.w_out.weight.dtype == torch.float16:
            return False
        attention, cross = attention_of(block), block.cross_attention
        norms += [norm for norm in (block.attention_norm, block.cross_norm, block.ff_norm) if norm is not None]
        linears += [attention.w_qkv, attention.w_o, block.ff.w_in, block.ff.w_out]
        linears += [] if cross is None else [cross.w_query, cross.w_o]
    if head is None or head.transform is not None:
        return False
    plain_norms = all(type(norm) is LayerNorm or (type(norm) is RMSNorm and norm.offset == 0.0) for norm in norms)
    return plain_norms and all(type(linear) is nn.Linear for linear in linears)
