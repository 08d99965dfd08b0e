"""Memory of a training step, predicted from a config.

It follows what autograd saves in this repository's own code on a GPU: a norm saves its input, a product its input and
weight, fused attention q, k, v, the output and one number a row, dropout a byte a number. A step is walked forward and
backward stage by stage (embedding, sub-layers, loss); the peak is the highest point of that walk or of the optimiser's
step after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from ..attention.state_space import CHUNK
from ..config import ModelConfig
from ..models.model_flops import StackShape, n_patches, source_places, stacks_of
from .flops_estimate import EXPERTS, ParameterGroup

Precision = Literal["fp32", "bf16", "fp16"]
Attention = Literal["fused", "reference"]

MIB = 1 << 20
CHUNK_BYTES = 512 * MIB  # fp32 logits that the loss holds at once on a GPU (training.loss)
MUON_AT_ONCE = 1 << 26  # numbers Muon orthogonalises at once (training.muon)


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
    masked: bool = True  # padding is masked where the tasks mask it: the encoder of pairs, texts to classify
    counted: float = 1.0  # share of the targets in the loss: all, or those of a masked language model
    workspace: int = 64 * MIB  # what the device's matrix library keeps for itself

    @property
    def width(self) -> int:
        """Bytes of a number that a matrix product reads or writes."""
        return 4 if self.precision == "fp32" else 2


# ------------------------------------------------------------------------------------- the stages of a training step

# What an activation needs, in units of one hidden layer (B, T, d_ff) in the precision of the products: between forward
# and backward pass; more during the backward pass (gradients, less what is free by then); for dropout behind it.
_HIDDEN_UNITS = {
    "relu": (1, 2, 1),  # its output, which the next product saves too
    **dict.fromkeys(("gelu", "gelu_tanh", "silu"), (2, 1, 0)),  # input, and output as the next product's input
    "quick_gelu": (3, 2, 0),  # x, σ(1.702 x) and their product
    "relu2": (2, 2, 1),
    **dict.fromkeys(("swiglu", "geglu", "geglu_tanh"), (4, 2, 0)),  # gate and up, f(gate), and the product
    "reglu": (4, 2, 1),
}


@dataclass(frozen=True)
class StepStage:
    """One stretch of a training step. All numbers are bytes."""

    name: str
    saved: dict[str, float] = field(default_factory=dict)  # until this stage's backward pass is done
    forward: float = 0.0  # temporaries of the forward pass
    backward: float = 0.0  # temporaries of the backward pass, beside what is saved and the gradients so far
    grads: float = 0.0  # gradients of its weights
    cast: float = 0.0  # half-precision copies of its weights

    @property
    def saved_bytes(self) -> float:
        return sum(self.saved.values())


def source_numbers(config: ModelConfig, setting: Setting) -> int:
    """Numbers of one image or of its region features; 0 for text."""
    if not config.has_encoder or config.source == "text":
        return 0
    if config.source == "image":
        return config.n_channels * config.image_size**2
    return source_places(config, setting.length, setting.source_length) * (config.d_region + config.d_box)


@dataclass(frozen=True)
class _StackStages:
    """The stages of one stack, and what they all depend on."""

    config: ModelConfig
    stack: StackShape
    groups: list[ParameterGroup]
    setting: Setting

    @property
    def tokens(self) -> int:
        return self.setting.batch * self.stack.length

    @property
    def stream(self) -> float:
        """Bytes of the fp32 residual stream."""
        return 4.0 * self.tokens * self.config.d_model

    def weight_bytes(self, part: str, *kinds: str) -> tuple[float, float]:
        """Gradients and half-precision copies of some kinds of weights, in one layer."""
        groups = [group for group in self.groups if group.part == part and (not kinds or group.kind in kinds)]
        number, cast = (sum(getattr(group, name) / group.layers for group in groups) for name in ("number", "cast"))
        return 4.0 * number, 2.0 * cast if self.setting.precision != "fp32" else 0.0

    def embedding(self) -> StepStage:
        config, setting, stream = self.config, self.setting, self.stream
        saved = {"dropout": 1.0 * self.tokens * config.d_model} if config.embedding_dropout else {}
        kinds: tuple[str, ...] = ("positions", "other")
        has_table = self.stack.name != "encoder" or config.source == "text"
        if not has_table:
            saved["source"] = float(setting.width * setting.batch * source_numbers(config, setting))
            if config.source == "image":
                stream += setting.width * setting.batch * n_patches(config) * config.d_model
        elif not (config.tie_head and config.head in ("lm", "masked-lm")):  # a tied table got its gradient in the loss
            target = self.stack.memory is not None and config.target_vocab_size is not None
            kinds = (*kinds, "target tokens" if target else "tokens")
        if config.embedding_norm:
            saved["norm"] = stream + 8.0 * self.tokens
        # What each use of a table adds to its gradient is as large as the table.
        table = 4.0 * max((x.number for x in self.groups if has_table and x.kind.endswith("tokens")), default=0)
        backward = 4.0 * self.tokens * config.d_model + table
        weights = self.weight_bytes("embedding", *kinds)
        return StepStage(f"{self.stack.name} embedding", saved, stream, backward, *weights)

    def _sublayer_saved(self) -> dict[str, float]:
        """What a sub-layer's norm, residual and dropout save, and the input of its first product."""
        config, width = self.config, self.setting.width
        has_norm = config.norm != "none"
        return {
            "input": self.stream if has_norm or width == 4 else 0.0,
            "norm": {"layer": 8.0, "rms": 4.0, "none": 0.0}[config.norm] * self.tokens,
            "into product": float(width * self.tokens * config.d_model) if has_norm or width == 2 else 0.0,
            "dropout": 1.0 * self.tokens * config.d_model if config.dropout else 0.0,
        }

    def self_attention(self) -> StepStage:
        config, stack, width = self.config, self.stack, self.setting.width
        q, kv = self.tokens * stack.q_width, self.tokens * stack.kv_width
        saved, stream = self._sublayer_saved(), self.stream
        name, weights = f"{stack.name} attention", self.weight_bytes(stack.name, "attention", "norms")
        if config.mixing.recurrent:
            return self._state_space(name, saved, weights)
        if not config.mixing.weights:  # a transform takes attention's place and saves nothing
            return StepStage(name, saved, 3 * stream, 4 * stream, *weights)
        kernel = self._kernel()
        if config.qk_norm:
            saved["normed q, k"] = (4.0 + (width if kernel == "fused" else 0)) * (q + kv)
        if config.positions == "rope":
            saved["angles"] = 8.0 * stack.length * stack.d_head
        if kernel == "fused":
            saved["q, k, v"] = float(width * (q + 2 * kv))
            if config.positions == "rope":
                saved["turned q, k"] = float(width * (q + kv))
        padded = self.setting.masked and stack.name == "encoder" and config.source == "text"
        mixing, forward, backward = self._mixing(stack.length, padded)
        return StepStage(name, saved | mixing, stream + forward, stream + backward, *weights)

    def _state_space(self, name: str, saved: dict[str, float], weights: tuple[float, float]) -> StepStage:
        """Mamba-2: the product's parts, each step of the convolution and of the gate, weights inside chunks, states."""
        config, stack, width = self.config, self.stack, self.setting.width
        size = config.mixing.size_of(config.mixer_size)
        inner, shared = stack.q_width, (config.n_kv_heads or 1) * size
        saved = saved | {
            "product": float(width * self.tokens * (2 * inner + 2 * shared + stack.n_heads)),
            "convolution": float(width * self.tokens * (config.conv_size + 2) * (inner + 2 * shared)),
            "chunks": (8.0 + 2 * width) * self.tokens * stack.n_heads * min(CHUNK, stack.length),
            "states": 12.0 * self.tokens / CHUNK * inner * size,
            "gate": (16.0 + width) * self.tokens * inner,
        }
        largest = 12.0 * self.tokens * stack.n_heads * min(CHUNK, stack.length)
        return StepStage(name, saved, self.stream + largest, self.stream + 2 * largest, *weights)

    def cross_attention(self) -> StepStage:
        config, stack, width = self.config, self.stack, self.setting.width
        assert stack.memory is not None
        source_tokens = self.setting.batch * stack.memory
        saved = self._sublayer_saved()
        if self._kernel() == "fused":
            saved["q, k, v"] = float(width * (self.tokens * stack.q_width + 2 * source_tokens * stack.kv_width))
        if width == 2:
            saved["memory"] = float(width * source_tokens * config.d_model)
        padded = self.setting.masked and config.source == "text"
        mixing, forward, backward = self._mixing(stack.memory, padded, cross=True)
        around = self.stream + 4.0 * source_tokens * config.d_model  # the encoder output's gradient is summed beside
        weights = self.weight_bytes(stack.name, "cross attention")
        name = f"{stack.name} cross attention"
        return StepStage(name, saved | mixing, around + forward, around + backward, *weights)

    def _kernel(self) -> Literal["fused", "reference", "math"]:
        """torch's fused kernels take no grouped heads in fp32; plain products ("math") stand in."""
        if self.setting.attention == "reference":
            return "reference"
        grouped = self.stack.n_kv_heads != self.stack.n_heads
        return "math" if grouped and self.setting.precision == "fp32" else "fused"

    def _mixing(self, keys: int, padded: bool, cross: bool = False) -> tuple[dict[str, float], float, float]:
        """What attention itself saves, and its temporaries forward and backward."""
        config, stack, width, batch = self.config, self.stack, self.setting.width, self.setting.batch
        q = batch * stack.length * stack.q_width
        kv = batch * keys * stack.kv_width
        rows = batch * stack.n_heads * stack.length
        pairs, grid = float(rows * keys), float(stack.length * keys)
        bias = config.positions in ("alibi", "t5") and not cross
        has_pattern = config.window is not None or config.sparsity != "none" or config.shifted_windows is not None
        pattern, causal = has_pattern and not cross, stack.causal and not cross
        kernel = self._kernel()
        if kernel == "reference":  # the formula: exp of the scores in fp32 and the weights, for every pair
            copies = {"copies of q, k, v": width * (q + 2.0 * kv), "output": float(width * q)}
            saved = copies | {"pairs: exp": 4.0 * pairs, "pairs: weights": width * pairs}
            saved["pairs: mask"] = grid * (batch if padded else 1) if causal or pattern else 0.0
            if config.attention_dropout:
                saved["pairs: dropout"] = pairs
            forward = 32.0 if config.attention_dropout else 12.0  # the random draws are 64-bit integers
            return saved, forward * pairs, (20.0 - width) * pairs  # the quotient's gradient; the weights are free then
        if kernel == "math":
            expanded = batch * keys * stack.q_width  # every head gets its own keys and values
            copies = {"copies of q, k, v": float(width * (q + 2 * expanded)), "output": float(width * q)}
            return copies | {"pairs: weights": width * pairs}, 2.0 * width * pairs, 3.0 * width * pairs
        saved = {"output": float(width * q), "row sums": 4.0 * rows}
        dense = pattern or (bias and (causal or padded))
        if dense or padded or (config.positions == "rope" and not cross):
            saved["output, masked or in order"] = float(width * q)
        if bias:
            saved["pairs: bias"] = width * (pairs if padded else stack.n_heads * grid)
        elif pattern:
            saved["pairs: mask"] = width * grid * (batch if padded else 1)
        # The gradient of q is summed in fp32; those of q, k and v are then laid side by side.
        qkv = width * (q + 2 * kv)
        backward = max(width * q + (4.0 * q if width == 2 else 0.0) + qkv, 2.0 * qkv)
        if config.positions == "t5" and not cross:
            backward += width * pairs
        return saved, float(width * q), backward

    def feed_forward(self) -> StepStage:
        config, stack, width = self.config, self.stack, self.setting.width
        n_saved, n_backward, n_dropout = _HIDDEN_UNITS[config.activation]
        networks = config.experts_per_token + config.shared_experts if config.experts is not None else 1
        hidden = float(width * self.tokens * stack.d_ff * networks)
        saved = self._sublayer_saved() | {"hidden": n_saved * hidden}
        if config.experts is not None:
            # Rows sorted by expert, what the experts made of them, the same in the tokens' order; fp32 probabilities.
            saved["routed"] = 3.0 * width * self.tokens * config.experts_per_token * config.d_model
            saved["router"] = 4.0 * self.tokens * (config.d_model + 3 * config.experts)
        if config.activation_dropout:
            saved["hidden dropout"] = 1.0 * self.tokens * stack.d_ff + n_dropout * hidden
        backward = self.stream + width * self.tokens * config.d_model + n_backward * hidden
        weights = self.weight_bytes(stack.name, "feed-forward", EXPERTS)
        return StepStage(f"{stack.name} feed-forward", saved, self.stream + hidden, backward, *weights)

    def last_norm(self) -> StepStage:
        name, stream = f"{self.stack.name} last norm", self.stream
        if self.config.norm_place == "post" or self.config.norm == "none":
            return StepStage(name)
        return StepStage(name, {"input": stream, "norm": 8.0 * self.tokens}, forward=stream, backward=2 * stream)

    def loss(self) -> StepStage:
        """Logits of the vocabulary, whole or in chunks, as ``training.loss`` computes them."""
        config, setting, width, tokens = self.config, self.setting, self.setting.width, self.tokens
        head_grads, head_cast = self.weight_bytes("head")
        if config.head not in ("lm", "masked-lm"):
            return StepStage("loss", {}, self.stream, self.stream, head_grads, head_cast)
        vocab = config.output_vocab_size
        d_out = (config.d_embed or config.d_model) if config.head_transform else config.d_model
        table = 4.0 * vocab * d_out
        saved: dict[str, float] = {}
        if config.head_transform:
            saved["transform"] = (2.0 * width + 4.0) * tokens * d_out + 8.0 * tokens
        grads = (table if config.tie_head else 0.0) or head_grads  # a tied gradient waits for that of the lookup
        chunk_rows = CHUNK_BYTES // (4 * vocab)
        if tokens <= chunk_rows and setting.counted > 0.5:
            logits = float(tokens * vocab)
            saved["rows"] = float(width * tokens * d_out)
            saved["logits"] = 4.0 * logits
            forward = (width + 4.0) * logits if width == 2 else 4.0 * logits
            # Gradients of the logits before and after the softmax's own; that of the weights follows the first.
            backward = max(8.0 * logits, width * logits + 1.5 * grads) - grads
            cast = 2.0 * vocab * d_out if width == 2 else 0.0
            return StepStage("loss", saved, self.stream + forward, backward, grads, cast)
        saved["slopes"] = 4.0 * tokens * d_out + table
        copy = float(width * vocab * d_out) if width == 2 else 0.0
        # A chunk's logits, an fp32 copy of bf16 ones, their logarithms; gradients of the chunk before are still alive.
        rows, each = tokens * setting.counted, width + 4.0 + (4.0 if setting.precision == "bf16" else 0.0)
        first, second = min(rows, chunk_rows) * vocab, min(max(rows - chunk_rows, 0.0), chunk_rows) * vocab
        products = (4.0 + (width if width == 2 else 0)) * first + table
        peak = max(each * first, 4.0 * first + each * second if second else 0.0, products)
        return StepStage("loss", saved, self.stream + copy + peak, 2.0 * saved["slopes"] - grads, grads)


