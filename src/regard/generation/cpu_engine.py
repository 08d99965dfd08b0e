"""Decoding on a CPU: the model's decode step over packed weights and a key cache shared by beams.

The prompt goes through the model; then every token is one pass over (rows, width) matrices with the same results: no
masks or frames to build, no keys copied for beams, and one copy of an encoder's keys per source. If a layer is not
supported, or activations are recorded or edited, DecodingEngine is used instead (``cpu_obstacle``).

Weights: the product of one row with a matrix is bound by memory bandwidth, and oneDNN's blocked layout is read up to
twice as fast as the usual one. It takes a second copy of the weights, so very large models do without it.

Keys: the k beams of a prompt share one block of columns: the prompt's tokens, then k per step, one for each beam. A
mask marks the columns of each beam's past. When beam i continues beam j, row i of the mask becomes row j, and no keys
are copied. Columns that are in no beam's past are dropped every few steps.
"""

from __future__ import annotations

import math
import weakref
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import MultiHeadAttention
from ..attention.cache import GrowingCache
from ..attention.mechanisms import Dot
from ..layers import FeedForward, LayerNorm, TokenEmbedding
from ..layers.quantised_linear import Int8Linear
from ..models import Block, Model
from ..models.block import Residuals, RowMap, Stack, SublayerNorms
from ..models.components import TokenHead
from .cached_engine import DecodingEngine, step_obstacle
from .prompts import Prompts
from .ragged_rows import RaggedRows, attend_ragged

_MAX_PACKED_BYTES = 2 * 2**30  # weights of larger models are not packed
_GROW_STEPS = 64  # steps by which a cache is extended
_GROW_STEPS_BEAMS = 16  # the same for several beams, which drop unused columns first


