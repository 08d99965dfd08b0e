"""Floating-point operations of every matrix product of a model.

The product of an (m × k) with a (k × n) matrix takes 2·m·k·n operations forward and twice that backward (once where its
input is data, which needs no gradient). Norms, activations, softmax and biases are not counted, as in torch's counter.
Two conventions are reported:

    full  every query against every key: the plain formula, and what torch's counter sees
    seen  only the pairs a mask lets through: what a fused kernel has to do, about half of it with a causal mask
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..config import ModelConfig
from ..config.mixers import MixingWork, keys_per_query
from ..foundation.checks import check_positive
from ..layers import GATED
from . import components

N_REGIONS = 36  # regions of an image unless given: what detectors usually return


@dataclass(frozen=True)
class Flops:
    """Operations of one part of a model for a batch, in the two conventions."""

    part: str  # encoder, decoder, head, …
    kind: str  # embedding, projections, attention, feed-forward, …
    forward: float
    backward: float
    forward_seen: float
    backward_seen: float


@dataclass(frozen=True)
class StackShape:
    """The sizes of a stack of layers that its costs depend on."""

    name: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_ff: int
    length: int
    causal: bool
    memory: int | None = None  # length of the encoder's output; None without cross-attention

    @property
    def q_width(self) -> int:
        return self.n_heads * self.d_head

    @property
    def kv_width(self) -> int:
        return self.n_kv_heads * self.d_head


def n_patches(config: ModelConfig) -> int:
    return (config.image_size // config.patch_size) ** 2


def n_places(config: ModelConfig, length: int) -> int:
    """Length of an encoder's input: tokens, regions, or an image's class token and patches."""
    return n_patches(config) + 1 if config.source == "image" else length


def source_places(config: ModelConfig, length: int, source_length: int | None) -> int:
    """Length of the input of an encoder beside a decoder."""
    if config.source == "image":
        return n_patches(config) + 1
    if source_length is not None:
        return source_length
    return N_REGIONS if config.source == "regions" else length


def stacks_of(config: ModelConfig, length: int, source_length: int | None = None) -> list[StackShape]:
    """The stacks of a Transformer, first to last; a recurrent model has none."""
    if config.architecture == "recurrent":
        return []
    if config.architecture == "encoder-decoder":
        source = source_places(config, length, source_length)
        decoder = _stack_shape(config, "decoder", length, config.causal, memory=source)
        return [_stack_shape(config, "encoder", source, causal=False), decoder]
    if config.architecture == "encoder":
        return [_stack_shape(config, "encoder", n_places(config, length), causal=False)]
    return [_stack_shape(config, "decoder", length, config.causal)]


def _stack_shape(config: ModelConfig, name: str, length: int, causal: bool, memory: int | None = None) -> StackShape:
    n_layers, n_heads, d_ff = components.stack_sizes(config, cross=memory is not None)
    heads = (n_heads, config.n_kv_heads or n_heads, components.head_width(config, n_heads))
    return StackShape(name, n_layers, *heads, d_ff, length, causal, memory)


def count(config: ModelConfig, batch: int, length: int, source_length: int | None = None) -> list[Flops]:
    """The operations of a batch of texts, part by part. ``length`` is the target's beside an encoder's source."""
    check_positive(batch=batch, length=length)
    if config.architecture == "recurrent":
        return list(_recurrent(config, batch, length, length if source_length is None else source_length))
    parts: list[Flops] = []
    for stack in stacks_of(config, length, source_length):
        parts += _embedding(config, stack, batch)
        parts += _layers(config, stack, batch)
    return parts + _head(config, batch, length)


def n_tokens(config: ModelConfig, length: int, source_length: int | None = None) -> int:
    """Tokens or patches of one example, those of both sides where there are two; a class token is none."""
    if config.architecture == "recurrent":
        return length + (length if source_length is None else source_length)
    places = sum(stack.length for stack in stacks_of(config, length, source_length))
    return places - (1 if config.source == "image" and config.has_encoder else 0)


def training_flops(config: ModelConfig, length: int, source_length: int | None = None) -> float:
    """Operations of one example forward and backward, only unmasked pairs, backward as twice forward (PaLM)."""
    return 3 * sum(part.forward_seen for part in count(config, 1, length, source_length))


def _unmasked(part: str, kind: str, forward: float, backward: float | None = None) -> Flops:
    """A part without a mask: both conventions agree."""
    backward = 2 * forward if backward is None else backward
    return Flops(part, kind, forward, backward, forward, backward)


def _embedding(config: ModelConfig, stack: StackShape, batch: int) -> list[Flops]:
    """Patch and region projections. Token lookups cost nothing; a narrower table is followed by a matrix."""
    if stack.name == "encoder" and config.source != "text":
        if config.source == "image":
            forward = 2.0 * batch * n_patches(config) * config.n_channels * config.patch_size**2 * config.d_model
        else:
            forward = 2.0 * batch * stack.length * (config.d_region + config.d_box) * config.d_model
        return [_unmasked(stack.name, "embedding", forward, forward)]  # the input needs no gradient
    if config.d_embed is None:
        return []
    return [_unmasked(stack.name, "embedding", 2.0 * batch * stack.length * config.d_embed * config.d_model)]


def _layers(config: ModelConfig, stack: StackShape, batch: int) -> Iterator[Flops]:
    tokens, width = batch * stack.length, config.d_model
    if config.mixing.weights:
        products = stack.n_layers * 4.0 * tokens * width * (stack.q_width + stack.kv_width)
        yield _unmasked(stack.name, "projections", products)
    elif config.mixing.recurrent:  # gate, values, B, C and Δ in; the heads out
        shared = (config.n_kv_heads or 1) * config.mixing.size_of(config.mixer_size)
        rows = 3 * stack.q_width + 2 * shared + stack.n_heads
        yield _unmasked(stack.name, "projections", stack.n_layers * 2.0 * tokens * width * rows)
    full = stack.n_layers * tokens * mixing_flops(config, stack, stack.length)
    seen = tokens * sum(mixing_flops(config, stack, keys_seen(config, stack, layer)) for layer in range(stack.n_layers))
    yield Flops(stack.name, "attention", full, 2 * full, seen, 2 * seen)
    if config.positions == "xl":
        yield _distances(config, stack, batch)
    if stack.memory is not None:
        products = 4.0 * width * (tokens * stack.q_width + batch * stack.memory * stack.kv_width)
        yield _unmasked(stack.name, "cross projections", stack.n_layers * products)
        by_token = mixing_flops(config, stack, stack.memory, cross=True)
        yield _unmasked(stack.name, "cross attention", stack.n_layers * tokens * by_token)
    if not stack.d_ff:
        return
    matrices = 3 if config.activation in GATED else 2
    networks = 1
    if config.experts is not None:
        networks = config.experts_per_token + config.shared_experts
        yield _unmasked(stack.name, "router", stack.n_layers * 2.0 * tokens * width * config.experts)
    hidden = networks * stack.d_ff
    yield _unmasked(stack.name, "feed-forward", stack.n_layers * 2.0 * tokens * width * hidden * matrices)


def mixing_flops(config: ModelConfig, stack: StackShape, keys: float, cross: bool = False) -> float:
    """Operations of one token's mixing, as its mechanism declares; cross-attention may use the dot product instead."""
    mixing = config.mixing
    work = MixingWork(stack.n_heads, stack.d_head, keys, mixing.size_of(config.mixer_size))
    if cross and not mixing.cross:
        return 4.0 * stack.n_heads * stack.d_head * keys
    return float(mixing.flops(work))