def step_stages(config: ModelConfig, groups: list[ParameterGroup], setting: Setting) -> Iterator[list[StepStage]]:
    """The stages of a step in their order: those of a checkpointed layer together, every other one by itself."""
    if config.architecture == "recurrent":
        raise ValueError("architecture='recurrent': training memory is predicted for Transformers only")
    stacks = stacks_of(config, setting.length, setting.source_length)
    for stages in [_StackStages(config, stack, groups, setting) for stack in stacks]:
        yield [stages.embedding()]
        cross = [] if stages.stack.memory is None else [stages.cross_attention()]
        layer = [stages.self_attention(), *cross, *([stages.feed_forward()] if stages.stack.d_ff else [])]
        for _ in range(stages.stack.n_layers):
            yield from [layer] if setting.checkpointing else ([stage] for stage in layer)
        yield [stages.last_norm()]
    yield [_StackStages(config, stacks[-1], groups, setting).loss()]


# ------------------------------------------------------------------------------------- the walk


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of one training step on one device."""

    weights: float
    optimiser: float
    ema: float
    inputs: float  # the batch itself
    gradients: float
    activations: float  # held at the end of the forward pass: what autograd saves, and half-precision weights
    copies: float  # of that, the half-precision weights
    attention_matrices: float  # of that, scores and weights of token pairs
    workspace: float
    after_forward: float
    peak_forward: float
    peak_backward: float
    peak_step: float
    by_part: dict[str, float]  # what autograd saves, by stage

    @property
    def peak(self) -> float:
        return max(self.peak_forward, self.peak_backward, self.peak_step)

    @property
    def where(self) -> str:
        """When the peak is reached."""
        names = {"the forward pass": self.peak_forward, "the backward pass": self.peak_backward}
        return max({**names, "the optimiser's step": self.peak_step}.items(), key=lambda item: item[1])[0]


def training_memory(config: ModelConfig, groups: list[ParameterGroup], setting: Setting) -> TrainingMemory:
    number = sum(group.number for group in groups)
    by_muon = sum(group.muon for group in groups) if setting.optimiser == "muon" else 0
    inputs = 16.0 * setting.batch * setting.length  # tokens and targets as 64-bit numbers, pixels and regions as fp32
    if config.architecture == "encoder-decoder" and config.source == "text":
        inputs += 9.0 * setting.batch * source_places(config, setting.length, setting.source_length)
    static = {
        "weights": 4.0 * number,
        "optimiser": 8.0 * (number - by_muon) + 4.0 * by_muon,
        "ema": 4.0 * number if setting.ema else 0.0,
        "inputs": inputs + 4.0 * setting.batch * source_numbers(config, setting),
        "workspace": float(setting.workspace),
    }
    groups_of_stages = list(step_stages(config, groups, setting))
    stages = [stage for group in groups_of_stages for stage in group]
    has_grads = setting.accumulate > 1  # gradients of the micro-batch before are alive
    held = sum(static.values()) + (4.0 * number if has_grads else 0.0)
    after, peak_forward, peak_backward = _walk(groups_of_stages, held, has_grads)
    by_part: dict[str, float] = {}
    for stage in stages:
        size = stage.saved_bytes
        if setting.checkpointing and stage.name.endswith((" attention", " feed-forward")):  # a layer keeps its input
            size = stage.saved.get("input", 0.0) if stage.name.endswith(" attention") else 0.0
        by_part[stage.name] = by_part.get(stage.name, 0.0) + size
    # Fused Adam has no temporaries. Muon holds all its updates and directions, and orthogonalises some at a time.
    temporaries = 8.0 * by_muon + 2.0 * min(by_muon, MUON_AT_ONCE)
    return TrainingMemory(
        **static,
        gradients=4.0 * number,
        activations=after - held,
        copies=sum(stage.cast for stage in stages),
        attention_matrices=sum(x for stage in stages for name, x in stage.saved.items() if name.startswith("pairs")),
        after_forward=after,
        peak_forward=peak_forward,
        peak_backward=peak_backward,
        peak_step=sum(static.values()) + 4.0 * number + temporaries,
        by_part=by_part,
    )


def _walk(groups: list[list[StepStage]], held: float, has_grads: bool) -> tuple[float, float, float]:
    """Bytes held after the forward pass, and the peaks of forward and backward pass.

    A group of several stages is a checkpointed layer: it keeps its input alone and is recomputed in the backward pass.
    """
    live = peak_forward = held
    casts = 0.0  # autocast keeps a checkpointed layer's copies of the weights to the end of the forward pass
    for group in groups:
        cast, saved = sum(stage.cast for stage in group), _bytes_until_backward(group)
        inner = saved if len(group) > 1 else 0.0
        widest = max(stage.saved_bytes + stage.forward for stage in group)
        peak_forward = max(peak_forward, live + casts + cast + (inner + widest))
        live += saved + (cast if len(group) == 1 else 0.0)
        casts += cast if len(group) > 1 else 0.0
    after = peak_backward = live
    for group in reversed(groups):
        saved = _bytes_until_backward(group) + (group[0].cast if len(group) == 1 else 0.0)
        inner = live + sum(stage.saved_bytes + stage.cast for stage in group) - saved  # recomputed
        for stage in reversed(group):
            grads = 0.0 if has_grads else stage.grads
            peak_backward = max(peak_backward, inner + grads + stage.backward)
            inner += grads - stage.saved_bytes - stage.cast
            live += grads
        live -= saved
    return after, peak_forward, peak_backward


def _bytes_until_backward(group: list[StepStage]) -> float:
    return group[0].saved_bytes if len(group) == 1 else group[0].saved.get("input", 0.0)