class PackedLinear:
    """x Wᵀ + b with W in oneDNN's blocked layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.bias = None if bias is None else bias.detach()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")
        return out


PackedWeights = dict[int, tuple[object, PackedLinear]]  # by id of the weight: its fingerprint and its packed form
_packed: weakref.WeakKeyDictionary[nn.Module, PackedWeights] = weakref.WeakKeyDictionary()


def packed_weights(model: nn.Module) -> PackedWeights | None:
    """The packed weights of a model; None if it is too large or this build of torch has no packed product."""
    n_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    if n_bytes > _MAX_PACKED_BYTES or not bool(torch.backends.mkldnn.enabled) or not _can_run_packed():
        return None
    return _packed.setdefault(model, {})


def packed_linear(packed: PackedWeights, weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """The packed form of a weight, packed again when the weight has changed.

    The fingerprint includes a checksum of some values, because writes to ``.data`` do not change a tensor's version.
    """
    version = 0 if weight.is_inference() else weight._version
    checksum = float(weight.detach().flatten()[::997].sum())
    fingerprint = (weight.data_ptr(), version, checksum, None if bias is None else bias.data_ptr())
    entry = packed.get(id(weight))
    if entry is None or entry[0] != fingerprint:
        entry = packed[id(weight)] = fingerprint, PackedLinear(weight, bias)
    return entry[1]


@cache
def _can_run_packed() -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    weight, x = torch.eye(8), torch.arange(8.0)[None]
    try:
        return torch.equal(PackedLinear(weight, None)(x), x)
    except (RuntimeError, AttributeError):
        return False


def row_linear(module: nn.Module, packed: PackedWeights | None) -> RowMap:
    """A linear module as a function of rows: packed if float32, its integer product if int8, else the module itself."""
    if type(module) is Int8Linear:
        return lambda x: module.product_rows(x, module.bias) if x.dtype == torch.float32 else module(x)
    if packed is None or type(module) is not nn.Linear or not can_pack(module.weight):
        return module
    return packed_linear(packed, module.weight, module.bias)


def row_norm(norm: RowMap | None) -> RowMap | None:
    """A norm as a function of rows: a layer norm without the overhead of its module, any other norm unchanged."""
    if type(norm) is not LayerNorm:
        return norm
    shape, weight, bias, eps = [norm.d], norm.weight, norm.bias, norm.eps
    return lambda x: torch.layer_norm(x, shape, weight, bias, eps)


def can_pack(weight: Tensor) -> bool:
    return weight.dtype == torch.float32 and weight.device.type == "cpu" and type(weight) in (Tensor, nn.Parameter)


class RowKeys(Protocol):
    """A key cache with ``size`` rows per prompt; ``mask`` (B, 1, size, columns) is added to scores.

    If ``ragged`` is set, rows are the tokens of texts of different lengths: size is 1, the mask (n, 1, W, columns).
    """

    @property
    def size(self) -> int: ...

    @property
    def mask(self) -> Tensor | None: ...

    @property
    def ragged(self) -> RaggedRows | None: ...

    def update(self, layer: int, new: Tensor) -> tuple[Tensor, Tensor]: ...


class BeamKeyCache:
    """Keys and values of all layers in one tensor (layers, 2, B, G, columns, D), for B prompts of ``size`` beams."""

    ragged = None

    def __init__(self, layers: list[tuple[Tensor, Tensor]], padding_mask: Tensor | None, size: int) -> None:
        """From the prompts' k and v (B, G, P, D) of each layer; ``padding_mask`` (B, P) is False at padding."""
        k, _ = layers[0]
        self.size, self.end = size, k.shape[2]
        self._data = torch.stack([torch.stack(pair) for pair in layers])
        self.mask: Tensor | None = None  # (B, 1, size, columns) of the current step
        self._mask: Tensor | None = None  # (B, size, columns), added to scores: 0 or -inf
        if padding_mask is not None or size > 1:
            self._mask = k.new_zeros(len(k), size, self.end)
            if padding_mask is not None:
                self._mask = self._mask.masked_fill(~padding_mask[:, None], -math.inf)

    def next_step(self) -> None:
        """Reserve columns for one token per row, which ``update`` then fills layer by layer, and set ``mask``."""
        if self.end + self.size > self._data.shape[4]:
            if self._mask is not None and self.size > 1:
                self._gather_columns((self._mask[:, :, : self.end] == 0).any(1))
            self._grow(_GROW_STEPS if self.size == 1 else _GROW_STEPS_BEAMS)
        start, self.end = self.end, self.end + self.size
        self._new = self._data[..., start : self.end, :].unbind()
        self._k, self._v = (part.unbind() for part in self._data[..., : self.end, :].unbind(1))
        self.mask = None if self._mask is None else self._mask[:, None, :, : self.end]

    def update(self, layer: int, new: Tensor) -> tuple[Tensor, Tensor]:
        """Write a step's keys and values (B, 2G, size, D); returns all k and v of the layer, (B, G, columns, D)."""
        self._new[layer].copy_(new.unflatten(1, (2, -1)).transpose(0, 1))
        return self._k[layer], self._v[layer]

    def select(self, rows: Tensor) -> Tensor | None:
        """Row r continues row rows[r]. Returns the remaining prompts (B',), or None if all are still in place."""
        n, k = self._data.shape[2], self.size
        if k == 1:
            return self._select_prompts(rows)
        if len(rows) % k:
            return self._split_beams(rows)
        owners = rows.view(-1, k) // k  # (B', k)
        prompts = owners[:, 0]
        if not bool((owners == owners[:, :1]).all()):
            return self._split_beams(rows)
        moved = len(prompts) != n or not torch.equal(prompts, torch.arange(n))
        if moved:
            self._select_prompts(prompts)
        assert self._mask is not None
        past = self._mask[:, :, : self.end]
        past.copy_(past.gather(1, (rows % k).view(-1, k, 1).expand(-1, -1, self.end)))
        return prompts if moved else None

    def _select_prompts(self, prompts: Tensor) -> Tensor:
        """Keep the given prompts, in this order; copies only the written columns."""
        old = self._data
        self._data = old.new_empty(*old.shape[:2], len(prompts), *old.shape[3:])
        self._data[..., : self.end, :] = old[..., : self.end, :].index_select(2, prompts)
        self._mask = None if self._mask is None else self._mask[prompts]
        return prompts

    def _split_beams(self, rows: Tensor) -> Tensor:
        """If the beams of a prompt are no longer adjacent, each becomes a prompt with only its past as columns."""
        assert self._mask is not None
        prompts = rows // self.size
        self._mask = self._mask[prompts, rows % self.size, None]  # (R, 1, columns)
        self._data, self.size = self._data.index_select(2, prompts), 1
        self._gather_columns(self._mask[:, 0, : self.end] == 0)
        if not self._mask.isinf().any():
            self._mask = None
        return prompts

    def _gather_columns(self, used: Tensor) -> None:
        """Keep the ``used`` columns (B, columns) of each prompt, in order; masked columns pad them to one width."""
        assert self._mask is not None
        n_columns = int(used.sum(1).max())
        columns = used.byte().argsort(dim=1, descending=True, stable=True)[:, :n_columns]  # (B, n)
        *sizes, capacity, width = self._data.shape
        first = torch.arange(math.prod(sizes)).view(*sizes, 1) * capacity  # first row of each head
        rows = (first + columns[:, None]).flatten()
        self._data = self._data.view(-1, width).index_select(0, rows).view(*sizes, n_columns, width)
        self._mask = self._mask.gather(2, columns[:, None].expand(-1, self._mask.shape[1], -1))
        self.end = n_columns

    def _grow(self, n_steps: int) -> None:
        old, n_columns = self._data, self.end + n_steps * self.size
        self._data = old.new_empty(*old.shape[:4], n_columns, old.shape[5])
        self._data[..., : self.end, :] = old[..., : self.end, :]
        if self._mask is not None:
            others = ~torch.eye(self.size, dtype=torch.bool).repeat(1, n_steps)  # columns of other beams
            later = self._mask.new_zeros(*self._mask.shape[:2], n_steps * self.size).masked_fill_(others, -math.inf)
            self._mask = torch.cat([self._mask[:, :, : self.end], later], 2)


