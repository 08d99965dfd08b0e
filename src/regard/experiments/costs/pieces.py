"""The pieces of a training step: what each stretch of it keeps, and what it needs for a moment.

Derived from what autograd keeps of this repository's own code, on a GPU: a norm keeps its input, a product its input
and its weight, fused attention q, k, v, the output and a number a row, dropout a byte a number, and so on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from ...config import ModelConfig
from ...models.flops import StackShape, n_patches, source_places, stacks_of
from .activations import HIDDEN
from .parameters import Weights

Precision = Literal["fp32", "bf16", "fp16"]
Attention = Literal["fused", "reference"]

MIB = 1 << 20
CHUNK_BYTES = 512 * MIB
"""Of fp32 logits that the loss holds at once on a GPU (``training.loss``)."""
MUON_AT_ONCE = 1 << 26
"""Numbers Muon makes orthogonal at once (``training.muon``)."""


@dataclass(frozen=True)
class Setting:
    """How a model is trained, as far as memory depends on it."""

    batch: int
    length: int
    source_length: int | None = None
    precision: Precision = "bf16"
    attention: Attention = "fused"
    checkpointing: bool = False
    optimiser: Literal["adam", "adamw", "muon"] = "adamw"
    ema: bool = False
    accumulate: int = 1
    smoothing: float = 0.0
    masked: bool = True
    """Whether padding is masked where the tasks mask it: the encoder's side of pairs, texts to classify."""
    counted: float = 1.0
    """Share of the targets that count: all, or those a masked language model is asked."""
    workspace: int = 64 * MIB
    """What the device's matrix library keeps for itself."""

    @property
    def width(self) -> int:
        """Bytes of a number that a matrix product reads or writes."""
        return 4 if self.precision == "fp32" else 2


class Share(NamedTuple):
    """Bytes that go with the weights of a piece."""

    grads: float = 0.0
    """Their gradients."""
    cast: float = 0.0
    """Half-precision copies of them."""


NOTHING = Share()


@dataclass(frozen=True)
class Piece:
    """One stretch of the walk. All numbers are bytes."""

    name: str
    saved: dict[str, float] = field(default_factory=dict)
    """Kept from the forward pass until this piece's backward pass is done."""
    forward: float = 0.0
    """More than that, for a moment of the forward pass."""
    backward: float = 0.0
    """Needed for a moment of the backward pass, beside what is saved and the gradients so far."""
    share: Share = NOTHING
    """What goes with its weights."""
    layer: int | None = None
    """Pieces of one layer are computed again together where layers are checkpointed."""

    @property
    def kept(self) -> float:
        return sum(self.saved.values())


def source_numbers(config: ModelConfig, setting: Setting) -> int:
    if not config.has_encoder or config.source == "text":
        return 0
    if config.source == "image":
        return config.n_channels * config.image_size**2
    return source_places(config, setting.length, setting.source_length) * (config.d_region + config.d_box)


def pieces_of(config: ModelConfig, weights: list[Weights], setting: Setting) -> Iterator[Piece]:
    if config.architecture == "recurrent":
        raise ValueError("architecture='recurrent': training memory is predicted for Transformers only")
    stacks = stacks_of(config, setting.length, setting.source_length)
    for stack in stacks:
        yield _embedding(config, stack, weights, setting)
        first = len(stacks) > 1 and stack is stacks[1]
        for layer in range(stack.n_layers):
            for piece in _layer(config, stack, layer, weights, setting):
                yield replace(piece, layer=layer + (1_000_000 if first else 0))
        yield _last_norm(config, stack, setting)
    yield _loss(config, stacks[-1], weights, setting)


def _of(weights: list[Weights], part: str, *kinds: str) -> tuple[float, float]:
    """Numbers and numbers to be cast of some kinds of weights, in one layer."""
    some = [one for one in weights if one.part == part and (not kinds or one.kind in kinds)]
    return sum(one.number / one.layers for one in some), sum(one.cast / one.layers for one in some)