def _distances(config: ModelConfig, stack: StackShape, batch: int) -> Flops:
    """Transformer-XL: W_r R once a layer, (q + v)·r for every distance, u·k for every key."""
    distances = 2 * stack.length - 1
    table = 2.0 * distances * stack.q_width**2
    by_pair = 2.0 * batch * stack.length * stack.q_width * (distances + 1)
    forward, backward = stack.n_layers * (table + by_pair), stack.n_layers * (table + 2 * by_pair)
    share = keys_seen(config, stack, 0) / stack.length
    seen, seen_backward = (stack.n_layers * (table + n * share * by_pair) for n in (1, 2))
    return Flops(stack.name, "distances", forward, backward, seen, seen_backward)


def keys_seen(config: ModelConfig, stack: StackShape, layer: int) -> float:
    """Unmasked keys per query of this layer, on average over the text."""
    return keys_per_query(config, layer, stack.length, causal=stack.causal, has_memory=stack.memory is not None)


def _head(config: ModelConfig, batch: int, length: int) -> list[Flops]:
    width = config.d_model
    if config.head == "none":
        return []
    if config.head == "classify":
        pooled = 4.0 * batch * n_places(config, length) * width if config.pooling != "first" else 0.0
        dense = 2.0 * batch * width**2 if config.pooler != "none" else 0.0
        return [_unmasked("head", "classes", pooled + dense + 2.0 * batch * width * config.n_classes)]
    inner = (config.d_embed or width) if config.head_transform else width
    matrix = inner * (config.output_vocab_size + (width if config.head_transform else 0))
    return [_unmasked("head", "logits", 2.0 * batch * length * matrix)]


def _recurrent(config: ModelConfig, batch: int, length: int, source: int) -> Iterator[Flops]:
    """Every weight of the gates once a token, and attention from each target token to the source."""
    width, embed = config.d_model, config.d_embed or config.d_model
    n_gates = 4 if config.cell == "lstm" else 3
    n_to = config.n_decoder_layers or config.n_layers
    directions = 2 if config.bidirectional else 1
    units = width // directions
    into = embed + (config.n_layers - 1) * width + config.n_layers * units
    yield _unmasked("encoder", "cells", 2.0 * batch * source * directions * n_gates * units * into)
    yield _unmasked("bridge", "states", 2.0 * batch * (2 if config.cell == "lstm" else 1) * n_to * width**2)
    attends = config.alignment != "none"
    fed = width if attends and (config.alignment == "additive" or config.input_feeding) else 0
    into = embed + fed + (n_to - 1) * width
    yield _unmasked("decoder", "cells", 2.0 * batch * length * n_gates * width * (into + n_to * width))
    if attends:
        mapped = 2.0 * batch * width**2
        keys = source * mapped if config.alignment in ("additive", "concat") else 0.0
        queries = 0.0 if config.alignment == "dot" else length * mapped
        yield _unmasked("decoder", "projections", keys + queries)
        yield _unmasked("decoder", "attention", 4.0 * batch * length * source * width)
        read = 2 * (embed + 2 * width) if config.alignment == "additive" else 2 * width
        yield _unmasked("decoder", "readout", 2.0 * batch * length * read * width)
    yield from _head(config, batch, length)