def accelerate(engine: DecodingEngine) -> DecodingEngine:
    """A CPU engine in place of ``engine`` if the model supports it, else ``engine`` itself."""
    return CpuEngine(engine) if type(engine) is DecodingEngine and cpu_obstacle(engine) is None else engine


def cpu_obstacle(engine: DecodingEngine) -> str | None:
    """Why ``CpuEngine`` cannot replace an engine, in a few words; None if it can."""
    return "its cache is static" if engine.static else row_step_obstacle(engine.model)


def row_step_obstacle(model: Model) -> str | None:
    """Why a model's decode step cannot be computed in rows on a CPU, in a few words; None if it can."""
    return "it is not on a CPU" if model.device.type != "cpu" else row_obstacle(model)


def row_obstacle(model: Model) -> str | None:
    """Why ``RowDecoder`` cannot compute a model's decoder, in a few words; None if it can."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return "gradients are enabled, or it is being compiled"
    if model.is_recurrent or model.config.model_class is not None:
        return "it is not one of the built-in Transformers"
    if model.config.attention_backend not in ("auto", "sdpa"):
        return "its config chooses an attention backend"
    return row_block_obstacle(model.decoder) or step_obstacle(model)


def row_block_obstacle(stack: Stack) -> str | None:
    """Why ``RowBlock`` cannot compute the layers of a stack; None if it can."""
    for block in stack.blocks:
        if type(block) is not Block or block.mask is not None or type(block.ff) is not FeedForward:
            return "a layer has a window, experts or a class of its own"
    return None


class MemoryKeys(NamedTuple):
    """Keys and values of an encoder's output (B, G, S, D), and a mask (B, 1, 1, S) added to scores."""

    k: Tensor
    v: Tensor
    mask: Tensor | None

    def select(self, prompts: Tensor) -> MemoryKeys:
        mask = None if self.mask is None else self.mask.index_select(0, prompts)
        return MemoryKeys(self.k.index_select(0, prompts), self.v.index_select(0, prompts), mask)


