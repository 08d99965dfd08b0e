"""Quantities that follow exactly from a config: parameters by part, the KV cache, growth of operations with length.

Parameters are counted in the model itself, built on the meta device, which allocates nothing. ``models.model_flops``
counts the operations of a forward pass; this module computes the length from which attention takes more of them than
the matrices, and table 1 of the paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import nn

from ..config import ModelConfig
from ..config.mixers import keys_per_query
from ..foundation.checks import check_positive
from ..models import components
from ..models.block import Block
from ..models.build import build
from ..models.experts import ExpertLinear
from ..models.model_flops import Flops, StackShape, configs_of_stacks, mixing_flops, stacks_of
from ..models.recurrent_cells import StateCache
from ..training.optimiser import roles

CacheDtype = Literal["fp32", "bf16", "int8"]
CACHE_DTYPE_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
_POSITION_BYTES = 8

# ------------------------------------------------------------------------------------- parameters


@dataclass(frozen=True)
class ParameterGroup:
    """The parameters of one part of a model."""

    part: str  # encoder, decoder, embedding, head or bridge
    kind: str
    number: int
    cast: int  # how many of them autocast copies to half precision
    muon: int  # how many of them Muon trains, if it is the optimiser
    layers: int = 1  # the number of layers they belong to


def parameter_groups(config: ModelConfig) -> list[ParameterGroup]:
    """The parameters of a model by part and kind; tied parameters count once, at their first use."""
    model = build(config, device="meta")
    by_muon = {role.param for role in roles(model) if role.in_layer}
    products = (nn.Linear, nn.Conv2d, ExpertLinear)
    multiplied = {module.weight for module in model.modules() if isinstance(module, products)}
    in_experts = {p for x in model.modules() if isinstance(x, ExpertLinear) for p in x.parameters()}
    counts: dict[tuple[str, str], list[int]] = {}
    for name, p in model.named_parameters():
        # Some matrices are used in products without being the weight of an nn.Linear.
        projects = name.endswith(("patches.weight", "head.weight", "w_r")) or ".mechanism.w_" in name
        is_bias = p.dim() == 1 and name.endswith(".bias") and any(f".{part}." in f".{name}" for part in _PRODUCTS)
        is_cast = p in multiplied or projects or is_bias
        part, kind = _part_and_kind(name)
        entry = counts.setdefault((part, EXPERTS if p in in_experts else kind), [0, 0, 0])
        for n, counted in enumerate((True, is_cast, p in by_muon)):
            entry[n] += p.numel() if counted else 0
    layers = {name: sum(isinstance(x, Block) for x in stack.modules()) for name, stack in model.named_children()}
    if config.share_layers:  # all layers use one block
        layers = dict.fromkeys(layers, config.n_layers)
    return [
        ParameterGroup(part, kind, number, cast, muon, max(1, layers.get(part, 1)))
        for (part, kind), (number, cast, muon) in counts.items()
    ]


EXPERTS = "experts"  # the kind of parameters of which each token uses only some
_PRODUCTS = (
    *("w_qkv", "w_query", "w_kv", "w_o", "w_in", "w_out", "w_select", "w_step"),
    *("transform", "projection", "patches", "out", "dense"),
)
_KINDS = {"attention": "attention", "cross_attention": "cross attention", "ff": "feed-forward"}
_NORMS = ("attention_norm", "cross_norm", "ff_norm", "attention_output_norm", "cross_output_norm", "ff_output_norm")
_SCALES = ("attention_scale", "cross_scale", "ff_scale")
_KINDS |= dict.fromkeys((*_NORMS, *_SCALES, "norm"), "norms")
_KINDS |= {"rnn": "cells", "ahead": "cells", "back": "cells", "position_bias": "position bias"}


def _part_and_kind(name: str) -> tuple[str, str]:
    """`encoder.blocks.0.ff.w_in.weight` → encoder, feed-forward; `token.weight` → embedding, tokens."""
    first, *rest = name.split(".")
    if first in ("token", "target_token"):
        return "embedding", "tokens" if first == "token" else "target tokens"
    if first in ("embeddings", "target_embeddings"):
        return "embedding", "positions" if "position" in rest else "other"
    if first in ("encoder", "decoder"):
        return first, next((_KINDS[word] for word in rest if word in _KINDS), "other")
    return ("bridge", "states") if first == "bridge" else ("head", first if first != "head" else "logits")


# ------------------------------------------------------------------------------------- KV cache


@dataclass(frozen=True)
class CacheLayer:
    """The cache of one layer during decoding."""

    layer: int
    kind: Literal["all", "window", "cross", "state", "memory"]
    tokens: int  # cached positions
    bytes: int
    place: int  # bytes per cached position, or of one recurrent state


def kv_cache(
    config: ModelConfig, batch: int, length: int, source_length: int | None = None, dtype: CacheDtype = "bf16"
) -> list[CacheLayer]:
    """The self-attention cache of each layer, then the cross-attention caches, which are never int8."""
    if config.architecture in ("encoder", "two-tower"):
        return []
    size = CACHE_DTYPE_BYTES[dtype]
    if config.architecture == "recurrent":
        return _recurrent_cache(config, batch, length if source_length is None else source_length, max(2, size))
    config, stack = configs_of_stacks(config)[-1], stacks_of(config, length, source_length)[-1]
    if not config.mixing.by_token:  # no cache: the whole text is read again at every step
        return []
    if config.mixing.recurrent and config.mixing.conv_width is not None:
        width = config.mixing.conv_width(config)
        state = 4 * stack.q_width * config.mixing.size_of(config.mixer_size)  # always fp32
        n_bytes = batch * (state + (config.conv_size - 1) * width * max(2, size)) + _POSITION_BYTES
        return [CacheLayer(layer, "state", 1, n_bytes, n_bytes) for layer in range(stack.n_layers)]
    layers = []
    for layer in range(stack.n_layers):
        window = components.window_of(config, layer)
        slots = length if window is None or window >= length else window
        scales = stack.n_kv_heads * 4 if dtype == "int8" else 0
        place = 2 * batch * (stack.kv_width * size + scales)
        n_bytes = (slots + 1) * (place + _POSITION_BYTES) + _POSITION_BYTES  # one extra slot for padding
        layers.append(CacheLayer(layer, "all" if slots == length else "window", slots, n_bytes, place))
    if stack.memory is not None:
        tokens, place = stack.memory, 2 * batch * stack.kv_width * max(2, size)
        layers += [CacheLayer(layer, "cross", tokens, tokens * place, place) for layer in range(stack.n_layers)]
    return layers


def _recurrent_cache(config: ModelConfig, batch: int, source: int, size: int) -> list[CacheLayer]:
    """A state of constant size, a few earlier states for rewinding, and the memory that attention reads."""
    n_layers = config.n_decoder_layers or config.n_layers
    input_feeding = config.alignment not in ("none", "additive") and config.input_feeding
    n_vectors = n_layers * (2 if config.cell == "lstm" else 1) + int(input_feeding)
    state = batch * (n_vectors * config.d_model * size + _POSITION_BYTES)
    layers = [CacheLayer(0, "state", 1, (1 + StateCache.n_states) * state, state)]
    if config.alignment != "none":
        n_tensors = 2 if config.alignment in ("additive", "concat") else 1
        place = n_tensors * batch * config.d_model * size
        layers.append(CacheLayer(0, "memory", source, source * place, place))
    return layers


# ------------------------------------------------------------------------------------- growth with the length

PAPER, ALL_PAIRS, SEEN = "T²·d = T·d²", "all pairs = the layer's matrices", "the same, hidden pairs not counted"
_MAX_TOKENS = 1 << 40  # the longest length tried; with a window, attention may never reach the matrices


def crossover(
    config: ModelConfig, batch: int, length: int, source_length: int | None, flops: list[Flops]
) -> dict[str, float | None]:
    """The length from which attention takes more operations than the matrices of a layer, in three conventions.

    The first is the paper's, T = d. None means never. ``flops`` are those of this batch and length.
    """
    if config.architecture == "recurrent" or not config.mixing.pairs:
        return dict.fromkeys((PAPER, ALL_PAIRS, SEEN))
    config, stack = configs_of_stacks(config)[-1], stacks_of(config, length, source_length)[-1]
    kinds = ("projections", "cross projections", "feed-forward")
    matrices = sum(part.forward for part in flops if part.part == stack.name and part.kind in kinds)
    per_token = matrices / (batch * stack.length)
    keys_by_layer = [_keys_by_length(config, stack, layer) for layer in range(stack.n_layers)]

    def attention(keys: float) -> float:
        """Operations of one token in one layer; Transformer-XL's relative positions add as much as its keys."""
        distances = 4.0 * stack.q_width * keys if config.positions == "xl" else 0.0
        return mixing_flops(config, stack, keys) + distances

    return {
        PAPER: float(config.d_model),
        ALL_PAIRS: _shortest_length(lambda n: stack.n_layers * attention(n), per_token),
        SEEN: _shortest_length(lambda n: sum(attention(keys(n)) for keys in keys_by_layer), per_token),
    }