def _share(weights: list[Weights], setting: Setting, part: str, *kinds: str) -> Share:
    number, cast = _of(weights, part, *kinds)
    return Share(4.0 * number, 2.0 * cast if setting.precision != "fp32" else 0.0)


def _embedding(config: ModelConfig, stack: StackShape, weights: list[Weights], setting: Setting) -> Piece:
    tokens, a = setting.batch * stack.length, setting.width
    name = f"{stack.name} embedding"
    stream = 4.0 * tokens * config.d_model
    saved = {"dropout": 1.0 * tokens * config.d_model} if config.embedding_dropout else {}
    kinds: tuple[str, ...] = ("positions", "other")
    looks_up = stack.name != "encoder" or config.source == "text"
    if not looks_up:
        saved["source"] = float(a * setting.batch * source_numbers(config, setting))
        if config.source == "image":
            stream += a * setting.batch * n_patches(config) * config.d_model
    elif not (config.tie_head and config.head in ("lm", "masked-lm")):  # a tied table has its gradient since the loss
        kinds = (*kinds, "tokens" if stack.memory is None or config.target_vocab_size is None else "target tokens")
    if config.embedding_norm:
        saved["norm"] = stream + 8.0 * tokens
    share = _share(weights, setting, "embedding", *kinds)
    # What each use of a table adds to its gradient is as large as the table.
    table = 4.0 * max((one.number for one in weights if looks_up and one.kind.endswith("tokens")), default=0)
    return Piece(name, saved, forward=stream, backward=4.0 * tokens * config.d_model + table, share=share)


def _layer(
    config: ModelConfig, stack: StackShape, layer: int, weights: list[Weights], setting: Setting
) -> Iterator[Piece]:
    yield _self_attention(config, stack, weights, setting)
    if stack.memory is not None:
        yield _cross_attention(config, stack, weights, setting)
    yield _feed_forward(config, stack, weights, setting)


def _around(config: ModelConfig, tokens: int, a: int) -> dict[str, float]:
    """What a sub-layer's norm, residual and dropout keep, and the input of its first product."""
    norm = {"layer": 8.0, "rms": 4.0, "none": 0.0}[config.norm] * tokens
    stream = 4.0 * tokens * config.d_model
    return {
        "input": stream if config.norm != "none" or a == 4 else 0.0,
        "norm": norm,
        "into product": float(a * tokens * config.d_model) if config.norm != "none" or a == 2 else 0.0,
        "dropout": 1.0 * tokens * config.d_model if config.dropout else 0.0,
    }


def _self_attention(config: ModelConfig, stack: StackShape, weights: list[Weights], setting: Setting) -> Piece:
    tokens, a = setting.batch * stack.length, setting.width
    q, kv = tokens * stack.q_width, tokens * stack.kv_width
    saved = _around(config, tokens, a)
    name, share = f"{stack.name} attention", _share(weights, setting, stack.name, "attention", "norms")
    stream = 4.0 * tokens * config.d_model
    if not config.mixing.weights:  # a transform takes attention's place and keeps nothing
        return Piece(name, saved, forward=3 * stream, backward=4 * stream, share=share)
    kernel = _kernel(config, stack, setting)
    if config.qk_norm:
        saved["normed q, k"] = (4.0 + (a if kernel == "fused" else 0)) * (q + kv)
    if config.positions == "rope":
        saved["angles"] = 8.0 * stack.length * stack.d_head
    if kernel == "fused":
        saved["q, k, v"] = float(a * (q + 2 * kv))
        if config.positions == "rope":
            saved["turned q, k"] = float(a * (q + kv))
    padded = setting.masked and stack.name == "encoder" and config.source == "text"
    held, forward, backward = _mixing(config, stack, stack.length, setting, kernel, padded)
    saved.update(held)
    return Piece(name, saved, forward=stream + forward, backward=stream + backward, share=share)