class RowAttention:
    """One attention module as a function of rows (R, M), ``keys.size`` rows per prompt."""

    def __init__(self, attention: MultiHeadAttention, packed: PackedWeights | None) -> None:
        assert isinstance(attention.mechanism, Dot)
        self.module, self.n_heads, self.d_head = attention, attention.n_heads, attention.d_head
        self.scale = attention.mechanism.factor(attention.d_head)
        self.n_shared = attention.n_heads // attention.n_kv_heads
        self.query = row_linear(attention.w_query if attention.cross else attention.w_qkv, packed)
        self.out = row_linear(attention.w_o, packed)
        self._packed = packed
        self.is_int8 = isinstance(attention.w_o, Int8Linear)

    def self_attend(self, x: Tensor, layer: int, keys: RowKeys, positions: Tensor) -> Tensor:
        attention, n = self.module, self.n_heads
        heads = self.query(x).view(-1, keys.size, n + 2 * attention.n_kv_heads, self.d_head).transpose(1, 2)
        q, new = heads[:, :n], heads[:, n:]  # (B, H, k, D), and keys and values (B, 2G, k, D)
        if attention.rope is not None or attention.q_norm is not None:
            key, value = new.chunk(2, 1)
            q, key = attention._normalise_qk(q, key)
            if attention.rope is not None:
                row_positions = positions.view(-1, keys.size)
                q, key = attention.rope(q, row_positions), attention.rope(key, row_positions)
            new = torch.cat([key, value], 1)
        return self._attend(q, *keys.update(layer, new), keys.mask, keys.ragged)

    def cross_attend(self, x: Tensor, memory: MemoryKeys, keys: RowKeys) -> Tensor:
        q = self.query(x).view(-1, keys.size, self.n_heads, self.d_head).transpose(1, 2)
        return self._attend(self.module._normalise(q, self.module.q_norm), *memory, keys.ragged)

    def memory_keys(self, x: Tensor) -> Tensor:
        """Keys and values (R, 2G, 1, D) of an encoder's states (R, M)."""
        heads = row_linear(self.module.w_kv, self._packed)(x).view(len(x), -1, 1, self.d_head)
        if self.module.k_norm is None:
            return heads
        key, value = heads.chunk(2, 1)
        return torch.cat([self.module._normalise(key, self.module.k_norm), value], 1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ragged: RaggedRows | None) -> Tensor:
        """q (B, H, n, D) over k and v (B, G, S, D) → (B · n, M). Heads that share keys become additional queries."""
        if ragged is not None:
            assert mask is not None
            return self.out(attend_ragged(q, k, v, mask, self.scale, ragged, self.n_shared > 1))
        n_batch, _, n, _ = q.shape
        if self.n_shared > 1:
            q = q.reshape(n_batch, -1, self.n_shared * n, self.d_head)
            mask = mask if mask is None or mask.shape[2] == 1 else mask.repeat(1, 1, self.n_shared, 1)
        if q.shape[2] == 1 or not self.is_int8:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        else:
            # The plain formula is up to twice as fast as the fused kernel for a few queries over a few hundred keys.
            # Only for int8: its last bits differ from the kernel's, which could swap nearly tied float32 beams.
            rows, keys, values = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
            if mask is None:
                scores = torch.bmm(rows * self.scale, keys.mT)
            else:
                mask = mask.expand(*q.shape[:3], -1).flatten(0, 1)
                scores = torch.baddbmm(mask, rows, keys.mT, alpha=self.scale)
            y = torch.bmm(torch.softmax(scores, -1), values)
        return self.out(y.reshape(n_batch, -1, n, self.d_head).transpose(1, 2).reshape(n_batch * n, -1))


class RowBlock:
    """A block of the decoder as a function of rows."""

    def __init__(self, block: Block, packed: PackedWeights | None) -> None:
        assert isinstance(block.attention, MultiHeadAttention)
        assert isinstance(block.ff, FeedForward)
        residuals = block.residuals()
        attention, cross, ff = (SublayerNorms(*map(row_norm, norms)) for norms in residuals[:3])
        self.residuals, self.ff = Residuals(attention, cross, ff, residuals.residual, residuals.parallel), block.ff
        self.attention = RowAttention(block.attention, packed)
        self.cross = None if block.cross_attention is None else RowAttention(block.cross_attention, packed)
        self.ff_in, self.ff_out = row_linear(block.ff.w_in, packed), row_linear(block.ff.w_out, packed)

    def __call__(self, x: Tensor, number: int, keys: RowKeys, positions: Tensor, memory: list[MemoryKeys]) -> Tensor:
        """x (R, M) → (R, M)."""
        attend_memory: RowMap | None = None
        if (cross := self.cross) is not None:
            attend_memory = lambda y: cross.cross_attend(y, memory[number], keys)  # noqa: E731
        attend = lambda y: self.attention.self_attend(y, number, keys, positions)  # noqa: E731
        return self.residuals.run(x, attend, attend_memory, self._feed_forward)

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.ff_out(self.ff.activate(self.ff_in(x)))


def row_layers(stack: Stack, packed: PackedWeights | None) -> list[RowBlock]:
    """The layers of a stack as functions of rows; layers that share their weights are one function."""
    by_block = {block: RowBlock(block, packed) for block in stack.layers}
    return [by_block[block] for block in stack.layers]


