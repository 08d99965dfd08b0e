"""The parts of a layer as functions of rows (R, width): linear maps over prepared weights, and norms.

A product of one row with a matrix is bound by how fast the matrix is read; oneDNN's own order, in blocks, is read up to
twice as fast as rows are, and faster still by a few rows at once. The price is a second copy of the weights, so very
large models do without.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import MultiHeadAttention, taps
from ..attention.cache import GrowingCache, ModelCache
from ..attention.edits import has_edits
from ..attention.mechanisms import Dot
from ..layers import FeedForward, LayerNorm
from ..layers.quantised_linear import Int8Linear
from ..models import Block, Decoder, EncoderDecoder
from ..models.heads import TokenHead
from .cached_engine import DecoderEngine, DecodingEngine, EncoderDecoderEngine
from .prompts import Prompts

_MOST_BYTES = 2 * 2**30  # weights of a model that are worth a second copy

Map = Callable[[Tensor], Tensor]
"""From rows (R, in) to rows (R, out)."""


class PackedLinear:
    """x Wᵀ + b, W in oneDNN's order."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.bias = None if bias is None else bias.detach()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")
        return out


class PackedWeights:
    """The packed maps of one model, each as long as its weight is what it was."""

    def __init__(self) -> None:
        self._maps: dict[int, tuple[object, PackedLinear]] = {}

    def map(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        mark = (_mark(weight), None if bias is None else bias.data_ptr())
        held = self._maps.get(id(weight))
        if held is None or held[0] != mark:
            held = self._maps[id(weight)] = mark, PackedLinear(weight, bias)
        return held[1]


_packs: weakref.WeakKeyDictionary[nn.Module, PackedWeights] = weakref.WeakKeyDictionary()


def packed_weights(model: nn.Module) -> PackedWeights | None:
    """What was packed for a model so far; None where its weights are better read as they are."""
    n_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    if n_bytes > _MOST_BYTES or not bool(torch.backends.mkldnn.enabled) or not _works():
        return None
    return _packs.setdefault(model, PackedWeights())


@cache
def _works() -> bool:
    """Whether this build of torch has the packed product."""
    if not torch.backends.mkldnn.is_available():
        return False
    weight, x = torch.eye(8), torch.arange(8.0)[None]
    try:
        return torch.equal(PackedLinear(weight, None)(x), x)
    except (RuntimeError, AttributeError):
        return False


def row_linear(module: nn.Module, packs: PackedWeights | None) -> Map:
    """A linear module as a function of rows: prepared if it is a plain one in float32 or int8, else as it is."""
    if type(module) is Int8Linear:
        return lambda x: module.product_rows(x, module.bias) if x.dtype == torch.float32 else module(x)
    if packs is None or type(module) is not nn.Linear or not can_pack(module.weight):
        return module
    return packs.map(module.weight, module.bias)


def row_norm(norm: nn.Module) -> Map:
    """A norm as a function: layer norm without the way through its module, any other as it is."""
    if type(norm) is not LayerNorm:
        return norm
    shape, weight, bias, eps = [norm.d], norm.weight, norm.bias, norm.eps
    return lambda x: torch.layer_norm(x, shape, weight, bias, eps)


def can_pack(weight: Tensor) -> bool:
    return weight.dtype == torch.float32 and weight.device.type == "cpu" and type(weight) in (Tensor, nn.Parameter)


def _mark(weight: Tensor) -> tuple[int, int, float]:
    """Where a weight lies, how often it was changed, and some of its numbers: changes of ``.data`` are not counted."""
    version = 0 if weight.is_inference() else weight._version
    return weight.data_ptr(), version, float(weight.detach().flatten()[::997].sum())


_STEPS = 64  # steps there is room for at a time
_STEPS_OF_BEAMS = 16  # the same for several beams, who then drop what is nobody's past


class BeamKeyCache:
    """Keys and values of all layers in one tensor (layers, 2, B, G, columns, D), for B prompts of ``size`` beams."""

    def __init__(self, held: list[tuple[Tensor, Tensor]], real: Tensor | None, size: int) -> None:
        """Begin with prompts: of each layer k and v (B, G, P, D); ``real`` (B, P) where some of it is padding."""
        k, _ = held[0]
        self.size, self.end = size, k.shape[2]
        self._held = torch.stack([torch.stack(pair) for pair in held])
        self._mask: Tensor | None = None  # (B, size, columns), added to scores: 0 or -inf
        if real is not None or size > 1:
            nothing = k.new_zeros(len(k), size, self.end)
            self._mask = nothing if real is None else nothing.masked_fill(~real[:, None], -math.inf)

    def step(self) -> Tensor | None:
        """Make room for one more token of every row, whose keys each layer then gives to ``update``.

        The mask (B, 1, size, columns) that goes with them; None where all may be seen.
        """
        if self.end + self.size > self._held.shape[4]:
            if self._mask is not None and self.size > 1:
                self._gather((self._mask[:, :, : self.end] == 0).any(1))
            self._make_room(_STEPS if self.size == 1 else _STEPS_OF_BEAMS)
        start, self.end = self.end, self.end + self.size
        self._new = self._held[..., start : self.end, :].unbind()
        self._k, self._v = (part.unbind() for part in self._held[..., : self.end, :].unbind(1))
        return None if self._mask is None else self._mask[:, None, :, : self.end]

    def update(self, layer: int, new: Tensor) -> tuple[Tensor, Tensor]:
        """Write a step's keys and values (B, 2G, size, D); all of the layer's, each (B, G, columns, D)."""
        self._new[layer].copy_(new.unflatten(1, (2, -1)).transpose(0, 1))
        return self._k[layer], self._v[layer]

    def select(self, rows: Tensor) -> Tensor | None:
        """Row r goes on from row rows[r]. The prompts that are left, (B',), where they are not all in their places."""
        n, k = self._held.shape[2], self.size
        if k == 1:
            return self._keep(rows)
        if len(rows) % k:
            return self._part(rows)
        home = rows.view(-1, k) // k  # (B', k)
        prompts = home[:, 0]
        if not bool((home == home[:, :1]).all()):
            return self._part(rows)
        moved = len(prompts) != n or not torch.equal(prompts, torch.arange(n))
        if moved:
            self._keep(prompts)
        assert self._mask is not None
        past = self._mask[:, :, : self.end]
        past.copy_(past.gather(1, (rows % k).view(-1, k, 1).expand(-1, -1, self.end)))
        return prompts if moved else None

    def _keep(self, prompts: Tensor) -> Tensor:
        """Some prompts, in any order; only what is written is copied."""
        old = self._held
        self._held = old.new_empty(*old.shape[:2], len(prompts), *old.shape[3:])
        self._held[..., : self.end, :] = old[..., : self.end, :].index_select(2, prompts)
        self._mask = None if self._mask is None else self._mask[prompts]
        return prompts

    def _part(self, rows: Tensor) -> Tensor:
        """Beams of a prompt no longer stay together: each becomes a prompt of its own, with its past as columns."""
        assert self._mask is not None
        prompts = rows // self.size
        self._mask = self._mask[prompts, rows % self.size, None]  # (R, 1, columns)
        self._held, self.size = self._held.index_select(2, prompts), 1
        self._gather(self._mask[:, 0, : self.end] == 0)
        if not self._mask.isinf().any():
            self._mask = None
        return prompts

    def _gather(self, alive: Tensor) -> None:
        """Keep each prompt's columns that are ``alive`` (B, columns), in order, and masked ones up to the longest's."""
        assert self._mask is not None
        n_columns = int(alive.sum(1).max())
        columns = alive.byte().argsort(dim=1, descending=True, stable=True)[:, :n_columns]  # (B, n)
        *sizes, room, width = self._held.shape
        first = torch.arange(math.prod(sizes)).view(*sizes, 1) * room  # of each head's rows
        rows = (first + columns[:, None]).flatten()
        self._held = self._held.view(-1, width).index_select(0, rows).view(*sizes, n_columns, width)
        self._mask = self._mask.gather(2, columns[:, None].expand(-1, self._mask.shape[1], -1))
        self.end = n_columns

    def _make_room(self, n_steps: int) -> None:
        """For so many steps more."""
        old, n_columns = self._held, self.end + n_steps * self.size
        self._held = old.new_empty(*old.shape[:4], n_columns, old.shape[5])
        self._held[..., : self.end, :] = old[..., : self.end, :]
        if self._mask is not None:
            others = ~torch.eye(self.size, dtype=torch.bool).repeat(1, n_steps)  # of a step's columns, not a beam's own
            later = self._mask.new_zeros(*self._mask.shape[:2], n_steps * self.size).masked_fill_(others, -math.inf)
            self._mask = torch.cat([self._mask[:, :, : self.end], later], 2)


def accelerate(engine: DecodingEngine) -> DecodingEngine:
    """The same engine, or one that writes the same texts sooner."""
    if isinstance(engine, DecoderEngine | EncoderDecoderEngine) and cpu_obstacle(engine) is None:
        return CpuEngine(engine)
    return engine


def cpu_obstacle(engine: DecoderEngine | EncoderDecoderEngine) -> str | None:
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


class RowAttention:
    """One attention module, from rows (R, M) to rows, k of them to a prompt."""

    def __init__(self, attention: MultiHeadAttention, packs: PackedWeights | None) -> None:
        assert isinstance(attention.mechanism, Dot)
        self.module, self.n_heads, self.d_head = attention, attention.n_heads, attention.d_head
        self.scale = attention.mechanism.factor(attention.d_head)
        self.n_shared = attention.n_heads // attention.n_kv_heads
        self.query = row_linear(attention.w_query if attention.cross else attention.w_qkv, packs)
        self.out = row_linear(attention.w_o, packs)
        self.rounded = isinstance(attention.w_o, Int8Linear)

    def to_itself(self, x: Tensor, layer: int, keys: BeamKeyCache, mask: Tensor | None, positions: Tensor) -> Tensor:
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


class RowBlock:
    """A block of the decoder, its parts as functions of rows."""

    def __init__(self, block: Block, packs: PackedWeights | None) -> None:
        assert isinstance(block.attention, MultiHeadAttention)
        self.pre_norm, self.residual, self.ff = block.pre_norm, block.residual, block.ff
        self.attention = RowAttention(block.attention, packs)
        self.cross = None if block.cross_attention is None else RowAttention(block.cross_attention, packs)
        self.norms = [row_norm(norm) for norm in (block.attention_norm, block.cross_norm, block.ff_norm) if norm]
        self.ff_in, self.ff_out = row_linear(block.ff.w_in, packs), row_linear(block.ff.w_out, packs)

    def __call__(
        self,
        x: Tensor,
        number: int,
        keys: BeamKeyCache,
        mask: Tensor | None,
        positions: Tensor,
        memory: list[MemoryKeys],
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


class CpuEngine(DecodingEngine):
    """Takes over from a plain engine that has read the sources, if there are any, and no token yet."""

    def __init__(self, plain: DecoderEngine | EncoderDecoderEngine) -> None:
        model = plain.model
        assert isinstance(model, Decoder | EncoderDecoder)
        super().__init__(model)
        self._plain = plain
        table = model.token if isinstance(model, Decoder) else model.target_token or model.token
        assert table is not None
        self.table: nn.Module = table
        self.embeddings = model.embeddings if isinstance(model, Decoder) else model.target_embeddings
        packs, stack = packed_weights(model), model.decoder
        blocks = [RowBlock(block, packs) for block in stack.blocks if isinstance(block, Block)]
        self.layers = [blocks[number % len(blocks)] for number in range(stack.n_layers)]
        self.norm = None if stack.norm is None else row_norm(stack.norm)
        self.output = _output(self.head, table, packs)

    def prefill(self, prompts: Prompts, copies: int = 1) -> Tensor:
        logits = self._plain.prefill(prompts)
        cache, n_steps = self._plain._cache, int(prompts.limit.max())
        real = None if prompts.positions is None else prompts.positions >= 0
        held = [layer.keys_and_values() for layer in cache.layers if isinstance(layer, GrowingCache)]
        self.keys = BeamKeyCache(held, real, copies)
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


def _output(head: nn.Module, table: nn.Module, packs: PackedWeights | None) -> Map:
    """From states (R, M) to logits (R, V)."""
    if type(head) is not TokenHead:
        return lambda x: head(x, table.weight)
    weight = head.weight if head.weight is not None else table.weight
    assert isinstance(weight, Tensor)
    if packs is None or not can_pack(weight):
        return lambda x: F.linear(head.hidden(x), weight, head.bias)
    packed = packs.map(weight, head.bias)
    return lambda x: packed(head.hidden(x))


def _memory(cache: ModelCache, plain: DecodingEngine) -> list[MemoryKeys]:
    keep = plain._padding_mask if isinstance(plain, EncoderDecoderEngine) else None
    held = [memory.update() for memory in cache.cross]
    mask = None
    if keep is not None and held:
        k, _ = held[0]
        mask = k.new_zeros(len(k), 1, 1, k.shape[2]).masked_fill(~keep.bool()[:, None, None], -math.inf)
    return [MemoryKeys(k.contiguous(), v.contiguous(), mask) for k, v in held]
