"""Decoding on a CPU: the model's own step, written out over branching keys and packed weights.

The prompt goes through the model as it is; from then on every token is one pass over (rows, width) matrices with the
same numbers in the same places: no masks to build, no frames, no copies of keys for beams, and the keys of an encoder's
output once a source. What the model computes is unchanged; where its layers are none of these, or someone records what
passes through them, the plain engine goes on.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import MultiHeadAttention, taps
from ..attention.cache import GrowingCache, ModelCache
from ..attention.edits import has_edits
from ..attention.mechanisms import Dot
from ..layers import FeedForward
from ..layers.quantised_linear import Int8Linear
from ..models import Block, Decoder, EncoderDecoder
from ..models.heads import TokenHead
from .engine import Engine, SourceEngine, TextEngine
from .fast_keys import BranchKeys
from .fast_layers import Map, Packs, can_pack, fast_map, fast_norm, packs_of
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
    if torch.is_autocast_enabled("cpu"):
        return "autocast says in which numbers each layer computes"
    if taps._recorder is not None:
        return "what passes through its layers is recorded"
    if has_edits(model):
        return "what passes through its layers is changed on its way"
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


class MemoryKeys(NamedTuple):
    """Keys and values of an encoder's output (B, G, S, D), and what is added to scores (B, 1, 1, S); None: nothing."""

    k: Tensor
    v: Tensor
    mask: Tensor | None

    def rows(self, prompts: Tensor) -> MemoryKeys:
        mask = None if self.mask is None else self.mask.index_select(0, prompts)
        return MemoryKeys(self.k.index_select(0, prompts), self.v.index_select(0, prompts), mask)