class RowDecoder:
    """A model's decoder as a function of rows, one token each; the caller owns the key cache."""

    def __init__(self, model: Any) -> None:
        self.table: TokenEmbedding = model.token if model.is_decoder_only else model.target_table
        self.embeddings = model.embeddings if model.is_decoder_only else model.target_embeddings
        packed, stack = packed_weights(model), model.decoder
        self.layers = row_layers(stack, packed)
        self.norm = None if stack.norm is None else row_norm(stack.norm)
        self.output = _output_map(model.head, model.output_table, packed)
        projection = self.embeddings.projection
        self.projection = None if projection is None else row_linear(projection, packed)

    def position_table(self, n: int, dtype: torch.dtype) -> Tensor | None:
        """The vectors of the first n positions, or of all if there are fewer, (n, M); None without any."""
        if (position := self.embeddings.position) is None:
            return None
        n = n if position.max_len is None else min(n, position.max_len)
        return position(torch.arange(n, device=self.table.weight.device), dtype)

    def logits(
        self, tokens: Tensor, positions: Tensor, table: Tensor | None, keys: RowKeys, memory: list[MemoryKeys]
    ) -> Tensor:
        """Next-token logits (R, V) after ``tokens`` (R,) at ``positions`` (R,), whose keys and values it writes."""
        return self.output(self.states(tokens, positions, table, keys, memory)).float()

    def states(
        self, tokens: Tensor, positions: Tensor, table: Tensor | None, keys: RowKeys, memory: list[MemoryKeys]
    ) -> Tensor:
        """The last layer's states (R, M), the input of ``output``."""
        embeddings = self.embeddings
        x: Tensor = self.table(tokens[:, None])[:, 0]  # (R, M)
        if embeddings.segment is not None:
            x = x + embeddings.segment.weight[0] * embeddings.segment.scale
        if table is not None:
            x = x + table[positions]
        x = x if embeddings.norm is None else embeddings.norm(x)
        x = x if self.projection is None else self.projection(x)
        for number, layer in enumerate(self.layers):
            x = layer(x, number, keys, positions, memory)
        return x if self.norm is None else self.norm(x)


class CpuEngine(DecodingEngine):
    """Takes over from a DecodingEngine that has encoded its sources, if any, and read no token yet."""

    def __init__(self, plain: DecodingEngine) -> None:
        self.model, self.head, self.static, self._plain = plain.model, plain.head, False, plain
        self.decoder = RowDecoder(plain.model)

    def prefill(self, prompts: Prompts, copies: int = 1) -> Tensor:
        logits = self._plain.prefill(prompts)
        cache, source_mask = self._plain._cache, self._plain._padding_mask
        del self._plain  # frees its cache: BeamKeyCache has a copy
        padding_mask = None if prompts.positions is None else prompts.positions >= 0
        layers = [layer.keys_and_values() for layer in cache.layers if isinstance(layer, GrowingCache)]
        self.keys = BeamKeyCache(layers, padding_mask, copies)
        pairs, mask = [memory.update() for memory in cache.cross], None
        if source_mask is not None and pairs:
            k, _ = pairs[0]
            mask = k.new_zeros(len(k), 1, 1, k.shape[2]).masked_fill(~source_mask.bool()[:, None, None], -math.inf)
        self.memory = [MemoryKeys(k.contiguous(), v.contiguous(), mask) for k, v in pairs]
        lengths = torch.tensor([len(row) for row in prompts.rows])
        self.positions = lengths.repeat_interleave(copies)  # (R,) position of the next token
        n_positions = int(lengths.max()) + int(prompts.limit.max())
        self.position_table = self.decoder.position_table(n_positions, layers[0][0].dtype)
        return logits if copies == 1 else logits.repeat_interleave(copies, 0)

    def decode_one_token(self, tokens: Tensor) -> Tensor:
        self.keys.next_step()
        logits = self.decoder.logits(tokens, self.positions, self.position_table, self.keys, self.memory)
        self.positions = self.positions + 1
        return logits

    def select(self, rows: Tensor) -> None:
        self.positions = self.positions[rows]
        prompts = self.keys.select(rows)
        if prompts is not None:
            self.memory = [part.select(prompts) for part in self.memory]

    def decode_tokens(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError("CpuEngine decodes one token at a time; DecodingEngine can decode several")

    def truncate(self, length: int) -> None:
        raise NotImplementedError("CpuEngine cannot truncate; DecodingEngine can")


def _output_map(head: nn.Module, table: Tensor, packed: PackedWeights | None) -> RowMap:
    """From states (R, M) to logits (R, V)."""
    if type(head) is not TokenHead:
        return lambda x: head(x, table)
    weight = table if head.weight is None else head.weight
    if packed is None or not can_pack(weight):
        return lambda x: head(x, table)
    linear = packed_linear(packed, weight, head.bias)
    return lambda x: head.cap_logits(linear(head.hidden(x)))