def _shortest_length(flops_per_token: Callable[[int], float], target: float) -> float | None:
    """The shortest length at which a token's attention takes ``target`` operations, by bisection."""
    low, high = 0, 1
    while flops_per_token(high) < target:
        low, high = high, 2 * high
        if high > _MAX_TOKENS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if flops_per_token(middle) < target else (low, middle)
    return float(high)


def _keys_by_length(config: ModelConfig, stack: StackShape, layer: int) -> Callable[[int], float]:
    """The number of keys per query in this layer, as a function of the length."""

    def keys(n: int) -> float:
        return keys_per_query(config, layer, n, causal=stack.causal, has_memory=stack.memory is not None)

    if config.sparsity != "bigbird":
        return keys
    # Counting pairs of blocks is too slow for long texts, but n whole blocks have a + b·n + c·n² pairs.
    a, b, c = (n_blocks * config.sparsity_size for n_blocks in (8, 16, 32))
    u, v, w = (n * keys(n) for n in (a, b, c))

    def extrapolated_pairs(x: int) -> float:
        left, middle = u * (x - b) * (x - c) / ((a - b) * (a - c)), v * (x - a) * (x - c) / ((b - a) * (b - c))
        return left + middle + w * (x - a) * (x - b) / ((c - a) * (c - b))  # Lagrange

    return lambda n: keys(n) if n <= c else extrapolated_pairs(n) / n


