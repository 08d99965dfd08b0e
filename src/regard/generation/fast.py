"""Decoding on a CPU: the model's own step, written out over branching keys and packed weights.

The prompt goes through the model as it is; from then on every token is one pass over (rows, width) matrices with the
same numbers in the same places: no masks to build, no frames, no copies of keys for beams, and the keys of an encoder's
output once a source. What the model computes is unchanged; where its layers are none of these, or someone records what
passes through them, the plain engine goes on.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import MultiHeadAttention, taps
from ..attention.cache import GrowingCache, ModelCache
from ..attention.scores import Dot
from ..layers import FeedForward
from ..models import Block, Decoder, EncoderDecoder
from ..models.heads import TokenHead
from .engine import Engine, SourceEngine, TextEngine
from .fast_keys import BranchKeys
from .fast_layers import Map, Packs, can_pack, fast_map, packs_of
from .prompts import Prompts


def hastened(engine: Engine) -> Engine:
    """The same engine, or one that writes the same texts sooner."""
    if isinstance(engine, TextEngine | SourceEngine) and why_not(engine) is None:
        return FastEngine(engine)
    return engine


def why_not(engine: TextEngine | SourceEngine) -> str | None:
    """Why an engine stays as it is, in a few words; None where ``FastEngine`` can take its place."""
    model = engine.model
    if engine.static or model.device.type != "cpu" or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return "it is for CPUs, growing texts and no gradients"
    if taps._recorder is not None:
        return "what passes through its layers is recorded"
    if not isinstance(model, Decoder | EncoderDecoder) or model.config.attention_backend not in ("auto", "sdpa"):
        return "it is no Transformer, or has its own attention backend"
    if not model.decoder.causal or model.decoder.position_bias is not None:
        return "its layers share a position bias, or look ahead"
    if model.config.rope_scaling is not None and model.config.rope_scaling.kind in ("dynamic", "longrope"):
        return "its angles follow the longest text of the batch"
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return "hooks wait for its modules to be called"
    return next((reason for block in model.decoder.blocks if (reason := _why_not_block(block)) is not None), None)


def _why_not_block(block: nn.Module) -> str | None:
    if type(block) is not Block or block.mask is not None or type(block.ff) is not FeedForward:
        return "a layer is of another kind, or sees a window alone"
    for attention in (block.attention, block.cross_attention):
        if attention is None:
            continue
        if type(attention) is not MultiHeadAttention or type(attention.mechanism) is not Dot:
            return "its attention is not the scaled dot product"
        if attention.position_bias is not None:
            return "its attention has a position bias"
    return None


class Layer(NamedTuple):
    """A block and its linear maps as functions of rows."""

    block: Block
    attention: MultiHeadAttention
    qkv: Map
    out: Map
    cross_query: Map | None
    cross_out: Map | None
    ff_in: Map
    ff_out: Map

    @classmethod
    def of(cls, block: Block, packs: Packs | None) -> Layer:
        attention, cross, ff = block.attention, block.cross_attention, block.ff
        assert isinstance(attention, MultiHeadAttention)
        maps = [fast_map(part, packs) for part in (attention.w_qkv, attention.w_o)]
        across = [None, None] if cross is None else [fast_map(part, packs) for part in (cross.w_query, cross.w_o)]
        return cls(block, attention, *maps, *across, fast_map(ff.w_in, packs), fast_map(ff.w_out, packs))


class FastEngine(Engine):
    """Takes over from a plain engine that has read the sources, if there are any, and no token yet."""

    def __init__(self, plain: TextEngine | SourceEngine) -> None:
        model = plain.model
        assert isinstance(model, Decoder | EncoderDecoder)
        super().__init__(model)
        self.model, self._plain = model, plain
        text = model if isinstance(model, Decoder) else None
        table = text.token if text is not None else model.target_token or model.token
        assert table is not None
        self.table: nn.Module = table
        self.embeddings = model.embeddings if text is not None else model.target_embeddings
        packs = packs_of(model)
        layers = [Layer.of(block, packs) for block in model.decoder.blocks]  # type: ignore[arg-type]
        self.layers = [layers[number % len(layers)] for number in range(model.decoder.n_layers)]
        self.output = _output(model.head, table, packs)

    def prefill(self, prompts: Prompts, copies: int = 1) -> Tensor:
        logits = self._plain.prefill(prompts)
        cache = self._plain._cache
        n_steps = int(prompts.limit.max())
        k, v = zip(*(_held(layer) for layer in cache.layers), strict=True)
        real = None if prompts.positions is None else prompts.positions >= 0
        self.keys = BranchKeys(list(k), list(v), real, copies, n_steps)
        self.cross = _memory(cache, self._plain)
        longest = torch.tensor([len(row) for row in prompts.rows])
        self.positions = longest.repeat_interleave(copies)  # (R,) where each row's next token stands
        last = int(longest.max()) + n_steps
        position = self.embeddings.position
        dtype = k[0].dtype
        self._places = None if position is None else position(torch.arange(last).clamp(max=_end(position, last)), dtype)
        return logits if copies == 1 else logits.repeat_interleave(copies, 0)

    def decode_one_token(self, tokens: Tensor) -> Tensor:
        x = self._embedded(tokens)  # (R, M)
        self.keys.step()
        mask = self.keys.mask
        for number, layer in enumerate(self.layers):
            x = self._layer(x, number, layer, mask)
        if self.model.decoder.norm is not None:
            x = self.model.decoder.norm(x)
        self.positions = self.positions + 1
        return self.output(x).float()

    def decode_tokens(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError("FastEngine goes one token at a time; several are for the plain engine")

    def truncate(self, length: int) -> None:
        raise NotImplementedError("FastEngine takes nothing back; that is for the plain engine")

    def select(self, rows: Tensor) -> None:
        self.positions = self.positions[rows]
        prompts = self.keys.select(rows)
        if prompts is not None:
            self.cross = [part.rows(prompts) for part in self.cross]

    def _embedded(self, tokens: Tensor) -> Tensor:
        part = self.embeddings
        x: Tensor = self.table(tokens[:, None])[:, 0]
        if part.segment is not None:
            x = x + part.segment.weight[0] * part.segment.scale
        if self._places is not None:
            x = x + self._places[self.positions]
        x = x if part.norm is None else part.norm(x)
        return x if part.projection is None else part.projection(x)

    def _layer(self, x: Tensor, number: int, layer: Layer, mask: Tensor | None) -> Tensor:
        block = layer.block
        x = _sublayer(block, block.attention_norm, x, lambda y: self._attend(y, number, layer, mask))
        if layer.cross_query is not None and block.cross_norm is not None:
            x = _sublayer(block, block.cross_norm, x, lambda y: self._attend_memory(y, number, layer))
        return _sublayer(block, block.ff_norm, x, lambda y: _feed_forward(y, layer))

    def _attend(self, x: Tensor, number: int, layer: Layer, mask: Tensor | None) -> Tensor:
        attention = layer.attention
        counts = (attention.n_heads, attention.n_kv_heads, attention.n_kv_heads)
        heads = layer.qkv(x).view(-1, self.keys.size, sum(counts), attention.d_head)  # (B, k, heads, D)
        q, k, v = (part.transpose(1, 2) for part in heads.split(counts, 2))  # each (B, heads, k, D)
        q, k = attention._normed(q, k)
        if attention.rope is not None:
            places = self.positions.view(-1, self.keys.size)
            q, k = attention.rope(q, places), attention.rope(k, places)
        return layer.out(_attended(attention, q, *self.keys.update(number, k, v), mask))

    def _attend_memory(self, x: Tensor, number: int, layer: Layer) -> Tensor:
        attention, memory = layer.block.cross_attention, self.cross[number]
        assert attention is not None and layer.cross_query is not None and layer.cross_out is not None
        q = layer.cross_query(x).view(-1, self.keys.size, attention.n_heads, attention.d_head).transpose(1, 2)
        q = q if attention.q_norm is None else attention.q_norm(q)
        return layer.cross_out(_attended(attention, q, memory.k, memory.v, memory.mask))


class MemoryKeys(NamedTuple):
    """Keys and values of an encoder's output (B, G, S, D), and what of it may be seen (B, 1, 1, S); None: all."""

    k: Tensor
    v: Tensor
    mask: Tensor | None

    def rows(self, prompts: Tensor) -> MemoryKeys:
        return MemoryKeys(*(None if x is None else x.index_select(0, prompts) for x in self))  # type: ignore[arg-type]