class Attention:
    """One attention module, from rows (R, M) to rows, k of them to a prompt."""

    def __init__(self, attention: MultiHeadAttention, packs: Packs | None) -> None:
        assert isinstance(attention.mechanism, Dot)
        self.module, self.n_heads, self.d_head = attention, attention.n_heads, attention.d_head
        self.scale = attention.mechanism.factor(attention.d_head)
        self.n_shared = attention.n_heads // attention.n_kv_heads
        self.query = fast_map(attention.w_query if attention.cross else attention.w_qkv, packs)
        self.out = fast_map(attention.w_o, packs)
        self.rounded = isinstance(attention.w_o, Int8Linear)

    def to_itself(self, x: Tensor, layer: int, keys: BranchKeys, mask: Tensor | None, positions: Tensor) -> Tensor:
        attention, n = self.module, self.n_heads
        heads = self.query(x).view(-1, keys.size, n + 2 * attention.n_kv_heads, self.d_head).transpose(1, 2)
        q, new = heads[:, :n], heads[:, n:]  # (B, H, k, D), and keys and values (B, 2G, k, D)
        if attention.rope is not None or attention.q_norm is not None:
            key, value = new.chunk(2, 1)
            q, key = attention._normed(q, key)
            if attention.rope is not None:
                places = positions.view(-1, keys.size)
                q, key = attention.rope(q, places), attention.rope(key, places)
            new = torch.cat([key, value], 1)
        return self._attended(q, *keys.update(layer, new), mask)

    def to_memory(self, x: Tensor, memory: MemoryKeys, size: int) -> Tensor:
        q = self.query(x).view(-1, size, self.n_heads, self.d_head).transpose(1, 2)
        if self.module.q_norm is not None:
            q = self.module.q_norm(q)
        return self._attended(q, *memory)

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """q (B, H, n, D) over k and v (B, G, S, D) → (B · n, M). Heads that share keys are more queries to them."""
        n_batch, _, n, _ = q.shape
        if self.n_shared > 1:
            q = q.reshape(n_batch, -1, self.n_shared * n, self.d_head)
            mask = mask if mask is None or mask.shape[2] == 1 else mask.repeat(1, 1, self.n_shared, 1)
        if q.shape[2] == 1 or not self.rounded:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        else:
            y = self._by_products(q, k, v, mask)
        return self.out(y.reshape(n_batch, -1, n, self.d_head).transpose(1, 2).reshape(n_batch * n, -1))

    def _by_products(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """The formula: for a few queries over a few hundred keys faster than the fused kernel, up to twice.

        Its last bits differ, which rounded weights do not mind; in full precision beams that nearly tie would.
        """
        n_batch, n_groups, n, _ = q.shape
        q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        if mask is None:
            scores = torch.bmm(q * self.scale, k.mT)
        else:
            mask = mask.expand(n_batch, n_groups, n, -1).flatten(0, 1)
            scores = torch.baddbmm(mask, q, k.mT, alpha=self.scale)
        return torch.bmm(torch.softmax(scores, -1), v)


class Layer:
    """A block of the decoder, its parts as functions of rows."""

    def __init__(self, block: Block, packs: Packs | None) -> None:
        assert isinstance(block.attention, MultiHeadAttention)
        self.pre_norm, self.residual, self.ff = block.pre_norm, block.residual, block.ff
        self.attention = Attention(block.attention, packs)
        self.cross = None if block.cross_attention is None else Attention(block.cross_attention, packs)
        self.norms = [fast_norm(norm) for norm in (block.attention_norm, block.cross_norm, block.ff_norm) if norm]
        self.ff_in, self.ff_out = fast_map(block.ff.w_in, packs), fast_map(block.ff.w_out, packs)

    def __call__(
        self, x: Tensor, number: int, keys: BranchKeys, mask: Tensor | None, positions: Tensor, memory: list[MemoryKeys]
    ) -> Tensor:
        """x (R, M) → (R, M)."""
        norms = iter(self.norms)
        norm = next(norms)
        y = self.attention.to_itself(norm(x) if self.pre_norm else x, number, keys, mask, positions)
        x = self._added(x, y, norm)
        if self.cross is not None:
            norm = next(norms)
            x = self._added(x, self.cross.to_memory(norm(x) if self.pre_norm else x, memory[number], keys.size), norm)
        norm = next(norms)
        return self._added(x, self._feed_forward(norm(x) if self.pre_norm else x), norm)

    def _added(self, x: Tensor, y: Tensor, norm: Map) -> Tensor:
        if self.residual:
            y = x + y
        return y if self.pre_norm else norm(y)

    def _feed_forward(self, x: Tensor) -> Tensor:
        hidden = self.ff_in(x)
        if self.ff.gated:
            gate, up = hidden.chunk(2, dim=-1)
            return self.ff_out(self.ff.f(gate) * up)
        return self.ff_out(self.ff.f(hidden))


class FastEngine(Engine):
    """Takes over from a plain engine that has read the sources, if there are any, and no token yet."""

    def __init__(self, plain: TextEngine | SourceEngine) -> None:
        model = plain.model
        assert isinstance(model, Decoder | EncoderDecoder)
        super().__init__(model)
        self._plain = plain
        table = model.token if isinstance(model, Decoder) else model.target_token or model.token
        assert table is not None
        self.table: nn.Module = table
        self.embeddings = model.embeddings if isinstance(model, Decoder) else model.target_embeddings
        packs, stack = packs_of(model), model.decoder
        blocks = [Layer(block, packs) for block in stack.blocks if isinstance(block, Block)]
        self.layers = [blocks[number % len(blocks)] for number in range(stack.n_layers)]
        self.norm = None if stack.norm is None else fast_norm(stack.norm)
        self.output = _output(self.head, table, packs)

    def prefill(self, prompts: Prompts, copies: int = 1) -> Tensor:
        logits = self._plain.prefill(prompts)
        cache, n_steps = self._plain._cache, int(prompts.limit.max())
        real = None if prompts.positions is None else prompts.positions >= 0
        held = [layer.keys_and_values() for layer in cache.layers if isinstance(layer, GrowingCache)]
        self.keys = BranchKeys(held, real, copies)
        self.memory = _memory(cache, self._plain)
        lengths = torch.tensor([len(row) for row in prompts.rows])
        self.positions = lengths.repeat_interleave(copies)  # (R,) where each row's next token stands
        self.places = self._all_places(int(lengths.max()) + n_steps, held[0][0].dtype)
        del self._plain._cache, self._plain  # from here on what it held is held here
        return logits if copies == 1 else logits.repeat_interleave(copies, 0)

    def decode_one_token(self, tokens: Tensor) -> Tensor:
        x = self._embedded(tokens)  # (R, M)
        mask = self.keys.step()
        for number, layer in enumerate(self.layers):
            x = layer(x, number, self.keys, mask, self.positions, self.memory)
        self.positions = self.positions + 1
        return self.output(x if self.norm is None else self.norm(x)).float()

    def select(self, rows: Tensor) -> None:
        self.positions = self.positions[rows]
        prompts = self.keys.select(rows)
        if prompts is not None:
            self.memory = [part.rows(prompts) for part in self.memory]

    def decode_tokens(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError("FastEngine goes one token at a time; several are for the plain engine")

    def truncate(self, length: int) -> None:
        raise NotImplementedError("FastEngine takes nothing back; that is for the plain engine")

    def _embedded(self, tokens: Tensor) -> Tensor:
        part = self.embeddings
        x: Tensor = self.table(tokens[:, None])[:, 0]
        if part.segment is not None:
            x = x + part.segment.weight[0] * part.segment.scale
        if self.places is not None:
            x = x + self.places[self.positions]
        x = x if part.norm is None else part.norm(x)
        return x if part.projection is None else part.projection(x)

    def _all_places(self, n: int, dtype: torch.dtype) -> Tensor | None:
        """The position vectors of the first n places (n, M), or of as many as there are."""
        position = self.embeddings.position
        if position is None:
            return None
        return position(torch.arange(n if position.max_len is None else min(n, position.max_len)), dtype)


def _output(head: nn.Module, table: nn.Module, packs: Packs | None) -> Map:
    """From states (R, M) to logits (R, V)."""
    if type(head) is not TokenHead:
        return lambda x: head(x, table.weight)
    weight = head.weight if head.weight is not None else table.weight
    assert isinstance(weight, Tensor)
    if packs is None or not can_pack(weight):
        return lambda x: F.linear(head.hidden(x), weight, head.bias)
    packed = packs.map(weight, head.bias)
    return lambda x: packed(head.hidden(x))


def _memory(cache: ModelCache, plain: Engine) -> list[MemoryKeys]:
    keep = plain._keep if isinstance(plain, SourceEngine) else None
    held = [memory.update() for memory in cache.cross]
    mask = None
    if keep is not None and held:
        k, _ = held[0]
        mask = k.new_zeros(len(k), 1, 1, k.shape[2]).masked_fill(~keep.bool()[:, None, None], -math.inf)
    return [MemoryKeys(k.contiguous(), v.contiguous(), mask) for k, v in held]