def _kernel(config: ModelConfig, stack: StackShape, setting: Setting) -> Literal["fused", "reference", "math"]:
    """What attention runs on: torch's fused kernels take no groups of heads in fp32, and plain products stand in."""
    if setting.attention == "reference":
        return "reference"
    grouped = stack.n_kv_heads != stack.n_heads
    return "math" if grouped and setting.precision == "fp32" else "fused"


def _cross_attention(config: ModelConfig, stack: StackShape, weights: list[Weights], setting: Setting) -> Piece:
    assert stack.memory is not None
    tokens, a = setting.batch * stack.length, setting.width
    of_memory = setting.batch * stack.memory
    saved = _around(config, tokens, a)
    kernel = _kernel(config, stack, setting)
    if kernel == "fused":
        saved["q, k, v"] = float(a * (tokens * stack.q_width + 2 * of_memory * stack.kv_width))
    if a == 2:
        saved["memory"] = float(a * of_memory * config.d_model)
    padded = setting.masked and config.source == "text"
    held, forward, backward = _mixing(config, stack, stack.memory, setting, kernel, padded, cross=True)
    saved.update(held)
    stream = 4.0 * tokens * config.d_model
    memory = 4.0 * of_memory * config.d_model  # its own gradient is summed up beside
    share = _share(weights, setting, stack.name, "cross attention")
    return Piece(
        f"{stack.name} cross attention",
        saved,
        forward=stream + memory + forward,
        backward=stream + memory + backward,
        share=share,
    )


def _mixing(
    config: ModelConfig,
    stack: StackShape,
    keys: int,
    setting: Setting,
    kernel: Literal["fused", "reference", "math"],
    padded: bool,
    cross: bool = False,
) -> tuple[dict[str, float], float, float]:
    """What attention itself keeps, and needs for a moment forward and backward."""
    a, batch = setting.width, setting.batch
    q = batch * stack.length * stack.q_width
    kv = batch * keys * stack.kv_width
    rows = batch * stack.n_heads * stack.length
    pairs, grid = float(rows * keys), float(stack.length * keys)
    bias = config.positions in ("alibi", "t5") and not cross
    pattern = not cross and (
        config.window is not None or config.sparsity != "none" or config.shifted_windows is not None
    )
    causal = stack.causal and not cross
    if kernel == "reference":
        mask = (grid if causal or pattern else 0.0) * (batch if padded and (causal or pattern) else 1)
        return _by_formula(config, setting, q, kv, pairs, mask)
    if kernel == "math":
        whole = batch * keys * stack.q_width  # every head gets its own keys and values
        saved = {"copies of q, k, v": float(a * (q + 2 * whole)), "output": float(a * q), "pairs: weights": a * pairs}
        return saved, 2.0 * a * pairs, 3.0 * a * pairs
    saved = {"output": float(a * q), "row sums": 4.0 * rows}
    dense = pattern or (bias and (causal or padded))
    if dense or padded or (config.positions == "rope" and not cross):
        saved["output, masked or in order"] = float(a * q)
    if bias:
        saved["pairs: bias"] = a * (pairs if padded else stack.n_heads * grid)
    elif pattern:
        saved["pairs: mask"] = a * grid * (batch if padded else 1)
    # The gradient of q is summed in fp32; those of q, k and v are then laid side by side.
    own = a * (q + 2 * kv)
    backward = max(a * q + (4.0 * q if a == 2 else 0.0) + own, 2.0 * own)
    if config.positions == "t5" and not cross:
        backward += a * pairs
    return saved, float(a * q), backward


def _by_formula(
    config: ModelConfig, setting: Setting, q: float, kv: float, pairs: float, mask: float
) -> tuple[dict[str, float], float, float]:
    """The reference: exp of the scores, in fp32, and the weights, for every pair; backward the quotient's gradient."""
    a = setting.width
    saved = {
        "copies of q, k, v": a * (q + 2.0 * kv),
        "output": float(a * q),
        "pairs: exp": 4.0 * pairs,
        "pairs: weights": a * pairs,
        "pairs: mask": mask,
    }
    forward = 12.0 * pairs
    if config.attention_dropout:
        saved["pairs: dropout"] = pairs
        forward = max(forward, 32.0 * pairs)  # what is drawn, as 64-bit integers
    return saved, forward, (20.0 - a) * pairs  # the weights are free by then