@dataclass(frozen=True)
class LayerKind:
    """A row of table 1 (Vaswani et al. 2017, §4): the cost of a layer over T vectors of width d."""

    name: str
    complexity: str
    flops: float  # operations of the term ``complexity``, counting multiplications and additions, for one text
    projections: float  # further operations, of the layer's projections
    sequential: float  # steps that must run one after another
    path: float  # steps between the two positions farthest apart
    path_text: str


def layer_kinds(length: int, width: int, window: int | None = None) -> list[LayerKind]:
    """Self-attention compared with recurrence and convolution, for a text of ``length`` and vectors of ``width``."""
    check_positive(length=length, width=width)
    t, d, r, k = float(length), float(width), float(min(window or max(1, length // 8), length)), 3
    return [
        LayerKind("self-attention", "T²·d", 4 * t * t * d, 8 * t * d * d, 1, 1, "1"),
        LayerKind("recurrent", "T·d²", 2 * t * d * d, 2 * t * d * d, t, t, "T"),
        LayerKind("convolutional", "k·T·d²", 2 * k * t * d * d, 0.0, 1, max(1.0, math.log(t, k)), "logₖ T"),
        LayerKind("self-attention (restricted)", "r·T·d", 4 * r * t * d, 8 * t * d * d, 1, math.ceil(t / r), "T/r"),
    ]
