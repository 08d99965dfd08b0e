"""The decode step that a CUDA graph captures: one token per row through a decoder with preallocated keys and values.

No Python value changes from token to token, nothing is copied to the host, and every tensor that outlives a step
keeps its address. The weights are the model's own; only the operations between them are fused:

    plain   the model's modules one after the other, attention over the keys up to each row's length
    few     norm, product, activation and residual in one launch: two or three launches per sublayer   (a few rows)
    many    bias and activation inside a product, residual and norm after it in one launch              (many rows)

Prompts go through the same modules, without the masks, frames and taps of the model's forward pass (``prefill``).
``TorchOps`` defines, on every device, what the kernels in ``kernels.decoding`` compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import MultiHeadAttention
from ..attention.biases import RelativeBias
from ..attention.mechanisms import Dot
from ..layers import FeedForward, LayerNorm, Learned, RMSNorm
from ..layers.feedforward import activation_function
from ..models import Block, Model
from .cached_engine import step_obstacle
from .sampling import token_log_probs
from .step_keys import DecodeState, StepKeys

Form = Literal["plain", "few", "many"]
MAX_FEW = 4  # rows up to which reading the weights once per row is faster than a matrix product

_BIASED_QUERIES = 512  # prompt queries per block when a position bias is added

Norm = tuple[str, Tensor, Tensor | None, float]  # ("layer" or "rms", gain, shift, eps)
Parts = tuple[Tensor, Tensor]  # results (P, R, H · D) and log₂ of their weights (P, R, H)


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

        ``origin`` (R, S) is the row with the keys of each position, ``bias`` (H, S) is added by distance from q.
        """
        index = lengths[:, None, None, None].expand(-1, *k.shape[1:2], 1, k.shape[2])
        k_cache.scatter_(2, index, k[:, :, None])
        v_cache.scatter_(2, index, v[:, :, None])
        positions = torch.arange(k_cache.shape[2], device=q.device)
        distance = lengths[:, None] - positions  # (R, S)
        if origin is not None:
            row = torch.arange(len(q), device=q.device)[:, None]
            rows = torch.where(distance > 0, origin, row)
            k_cache, v_cache = (x.gather(0, rows[:, None, :, None].expand_as(x)) for x in (k_cache, v_cache))
        mask = (distance >= 0)[:, None, None]
        if bias is not None:
            added = bias[:, distance.clamp(0, bias.shape[1] - 1)].transpose(0, 1)[:, :, None]  # (R, H, 1, S)
            mask = added.masked_fill(~mask, -torch.inf)
        gqa = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(
            q[:, :, None], k_cache, v_cache, attn_mask=mask, scale=scale, enable_gqa=gqa
        )
        return out.flatten(1)

    @staticmethod
    def attend_memory(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
        """q (R, H, D) over an encoder's k and v (B, G, S, D) up to lengths (B,), R / B rows per source → (R, H · D)."""
        k, v, lengths = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v, lengths))
        mask = torch.arange(k.shape[2], device=q.device) < lengths[:, None]
        gqa = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(
            q[:, :, None], k, v, attn_mask=mask[:, None, None], scale=scale, enable_gqa=gqa
        )
        return out.flatten(1)

    attend_one_in_parts = attend_one  # here one part
    attend_memory_in_parts = attend_memory

    @staticmethod
    def linear(
        x: Tensor | Parts,
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
        """residual_norm(residual) + activation(scale · norm(x) Wᵀ + bias), with x possibly in parts."""
        x = merge_parts(*x) if isinstance(x, tuple) else x
        x = x if norm is None else apply_norm(x, norm)
        y = F.linear(x if scale == 1.0 else x * scale, weight, bias)
        y = y if activation is None else activation_function(activation)(y)
        if residual is not None:
            y = (residual if residual_norm is None else apply_norm(residual, residual_norm)) + y
        return y if dtype is None else y.to(dtype)

    @staticmethod
    def product_is_faster(rows: int, dtype: torch.dtype, widths: set[int]) -> bool:
        """Whether these ``product`` and ``product_in_parts`` are faster than torch's."""
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
        """log P and tokens, each (R, m) with m ≥ n, of the n best tokens under logits (R, V) and possibly others."""
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
        """Append the most likely token under logits (R, V); never ``eos_id`` in the first ``min_steps`` steps."""
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


def merge_parts(results: Tensor, logs: Tensor) -> Tensor:
    """Attention (R, H · D) from the results (P, R, H · D) of parts of the keys, weighted by 2^logs (P, R, H)."""
    weights = torch.softmax(logs * math.log(2), 0)
    merged = (weights[..., None] * results.unflatten(-1, (logs.shape[-1], -1))).sum(0).flatten(1)
    return merged.to(results.dtype)


def ops_for(weight: Tensor) -> Any:
    """The Triton kernels if they can run, else plain torch; kernels sum in float32, so float64 models use torch."""
    if not weight.is_cuda or weight.dtype == torch.float64:
        return TorchOps
    try:
        from ..kernels import decoding
    except ImportError:  # CUDA without triton
        return TorchOps
    return decoding


class Sublayer(NamedTuple):
    """w_in → activation → inner → w_out, with a residual: self-attention, cross-attention or feed-forward."""

    w_in: nn.Linear
    activation: str | None
    inner: Callable[[Tensor], Any]  # a Tensor, or Parts in the form "few"
    w_out: nn.Linear


class DecodeStep:
    """Next-token logits (R, V) after ``state.tokens``, whose keys and values the step writes.

    It refers to the model's modules but not to the model, so that a WeakKeyDictionary keyed by model can hold it.
    """

    def __init__(
        self, model: Model, keys: StepKeys, state: DecodeState, form: Form | None = None, ops: Any = None
    ) -> None:
        if (obstacle := capture_obstacle(model)) is not None:
            raise ValueError(f"this model's decode step cannot be captured: {obstacle}")
        source: Any = model
        self.table = source.token if model.is_decoder_only else source.target_table
        self.embeddings = source.embeddings if model.is_decoder_only else source.target_embeddings
        assert model.head is not None
        self.head, stack, self.keys, self.state = model.head, model.decoder, keys, state
        self.ops = ops_for(self.table.weight) if ops is None else ops
        if form not in (None, "plain") and not can_fuse(model):
            raise ValueError(f"form={form!r} needs plain pre-norm or post-norm layers; this model takes form='plain'")
        if form is None:
            form = "few" if len(state.tokens) <= MAX_FEW else "many"
            form = form if can_fuse(model) else "plain"
        self.form: Form = form
        self.blocks = stack.layers
        self.norm, self.is_post = stack.norm, self.blocks[0].norm_place == "post"
        if self.form != "plain":
            self.sublayers = [sub for number, block in enumerate(self.blocks) for sub in self._sublayers(number, block)]
            self.norms = self._norms()
        widths = {linear.in_features for linear in stack.modules() if isinstance(linear, nn.Linear)}
        faster = self.ops.product_is_faster(len(state.tokens), self.table.weight.dtype, widths)
        self.products = self.ops if faster else TorchOps
        self.wide_head = self._padded_head()
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
            return self._logits_few(x)
        if self.form == "many":
            return self._logits_many(x)
        for number, block in enumerate(self.blocks):
            x = self._run_block(x, number, block)
        return self.head(x if self.norm is None else self.norm(x), self.table.weight)

    def prefill(self, prompts: list[list[int]], memory: Tensor | None, padding_mask: Tensor | None) -> Tensor:
        """Next-token logits (n, V) after n prompts, whose keys and values it writes.

        ``memory`` is the encoder's output (n, S, M); ``padding_mask`` (n, S) is True at its real tokens. Prompts are
        padded on the right: no token attends to the padding, and the decode steps overwrite its keys.
        """
        lengths, rows = torch.tensor([len(row) for row in prompts]), [torch.tensor(row) for row in prompts]
        tokens, device = nn.utils.rnn.pad_sequence(rows, batch_first=True), self.table.weight.device
        return self.read_prompts(tokens.to(device), lengths.to(device), memory, padding_mask)

    def read_prompts(
        self, tokens: Tensor, lengths: Tensor, memory: Tensor | None = None, padding_mask: Tensor | None = None
    ) -> Tensor:
        """``prefill`` from tokens (n, P), the first ``lengths`` (n,) of each row being the prompt."""
        if self.wide_head is not None:
            self.wide_head[: len(self._output_weight())] = self._output_weight()
        x = self.embeddings(self.table(tokens))  # (n, P, M)
        for number, block in enumerate(self.blocks):
            attention, cross = attention_of(block), block.cross_attention
            attend = lambda y, number=number, w=attention: w.w_o(self._attend_prompt(number, w.w_qkv(y)))  # noqa: E731
            attend_memory = None
            if cross is not None:
                assert memory is not None
                k, v = cross._heads(cross.w_kv(memory), cross.n_kv_heads, cross.n_kv_heads)
                k = cross._normalise(k, cross.k_norm)
                self.keys.write_memory(number, k, v, padding_mask)
                attend_memory = lambda y, w=cross, k=k, v=v: w.w_o(  # noqa: E731
                    _attend_source(w, w.w_query(y), k, v, padding_mask)
                )
            x = block.residuals().run(x, attend, attend_memory, block.ff)
        x = x[torch.arange(len(x), device=x.device), lengths - 1]
        return self.head(x if self.norm is None else self.norm(x), self.table.weight).float()

    def _attend_prompt(self, number: int, qkv: Tensor) -> Tensor:
        """Causal attention within prompts, qkv (n, P, (H + 2G) · D) → (n, P, H · D)."""
        attention, length = attention_of(self.blocks[number]), qkv.shape[1]
        n_kv_heads, positions = attention.n_kv_heads, torch.arange(length, device=qkv.device)
        q, k, v = attention._heads(qkv, attention.n_heads, n_kv_heads, n_kv_heads)  # (n, heads, P, D)
        q, k = attention._normalise_qk(q, k)
        if attention.rope is not None:
            q, k = attention.rope(q, positions), attention.rope(k, positions)
        self.keys.write_prompts(number, k, v)
        options: dict[str, Any] = {"scale": scale_of(attention), "enable_gqa": attention.n_heads != n_kv_heads}
        if self.keys.bias is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
            return y.transpose(1, 2).flatten(2)
        parts = []
        for queries in positions.split(_BIASED_QUERIES):  # the bias of all queries at once would take O(P²) memory
            distance = queries[:, None] - positions
            bias = self.keys.bias[:, distance.clamp(min=0)].masked_fill(distance < 0, -torch.inf)  # (H, queries, P)
            parts.append(F.scaled_dot_product_attention(q[:, :, queries], k, v, attn_mask=bias, **options))
        return torch.cat(parts, 2).transpose(1, 2).flatten(2)

    def _embed(self) -> Tensor:
        tokens, lengths, embeddings = self.state.tokens, self.state.lengths, self.embeddings
        if embeddings.segment is not None:
            return embeddings(self.table(tokens[:, None]), lengths[:, None])[:, 0]
        x = self.ops.embed(tokens, lengths, self.table.weight, self.table.scale, *self.positions)
        x = x if embeddings.norm is None else embeddings.norm(x)
        return x if embeddings.projection is None else embeddings.projection(x)

    def _run_block(self, x: Tensor, number: int, block: Block) -> Tensor:
        attention, cross = attention_of(block), block.cross_attention
        attend = lambda y: attention.w_o(self._attend(number, attention.w_qkv(y)))  # noqa: E731
        attend_memory = None
        if cross is not None:
            attend_memory = lambda y: cross.w_o(self._attend_memory(number, cross.w_query(y)))  # noqa: E731
        return block.residuals().run(x, attend, attend_memory, block.ff)

    def _sublayers(self, number: int, block: Block) -> list[Sublayer]:
        attention, cross, ff = attention_of(block), block.cross_attention, ff_of(block)
        in_parts = self.form == "few"
        attend = lambda y: self._attend(number, y, in_parts)  # noqa: E731
        sublayers = [Sublayer(attention.w_qkv, None, attend, attention.w_o)]
        if cross is not None:
            attend_memory = lambda y: self._attend_memory(number, y, in_parts)  # noqa: E731
            sublayers.append(Sublayer(cross.w_query, None, attend_memory, cross.w_o))
        activation = None if ff.gated else ff.activation
        return [*sublayers, Sublayer(ff.w_in, activation, lambda y: apply_gate(ff, y), ff.w_out)]

    def _norms(self) -> list[Norm | None]:
        """The norm before each sublayer and before the head; in a post-norm model, that of the previous sublayer."""
        norms: list[Norm | None] = []
        for block in self.blocks:
            block_norms = (block.attention_norm, block.cross_norm, block.ff_norm)
            norms += [norm_of(norm) for norm in block_norms if norm is not None]
        return [None, *norms] if self.is_post else [*norms, norm_of(self.norm)]

    def _logits_few(self, x: Tensor) -> Tensor:
        linear = self.ops.linear
        for sub, norm in zip(self.sublayers, self.norms, strict=False):
            y = linear(x, sub.w_in.weight, sub.w_in.bias, norm=norm, activation=sub.activation)
            residual_norm = norm if self.is_post else None
            x = linear(sub.inner(y), sub.w_out.weight, sub.w_out.bias, residual=x, residual_norm=residual_norm)
        weight, head = self._output_weight(), self.head
        logits = linear(x, weight, head.bias, norm=self.norms[-1], scale=head.scale, dtype=torch.float32)
        return head.cap_logits(logits)

    def _logits_many(self, x: Tensor) -> Tensor:
        product, in_parts = self.products.product, self.products.product_in_parts
        y, bias = None, None  # the previous sublayer's output, not yet added to x
        for sub, norm in zip(self.sublayers, self.norms, strict=False):
            x, z = self._add_norm(x, y, bias, norm)
            z = sub.inner(product(z, sub.w_in.weight, sub.w_in.bias, sub.activation))
            y, bias = in_parts(z, sub.w_out.weight), sub.w_out.bias
        _, z = self._add_norm(x, y, bias, self.norms[-1])
        z, weight = self.head.hidden(z), self._output_weight()
        if self.wide_head is None:
            return self.head.cap_logits(product(z, weight, self.head.bias))
        logits = F.linear(z, self.wide_head)[:, : len(weight)]
        return self.head.cap_logits(logits if self.head.bias is None else logits + self.head.bias)

    def _add_norm(self, x: Tensor, y: Tensor | None, bias: Tensor | None, norm: Norm | None) -> tuple[Tensor, Tensor]:
        """The next sublayer's residual and its normalised input."""
        if norm is None:  # the embeddings of a post-norm model
            return x, x
        total, normed = self.ops.add_norm(x, y, bias, norm)
        return (normed if self.is_post else total), normed

    def _padded_head(self) -> Tensor | None:
        """The output weights, zero-padded to a multiple of 128 rows, which cuBLAS multiplies much faster.

        ``read_prompts`` copies them again, since they may have been trained. None if the product does not need padding.
        """
        weight, n_more = self._output_weight().detach(), -len(self._output_weight()) % 128
        needed = self.form == "many" and self.products is TorchOps and weight.dtype.itemsize == 2
        return F.pad(weight, (0, 0, 0, n_more)) if needed and n_more else None

    def _output_weight(self) -> Tensor:
        return self.table.weight if self.head.weight is None else self.head.weight

    def _attend(self, number: int, qkv: Tensor, in_parts: bool = False) -> Any:
        """Self-attention of the new tokens, qkv (R, (H + 2G) · D) → (R, H · D), or ``Parts`` of it."""
        attention, keys, lengths = attention_of(self.blocks[number]), self.keys, self.state.lengths
        n_kv_heads = attention.n_kv_heads
        q, k, v = attention._heads(qkv[:, None], attention.n_heads, n_kv_heads, n_kv_heads)  # (R, heads, 1, D)
        q, k = attention._normalise_qk(q, k)
        if attention.rope is not None:
            q, k = attention.rope(q, lengths[:, None]), attention.rope(k, lengths[:, None])
        new = (x[:, :, 0] for x in (q, k, v))
        attend = self.ops.attend_one_in_parts if in_parts else self.ops.attend_one
        return attend(*new, *keys.layers[number], lengths, scale_of(attention), keys.origin, keys.bias)

    def _attend_memory(self, number: int, q: Tensor, in_parts: bool = False) -> Any:
        """Cross-attention of the new tokens, q (R, H · D) → (R, H · D), or ``Parts`` of it."""
        attention, keys = self.blocks[number].cross_attention, self.keys
        assert attention is not None
        (heads,) = attention._heads(q[:, None], attention.n_heads)
        heads = attention._normalise(heads, attention.q_norm)[:, :, 0]
        attend = self.ops.attend_memory_in_parts if in_parts else self.ops.attend_memory
        return attend(heads, *keys.memory[number], keys.source_lengths, scale_of(attention))


def _attend_source(
    attention: MultiHeadAttention, q: Tensor, k: Tensor, v: Tensor, padding_mask: Tensor | None
) -> Tensor:
    """Cross-attention of prompts: q (n, P, H · D) over an encoder's k and v (n, G, S, D) → (n, P, H · D)."""
    (heads,) = attention._heads(q, attention.n_heads)
    heads = attention._normalise(heads, attention.q_norm)
    mask = None if padding_mask is None else padding_mask.bool()[:, None, None]
    gqa = attention.n_heads != attention.n_kv_heads
    y = F.scaled_dot_product_attention(heads, k, v, attn_mask=mask, scale=scale_of(attention), enable_gqa=gqa)
    return y.transpose(1, 2).flatten(2)


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
    """Apply the gate of a gated network; the activation of a plain one is part of its product."""
    return ff.activate(y) if ff.gated else y


def capture_obstacle(model: Model) -> str | None:
    """Why a model's step cannot be captured, in a few words; None if it can."""
    if model.head is None or model.is_recurrent or not (model.is_decoder_only or model.is_encoder_decoder):
        return "it is not a Transformer decoder with a token head"
    if model.config.sparsity != "none":
        return "its attention is sparse"
    return step_obstacle(model, takes_bias=lambda bias: isinstance(bias, RelativeBias))


def can_fuse(model: Model) -> bool:
    """Whether all norms, products and residuals of the decoder are of kinds that can be fused."""
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