def _feed_forward(config: ModelConfig, stack: StackShape, weights: list[Weights], setting: Setting) -> Piece:
    tokens, a = setting.batch * stack.length, setting.width
    hidden, stream = float(a * tokens * stack.d_ff), 4.0 * tokens * config.d_model
    saved = _around(config, tokens, a)
    kept = HIDDEN[config.activation]
    saved["hidden"] = kept.saved * hidden
    if config.activation_dropout:
        saved["hidden dropout"] = 1.0 * tokens * stack.d_ff + (hidden if kept.own_output else 0.0)
    share = _share(weights, setting, stack.name, "feed-forward")
    return Piece(
        f"{stack.name} feed-forward",
        saved,
        forward=stream + hidden,
        backward=stream + a * tokens * config.d_model + kept.backward * hidden,
        share=share,
    )


def _last_norm(config: ModelConfig, stack: StackShape, setting: Setting) -> Piece:
    tokens = setting.batch * stack.length
    stream = 4.0 * tokens * config.d_model
    name = f"{stack.name} last norm"
    if config.norm_place != "pre" or config.norm == "none":
        return Piece(name)
    return Piece(name, {"input": stream, "norm": 8.0 * tokens}, forward=stream, backward=2 * stream)


def _loss(config: ModelConfig, stack: StackShape, weights: list[Weights], setting: Setting) -> Piece:
    """Logits of the vocabulary, whole or in chunks, as ``training.loss`` makes them."""
    a, tokens = setting.width, setting.batch * stack.length
    stream = 4.0 * tokens * config.d_model
    share = _share(weights, setting, "head")
    if config.head not in ("lm", "masked-lm"):
        return Piece("loss", forward=stream, backward=stream, share=share)
    vocab = config.output_vocab_size
    width = (config.d_embed or config.d_model) if config.head_transform else config.d_model
    table = 4.0 * vocab * width
    saved: dict[str, float] = {}
    if config.head_transform:
        saved["transform"] = (2.0 * a + 4.0) * tokens * width + 8.0 * tokens
    tied = table if config.tie_head else 0.0  # its gradient waits for that of the lookup
    most = CHUNK_BYTES // (4 * vocab)
    few = setting.counted <= 0.5
    if tokens <= most and not few:
        logits = float(tokens * vocab)
        saved["rows"] = float(a * tokens * width)
        saved["logits"] = 4.0 * logits
        share = Share(tied or share.grads, 2.0 * vocab * width if a == 2 else 0.0)
        forward = (a + 4.0) * logits if a == 2 else 4.0 * logits
        # Slopes of the logits, before and after the softmax's own; the weights' gradient comes when the first are gone.
        backward = max(8.0 * logits, a * logits + 1.5 * share.grads) - share.grads
        return Piece("loss", saved, forward=stream + forward, backward=backward, share=share)
    saved["slopes"] = 4.0 * tokens * width + table
    copy = float(a * vocab * width) if a == 2 else 0.0
    share = Share(tied or share.grads)
    forward = stream + copy + _chunks(tokens * setting.counted, most, vocab, table, setting)
    return Piece("loss", saved, forward=forward, backward=2.0 * saved["slopes"] - share.grads, share=share)


def _chunks(rows: float, most: float, vocab: int, table: float, setting: Setting) -> float:
    """The most that is held while chunks of logits are made and turned into slopes.

    A chunk's logits, a copy of bf16 ones in fp32, and their logarithms; the slopes of the chunk before are still there.
    """
    a = setting.width
    each = a + 4.0 + (4.0 if setting.precision == "bf16" else 0.0)
    first = min(rows, most) * vocab
    second = min(max(rows - most, 0.0), most) * vocab
    products = (4.0 + (a if a == 2 else 0)) * first + table
    return max(each * first, 4.0 * first + each * second if second else 0.0, products)