def _sublayer(block: Block, norm: nn.Module, x: Tensor, run: Map) -> Tensor:
    y = run(norm(x) if block.pre_norm else x)
    if block.residual:
        y = x + y
    return y if block.pre_norm else norm(y)


def _feed_forward(x: Tensor, layer: Layer) -> Tensor:
    ff, hidden = layer.block.ff, layer.ff_in(x)
    if ff.gated:
        gate, up = hidden.chunk(2, dim=-1)
        return layer.ff_out(ff.f(gate) * up)
    return layer.ff_out(ff.f(hidden))


def _attended(attention: MultiHeadAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """q (B, H, n, D) over k and v (B, G, S, D) → (B · n, H · D). The heads that share keys are more queries to them."""
    assert isinstance(attention.mechanism, Dot)
    n_batch, n_heads, n, d_head = q.shape
    n_shared = n_heads // k.shape[1]
    if n_shared > 1:
        q = q.reshape(n_batch, -1, n_shared * n, d_head)
        mask = mask if mask is None or mask.shape[2] == 1 else mask.repeat(1, 1, n_shared, 1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=attention.mechanism.factor(d_head))
    return out.reshape(n_batch, n_heads, n, d_head).transpose(1, 2).reshape(n_batch * n, n_heads * d_head)


def _output(head: nn.Module | None, table: nn.Module, packs: Packs | None) -> Map:
    """From states (R, M) to logits (R, V)."""
    assert head is not None
    if type(head) is not TokenHead:
        return lambda x: head(x[:, None], table.weight)[:, 0]
    weight = table.weight if head.weight is None else head.weight
    assert isinstance(weight, Tensor)
    if packs is None or not can_pack(weight):
        return lambda x: F.linear(head.hidden(x), weight, head.bias)
    packed = packs.map(weight, head.bias)
    return lambda x: packed(head.hidden(x))


def _held(cache: object) -> tuple[Tensor, Tensor]:
    assert isinstance(cache, GrowingCache)
    return cache.held()


def _memory(cache: ModelCache, plain: Engine) -> list[MemoryKeys]:
    keep = plain._keep if isinstance(plain, SourceEngine) else None
    mask = None if keep is None else keep.bool()[:, None, None]
    return [MemoryKeys(*held.update(), mask) for held in cache.cross]


def _end(position: nn.Module, last: int) -> int:
    """The last place a table has: texts stop before it, but the longest prompt and the longest text may be two."""
    max_len = getattr(position, "max_len", None)
    return last if max_len is None else max_len - 1
