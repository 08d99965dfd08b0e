"""Floating-point operations of every matrix product of a model.

The product of an (m × k) with a (k × n) matrix takes 2·m·k·n operations forward and twice that backward (only once if
its input is data, which needs no gradient). Norms, activations, softmax and biases are not counted, as in torch's
FlopCounterMode. Two conventions are reported:

    full  every query with every key: the plain formula, and what torch's counter reports
    seen  only the pairs that the mask allows: the work of a fused kernel, about half with a causal mask
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..config import ModelConfig
from ..config.mixers import MixingWork, keys_per_query, pairs_flops
from ..foundation.checks import check_positive
from ..layers import GATED
from . import components
from .hierarchy import stage_configs

N_REGIONS = 36  # default number of regions of an image, common for detectors


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
    """The sizes that determine the cost of a stack."""

    name: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_ff: int
    length: int
    causal: bool
    memory: int | None = None  # length of the encoder's output; None without cross-attention
    d_memory: int = 0  # and its width

    @property
    def q_width(self) -> int:
        return self.n_heads * self.d_head

    @property
    def kv_width(self) -> int:
        return self.n_kv_heads * self.d_head


def n_patches(config: ModelConfig) -> int:
    return (config.image_size // config.patch_size) ** 2


def n_places(config: ModelConfig, length: int) -> int:
    """Length of an encoder's input: tokens, regions, or an image's class tokens, registers and patches."""
    return n_patches(config) + config.prefix_tokens if config.source == "image" else length


def source_places(config: ModelConfig, length: int, source_length: int | None) -> int:
    """Length of the source of an encoder-decoder."""
    if config.source == "image":
        return n_patches(config) + config.prefix_tokens
    if source_length is not None:
        return source_length
    return N_REGIONS if config.source == "regions" else length


def stacks_of(config: ModelConfig, length: int, source_length: int | None = None) -> list[StackShape]:
    """The stacks of a Transformer, first to last; a recurrent model has none."""
    if config.architecture == "recurrent":
        return []
    if config.architecture == "encoder-decoder":
        source = source_places(config, length, source_length)
        text = config if config.text_model is None else config.text_tower
        memory = source if config.resampler_tokens is None else config.resampler_tokens
        decoder = _stack_shape(text, "decoder", length, text.causal, memory, d_memory=config.d_model)
        return [_stack_shape(config, "encoder", source, causal=False), decoder]
    if config.architecture == "encoder":
        return [
            _stack_shape(stage, "encoder", n_places(stage, length), causal=False) for stage in stage_configs(config)
        ]
    if config.architecture == "two-tower":
        text = config.text_tower
        tower = _stack_shape(text, "decoder", length, causal=text.architecture == "decoder" and text.causal)
        return [_stack_shape(config, "encoder", n_places(config, length), causal=False), tower]
    return [_stack_shape(config, "decoder", length, config.causal)]


def configs_of_stacks(config: ModelConfig) -> list[ModelConfig]:
    """The config of each stack in ``stacks_of``: a text tower or a stage has its own."""
    if config.text_model is not None:
        return [config, config.text_tower]
    return [config, config] if config.architecture == "encoder-decoder" else stage_configs(config)


def _stack_shape(
    config: ModelConfig, name: str, length: int, causal: bool, memory: int | None = None, d_memory: int = 0
) -> StackShape:
    n_layers, n_heads, d_ff = components.stack_sizes(config, cross=memory is not None)
    heads = (n_heads, config.n_kv_heads or n_heads, components.head_width(config, n_heads))
    return StackShape(name, n_layers, *heads, d_ff, length, causal, memory, d_memory)


def count(config: ModelConfig, batch: int, length: int, source_length: int | None = None) -> list[Flops]:
    """The operations of a batch, part by part. In an encoder-decoder, ``length`` is that of the target."""
    check_positive(batch=batch, length=length)
    if config.architecture == "recurrent":
        return list(_recurrent(config, batch, length, length if source_length is None else source_length))
    parts: list[Flops] = []
    configs = configs_of_stacks(config)
    stacks = stacks_of(config, length, source_length)
    for number, (stack_config, stack) in enumerate(zip(configs, stacks, strict=True)):
        if number == 0 or config.stages is None:
            parts += _embedding(stack_config, stack, batch)
        else:  # each patch is merged from four of the previous stage
            parts += [_unmasked_flops(stack.name, "merging", 4.0 * batch * stack.length * stack_config.d_model**2)]
        parts += _layers(stack_config, stack, batch)
    if config.resampler_tokens is not None:
        n, source = config.resampler_tokens, stacks[0]
        layer = _read_states(config, source, batch, n, source.length + n)
        parts.append(_unmasked_flops("encoder", "resampler", config.resampler_layers * layer))
    if config.pooling == "map":  # one learned query
        parts.append(_unmasked_flops("head", "pooling", _read_states(config, stacks[0], batch, 1, stacks[0].length)))
    return parts + _head(config, batch, length)


def n_tokens(config: ModelConfig, length: int, source_length: int | None = None) -> int:
    """Tokens or patches of one example, source and target together; class tokens and registers are not counted."""
    if config.architecture == "recurrent":
        return length + (length if source_length is None else source_length)
    n = sum(stack.length for stack in stacks_of(config, length, source_length))
    return n - (config.prefix_tokens if config.source == "image" and config.has_encoder else 0)


def training_flops(config: ModelConfig, length: int, source_length: int | None = None) -> float:
    """Operations of one example forward and backward: unmasked pairs only, backward counted as twice forward (PaLM)."""
    return 3 * sum(part.forward_seen for part in count(config, 1, length, source_length))


def _unmasked_flops(part: str, kind: str, forward: float, backward: float | None = None) -> Flops:
    """The operations of a part without a mask, in which both conventions agree."""
    backward = 2 * forward if backward is None else backward
    return Flops(part, kind, forward, backward, forward, backward)


def _embedding(config: ModelConfig, stack: StackShape, batch: int) -> list[Flops]:
    """Patch and region projections, or the projection after a token table narrower than d_model; lookups are free."""
    if stack.name == "encoder" and config.source != "text":
        if config.source == "image":
            forward = 2.0 * batch * n_patches(config) * config.n_channels * config.patch_size**2 * config.d_model
        else:
            forward = 2.0 * batch * stack.length * (config.d_region + config.d_box) * config.d_model
        return [_unmasked_flops(stack.name, "embedding", forward, forward)]  # the input needs no gradient
    if config.d_embed is None:
        return []
    return [_unmasked_flops(stack.name, "embedding", 2.0 * batch * stack.length * config.d_embed * config.d_model)]


def _layers(config: ModelConfig, stack: StackShape, batch: int) -> Iterator[Flops]:
    tokens, width = batch * stack.length, config.d_model
    if config.mixing.weights:
        maps = 4 * stack.q_width + 4 * stack.kv_width
        if config.global_projections and config.global_tokens:
            maps += 2 * stack.q_width + 4 * stack.kv_width
        products = stack.n_layers * 1.0 * tokens * width * maps
        yield _unmasked_flops(stack.name, "projections", products)
    elif config.mixing.products is not None:
        yield _unmasked_flops(stack.name, "projections", stack.n_layers * 2.0 * tokens * config.mixing.products(config))
    full = stack.n_layers * tokens * mixing_flops(config, stack, stack.length)
    seen = tokens * sum(mixing_flops(config, stack, keys_seen(config, stack, layer)) for layer in range(stack.n_layers))
    yield Flops(stack.name, "attention", full, 2 * full, seen, 2 * seen)
    if config.positions == "xl":
        yield _distances(config, stack, batch)
    if stack.memory is not None:
        products = 4.0 * (width * tokens * stack.q_width + stack.d_memory * batch * stack.memory * stack.kv_width)
        yield _unmasked_flops(stack.name, "cross projections", stack.n_layers * products)
        by_token = mixing_flops(config, stack, stack.memory, stack.memory / stack.length)
        yield _unmasked_flops(stack.name, "cross attention", stack.n_layers * tokens * by_token)
    if not stack.d_ff:
        return
    if config.experts is not None:
        yield _unmasked_flops(stack.name, "router", stack.n_layers * 2.0 * tokens * width * config.experts)
    yield _unmasked_flops(stack.name, "feed-forward", stack.n_layers * tokens * _feed_forward_flops(config, stack.d_ff))


def _feed_forward_flops(config: ModelConfig, d_ff: int) -> float:
    """Operations of one token in a feed-forward network, or in its experts without their router."""
    networks = 1 if config.experts is None else config.experts_per_token + config.shared_experts
    return 2.0 * config.d_model * networks * d_ff * (3 if config.activation in GATED else 2)


def _read_states(config: ModelConfig, stack: StackShape, batch: int, n_queries: int, n_keys: int) -> float:
    """Learned vectors attend to the states of a stack, then a feed-forward network (resampler, "map" pooling)."""
    products = 4.0 * config.d_model * (n_queries * stack.q_width + n_keys * stack.kv_width)
    attention = n_queries * mixing_flops(config, stack, n_keys, n_keys / n_queries)
    return batch * (products + attention + n_queries * _feed_forward_flops(config, stack.d_ff))


def mixing_flops(config: ModelConfig, stack: StackShape, keys: float, sources: float | None = None) -> float:
    """Operations to mix one token with ``keys`` others, as declared by the mixer; cross-attention, with ``sources``
    tokens for each one that is mixed, may use the dot product instead."""
    mixing = config.mixing
    size, of_keys = mixing.size_of(config.mixer_size), 1.0 if sources is None else sources
    work = MixingWork(stack.n_heads, stack.d_head, keys, size, stack.n_kv_heads, of_keys)
    if sources is not None and not mixing.cross:
        return pairs_flops(work)
    times = 2 if config.global_projections and config.global_tokens else 1  # local and global keys side by side
    return times * float(mixing.flops(work))


def _distances(config: ModelConfig, stack: StackShape, batch: int) -> Flops:
    """Transformer-XL: W_r R once per layer, (q + v)·r for every distance, u·k for every key."""
    distances = 2 * stack.length - 1
    table = 2.0 * distances * stack.q_width**2
    by_pair = 2.0 * batch * stack.length * stack.q_width * (distances + 1)
    forward, backward = stack.n_layers * (table + by_pair), stack.n_layers * (table + 2 * by_pair)
    share = keys_seen(config, stack, 0) / stack.length
    seen, seen_backward = (stack.n_layers * (table + n * share * by_pair) for n in (1, 2))
    return Flops(stack.name, "distances", forward, backward, seen, seen_backward)


def keys_seen(config: ModelConfig, stack: StackShape, layer: int) -> float:
    """Unmasked keys per query of this layer, averaged over the text."""
    return keys_per_query(config, layer, stack.length, causal=stack.causal, has_memory=stack.memory is not None)


def _head(config: ModelConfig, batch: int, length: int) -> list[Flops]:
    width = config.d_model
    if config.architecture == "two-tower":
        shared = width if config.d_shared is None else config.d_shared
        projections = (0 if config.d_shared is None else width) + config.text_tower.d_model
        return [_unmasked_flops("head", "comparison", 2.0 * batch * shared * (projections + batch))]
    if config.head == "none":
        return []
    if config.head == "classify":
        pooled = 4.0 * batch * n_places(config, length) * width if config.pooling in ("mean", "attention") else 0.0
        dense = 2.0 * batch * width**2 if config.pooler != "none" else 0.0
        rows = {"first-and-mean": 2, "class-tokens": config.class_tokens}.get(config.pooling, 1) * width
        return [_unmasked_flops("head", "classes", pooled + dense + 2.0 * batch * rows * config.n_classes)]
    if config.head in ("tag", "span"):
        n_classes = 2 if config.head == "span" else config.n_classes
        return [_unmasked_flops("head", "classes", 2.0 * batch * length * width * n_classes)]
    if config.head == "replaced":
        return [_unmasked_flops("head", "replaced", 2.0 * batch * length * width * (width + 1))]
    text = config if config.text_model is None else config.text_model
    width = text.d_model
    inner = (text.d_embed or width) if text.head_transform else width
    matrix = inner * (config.output_vocab_size + (width if text.head_transform else 0))
    return [_unmasked_flops("head", "logits", 2.0 * batch * length * matrix)]


def _recurrent(config: ModelConfig, batch: int, length: int, source: int) -> Iterator[Flops]:
    """Every gate weight once per token, and attention from each target token to the source."""
    width, embed = config.d_model, config.d_embed or config.d_model
    n_gates = 4 if config.cell == "lstm" else 3
    n_to = config.n_decoder_layers or config.n_layers
    directions = 2 if config.bidirectional else 1
    units = width // directions
    into = embed + (config.n_layers - 1) * width + config.n_layers * units
    yield _unmasked_flops("encoder", "cells", 2.0 * batch * source * directions * n_gates * units * into)
    yield _unmasked_flops("bridge", "states", 2.0 * batch * (2 if config.cell == "lstm" else 1) * n_to * width**2)
    attends = config.alignment != "none"
    fed = width if attends and (config.alignment == "additive" or config.input_feeding) else 0
    into = embed + fed + (n_to - 1) * width
    yield _unmasked_flops("decoder", "cells", 2.0 * batch * length * n_gates * width * (into + n_to * width))
    if attends:
        mapped = 2.0 * batch * width**2
        keys = source * mapped if config.alignment in ("additive", "concat") else 0.0
        queries = 0.0 if config.alignment == "dot" else length * mapped
        yield _unmasked_flops("decoder", "projections", keys + queries)
        yield _unmasked_flops("decoder", "attention", 4.0 * batch * length * source * width)
        read = 2 * (embed + 2 * width) if config.alignment == "additive" else 2 * width
        yield _unmasked_flops("decoder", "readout", 2.0 * batch * length * read * width)
    yield from _head(config, batch, length)
