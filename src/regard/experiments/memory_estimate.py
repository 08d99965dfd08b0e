"""Memory of a training step, predicted from a config.

The prediction follows what autograd saves in regard's own code on a GPU: a norm saves its input, a matrix product its
input and weight, fused attention q, k, v, the output and one number per row, dropout one byte per number. It walks
through a step stage by stage (embedding, sub-layers, loss), forward and backward; the peak is the maximum over this
walk and the optimiser's step after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from ..attention.state_space import CHUNK
from ..config import ModelConfig
from ..models.model_flops import StackShape, configs_of_stacks, n_patches, source_places, stacks_of
from ..training.loss import LOGIT_BYTES, VOCAB_MULTIPLE
from ..training.optimiser import MAX_STACK_ELEMENTS
from .flops_estimate import EXPERTS, ParameterGroup

Precision = Literal["fp32", "bf16", "fp16"]
Attention = Literal["fused", "reference"]

MIB = 1 << 20


@dataclass(frozen=True)
class Setting:
    """The training settings that memory depends on."""

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
    masked: bool = True  # whether padding is masked where the tasks do so: in an encoder of text
    counted: float = 1.0  # share of the tokens with a target; below 1 in a masked language model
    workspace: int = 64 * MIB  # memory held by the device's matrix library
    working: bool = False  # whether bf16 working weights are kept next to the fp32 ones (training.gradient_pass)
    logit_bytes: float = 8 << 30  # bf16 logits that the loss then computes at a time: 1/16 of the device's memory

    @property
    def width(self) -> int:
        """Bytes per number in the inputs and outputs of matrix products."""
        return 4 if self.precision == "fp32" else 2

    @property
    def stream_width(self) -> int:
        """Bytes per number in the residual stream and in gradients of the backward pass; fp32 under autocast."""
        return 2 if self.working else 4

    @property
    def casts(self) -> bool:
        """Whether autocast copies weights to half precision."""
        return self.width == 2 and not self.working


# ------------------------------------------------------------------------------------- the stages of a training step

# Memory of an activation function, in units of one hidden layer (B, T, d_ff) in the precision of the products: saved
# for the backward pass; added during it (gradients, minus what is already freed); for a dropout after the function.
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
    """One stage of a training step. All numbers are bytes."""

    name: str
    saved: dict[str, float] = field(default_factory=dict)  # kept until this stage's backward pass is done
    forward: float = 0.0  # temporaries of the forward pass
    backward: float = 0.0  # temporaries of the backward pass, in addition to saved tensors and gradients
    grads: float = 0.0  # gradients of its weights
    cast: float = 0.0  # half-precision copies of its weights

    @property
    def saved_bytes(self) -> float:
        return sum(self.saved.values())


def source_numbers(config: ModelConfig, setting: Setting) -> int:
    """The number of values in one image or its region features; 0 for text."""
    if not config.has_encoder or config.source == "text":
        return 0
    if config.source == "image":
        return config.n_channels * config.image_size**2
    return source_places(config, setting.length, setting.source_length) * (config.d_region + config.d_box)


@dataclass(frozen=True)
class _StackStages:
    """Computes the stages of one stack."""

    config: ModelConfig
    stack: StackShape
    groups: list[ParameterGroup]
    setting: Setting

    @property
    def tokens(self) -> int:
        return self.setting.batch * self.stack.length

    @property
    def stream(self) -> float:
        """Bytes of the residual stream."""
        return float(self.setting.stream_width * self.tokens * self.config.d_model)

    def weight_bytes(self, part: str, *kinds: str) -> tuple[float, float]:
        """Bytes of the gradients and half-precision copies of some kinds of weights, in one layer."""
        groups = [group for group in self.groups if group.part == part and (not kinds or group.kind in kinds)]
        number, cast = (sum(getattr(group, name) / group.layers for group in groups) for name in ("number", "cast"))
        return self.setting.stream_width * number, 2.0 * cast if self.setting.casts else 0.0

    def embedding(self) -> StepStage:
        config, setting, stream = self.config, self.setting, self.stream
        saved = {"dropout": 1.0 * self.tokens * config.d_model} if config.embedding_dropout else {}
        kinds: tuple[str, ...] = ("positions", "other")
        has_table = self.stack.name != "encoder" or config.source == "text"
        if not has_table:
            saved["source"] = float(setting.width * setting.batch * source_numbers(config, setting))
            if config.source == "image":
                stream += setting.width * setting.batch * n_patches(config) * config.d_model
        elif not (config.tie_head and config.head in ("lm", "masked-lm")):  # the loss has a tied table's gradient
            target = self.stack.memory is not None and config.target_vocab_size is not None
            kinds = (*kinds, "target tokens" if target else "tokens")
        if config.embedding_norm:
            saved["norm"] = stream + 8.0 * self.tokens
        # Each use of a table makes a gradient as large as the table.
        tables = [x.number for x in self.groups if has_table and x.kind.endswith("tokens")]
        backward = self.stream + setting.stream_width * max(tables, default=0)
        weights = self.weight_bytes("embedding", *kinds)
        return StepStage(f"{self.stack.name} embedding", saved, stream, backward, *weights)

    def _sublayer_saved(self) -> dict[str, float]:
        """Tensors saved by a sub-layer's norm, residual and dropout, and the input of its first product."""
        config, width, casts = self.config, self.setting.width, self.setting.casts
        has_norm = config.norm != "none"
        return {
            "input": 0.0 if casts and not has_norm else self.stream,
            "norm": {"layer": 8.0, "rms": 4.0, "none": 0.0}[config.norm] * self.tokens,
            "into product": float(width * self.tokens * config.d_model) if has_norm or casts else 0.0,
            "dropout": 1.0 * self.tokens * config.d_model if config.dropout else 0.0,
        }

    def self_attention(self) -> StepStage:
        config, stack, width = self.config, self.stack, self.setting.width
        q, kv = self.tokens * stack.q_width, self.tokens * stack.kv_width
        saved, stream = self._sublayer_saved(), self.stream
        name, weights = f"{stack.name} attention", self.weight_bytes(stack.name, "attention", "norms")
        if config.mixing.recurrent:
            return self._state_space(name, saved, weights)
        if not config.mixing.weights:  # a fixed transform instead of attention, which saves nothing
            return StepStage(name, saved, 3 * stream, 4 * stream, *weights)
        kernel = self._kernel()
        if config.qk_norm:
            saved["normed q, k"] = (self.setting.stream_width + (width if kernel == "fused" else 0)) * (q + kv)
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
        """A state-space layer saves the parts of its projection, the steps of its convolution and gate, and for the
        scan the weights within chunks and their states (Mamba 2), or five numbers per state and token (Mamba)."""
        config, stack, width = self.config, self.stack, self.setting.width
        size = config.mixing.size_of(config.mixer_size)
        inner, shared = stack.q_width, (config.n_kv_heads or 1) * size
        if config.mixing.keeps_states:
            states = 20.0 * self.tokens * inner * size
            saved = saved | {"layer": width * self.tokens * inner * (config.conv_size + 8.0), "states": states}
            return StepStage(name, saved, self.stream + states / 5, states / 2, *weights)
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
        if width == 2:  # a copy for every layer, or one bf16 output for all of them
            saved["memory"] = width * source_tokens * config.d_model / (1 if self.setting.casts else stack.n_layers)
        padded = self.setting.masked and config.source == "text"
        mixing, forward, backward = self._mixing(stack.memory, padded, cross=True)
        # The gradient of the encoder's output is accumulated at the same time.
        around = self.stream + self.setting.stream_width * source_tokens * config.d_model
        weights = self.weight_bytes(stack.name, "cross attention")
        name = f"{stack.name} cross attention"
        return StepStage(name, saved | mixing, around + forward, around + backward, *weights)

    def _kernel(self) -> Literal["fused", "reference", "math"]:
        """torch's fused kernels do not support grouped heads in fp32; it uses plain products ("math") instead."""
        if self.setting.attention == "reference":
            return "reference"
        grouped = self.stack.n_kv_heads != self.stack.n_heads
        return "math" if grouped and self.setting.precision == "fp32" else "fused"

    def _mixing(self, keys: int, padded: bool, cross: bool = False) -> tuple[dict[str, float], float, float]:
        """The tensors that attention itself saves, and its temporaries in the forward and backward pass."""
        config, stack, width, batch = self.config, self.stack, self.setting.width, self.setting.batch
        q = batch * stack.length * stack.q_width
        kv = batch * keys * stack.kv_width
        rows = batch * stack.n_heads * stack.length
        pairs, grid = float(rows * keys), float(stack.length * keys)
        bias = config.positions in ("alibi", "t5") and not cross
        has_pattern = config.window is not None or config.sparsity != "none" or config.shifted_windows is not None
        pattern, causal = has_pattern and not cross, stack.causal and not cross
        kernel = self._kernel()
        if kernel == "reference":  # for every pair: exp of the scores in fp32, and the weights
            copies = {"copies of q, k, v": width * (q + 2.0 * kv), "output": float(width * q)}
            saved = copies | {"pairs: exp": 4.0 * pairs, "pairs: weights": width * pairs}
            saved["pairs: mask"] = grid * (batch if padded else 1) if causal or pattern else 0.0
            if config.attention_dropout:
                saved["pairs: dropout"] = pairs
            forward = 32.0 if config.attention_dropout else 12.0  # the random draws are 64-bit integers
            # Backward: the quotient's gradient, minus the weights, which are freed by then.
            return saved, forward * pairs, (20.0 - width) * pairs
        if kernel == "math":
            expanded = batch * keys * stack.q_width  # keys and values are repeated for every head
            copies = {"copies of q, k, v": float(width * (q + 2 * expanded)), "output": float(width * q)}
            return copies | {"pairs: weights": width * pairs}, 2.0 * width * pairs, 3.0 * width * pairs
        saved = {"output": float(width * q), "row sums": 4.0 * rows}
        if config.attention_sinks and not cross:  # with one more key and one more dimension
            saved["q, k, v with sinks"] = width * (q + 2.0 * kv)
        if config.mixing.maps > 1:  # values of several maps side by side, q and k as wide; sums, norm, input of W_o
            saved["wide q, k, v"] = width * (config.mixing.maps - 1) * (q + 2.0 * kv)
            saved["maps, combined"] = width * (config.mixing.maps + 2.0) * q
        dense = pattern or (bias and (causal or padded))
        if dense or padded or (config.positions == "rope" and not cross):
            saved["output, masked or in order"] = float(width * q)
        if bias:
            saved["pairs: bias"] = width * (pairs if padded else stack.n_heads * grid)
        elif pattern:
            saved["pairs: mask"] = width * grid * (batch if padded else 1)
        # The gradient of q is summed in fp32; then the gradients of q, k and v are concatenated.
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
            # Rows sorted by expert, the experts' outputs, the same in the order of the tokens; fp32 probabilities.
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
        """The loss over the vocabulary's logits, computed at once or in chunks as in ``training.loss``."""
        config, setting, width, tokens = self.config, self.setting, self.setting.width, self.tokens
        head_grads, head_cast = self.weight_bytes("head")
        if config.head not in ("lm", "masked-lm"):
            return StepStage("loss", {}, self.stream, self.stream, head_grads, head_cast)
        vocab = config.output_vocab_size
        d_out = (config.d_embed or config.d_model) if config.head_transform else config.d_model
        table = float(setting.stream_width * vocab * d_out)
        saved: dict[str, float] = {}
        if config.head_transform:
            saved["transform"] = (2.0 * width + setting.stream_width) * tokens * d_out + 8.0 * tokens
        grads = table if config.tie_head else head_grads  # that of a tied table is kept until the embedding adds to it
        if setting.working:
            return self._fused_loss(saved, vocab, d_out, grads)
        chunk_rows = LOGIT_BYTES["cuda"] // (4 * vocab)
        if tokens <= chunk_rows and setting.counted > 0.5:
            logits = float(tokens * vocab)
            saved["rows"] = float(width * tokens * d_out)
            saved["logits"] = 4.0 * logits
            forward = (width + 4.0) * logits if width == 2 else 4.0 * logits
            # Gradients of the logits before and after the softmax; the first is freed before that of the weights.
            backward = max(8.0 * logits, width * logits + 1.5 * grads) - grads
            cast = 2.0 * vocab * d_out if width == 2 else 0.0
            return StepStage("loss", saved, self.stream + forward, backward, grads, cast)
        saved["slopes"] = 4.0 * tokens * d_out + table
        copy = float(width * vocab * d_out) if width == 2 else 0.0
        # A chunk's logits, their fp32 copy if bf16, and log-softmax; gradients of the previous chunk are still alive.
        rows, each = tokens * setting.counted, width + 4.0 + (4.0 if setting.precision == "bf16" else 0.0)
        first, second = min(rows, chunk_rows) * vocab, min(max(rows - chunk_rows, 0.0), chunk_rows) * vocab
        products = (4.0 + (width if width == 2 else 0)) * first + table
        peak = max(each * first, 4.0 * first + each * second if second else 0.0, products)
        return StepStage("loss", saved, self.stream + copy + peak, 2.0 * saved["slopes"] - grads, grads)

    def _fused_loss(self, saved: dict[str, float], vocab: int, d_out: int, grads: float) -> StepStage:
        """The fused kernel overwrites the bf16 logits of the padded vocabulary by their gradient; two are saved."""
        setting, rows = self.setting, self.tokens * self.setting.counted
        padded = -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        weight, at_once = 2.0 * padded * d_out, min(rows, setting.logit_bytes / (2 * padded))
        saved["slopes"] = 2.0 * self.tokens * d_out + weight
        largest = 2.0 * at_once * padded + (weight if padded != vocab else 0.0) + 4.0 * rows
        if rows > at_once:  # sums over chunks are fp32
            largest += 2.0 * weight
        if setting.counted < 1:  # rows with a target are gathered
            largest += 4.0 * rows * d_out
        return StepStage("loss", saved, self.stream + largest, max(saved["slopes"] - grads, 0.0), grads)


def step_stages(config: ModelConfig, groups: list[ParameterGroup], setting: Setting) -> Iterator[list[StepStage]]:
    """Yield the stages of a step in order: those of a checkpointed layer together, every other stage by itself."""
    if config.architecture == "recurrent":
        raise ValueError("architecture='recurrent': training memory is predicted for Transformers only")
    stacks = stacks_of(config, setting.length, setting.source_length)
    configs = configs_of_stacks(config)
    for stack_config, stack in zip(configs, stacks, strict=True):
        stages = _StackStages(stack_config, stack, groups, setting)
        yield [stages.embedding()]
        cross = [] if stages.stack.memory is None else [stages.cross_attention()]
        layer = [stages.self_attention(), *cross, *([stages.feed_forward()] if stages.stack.d_ff else [])]
        for _ in range(stages.stack.n_layers):
            yield from [layer] if setting.checkpointing else ([stage] for stage in layer)
        yield [stages.last_norm()]
    yield [_StackStages(configs[-1], stacks[-1], groups, setting).loss()]


# ------------------------------------------------------------------------------------- the walk


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of one training step on one device."""

    weights: float
    optimiser: float
    ema: float
    inputs: float  # the batch itself
    gradients: float
    activations: float  # held at the end of the forward pass: saved tensors, and half-precision weights
    copies: float  # the half-precision weights among the activations
    attention_matrices: float  # scores and weights of token pairs among the activations
    workspace: float
    after_forward: float
    peak_forward: float
    peak_backward: float
    peak_step: float
    by_part: dict[str, float]  # tensors saved by autograd, by stage

    @property
    def peak(self) -> float:
        return max(self.peak_forward, self.peak_backward, self.peak_step)

    @property
    def where(self) -> str:
        """The phase in which the peak is reached."""
        names = {"the forward pass": self.peak_forward, "the backward pass": self.peak_backward}
        return max({**names, "the optimiser's step": self.peak_step}.items(), key=lambda item: item[1])[0]


def training_memory(config: ModelConfig, groups: list[ParameterGroup], setting: Setting) -> TrainingMemory:
    """The memory of one training step."""
    number = sum(group.number for group in groups)
    by_muon = sum(group.muon for group in groups) if setting.optimiser == "muon" else 0
    inputs = 16.0 * setting.batch * setting.length  # tokens and targets as int64; pixels and regions, below, as fp32
    if config.architecture == "encoder-decoder" and config.source == "text":
        inputs += 9.0 * setting.batch * source_places(config, setting.length, setting.source_length)
    static = {
        "weights": (6.0 if setting.working else 4.0) * number,
        "optimiser": 8.0 * (number - by_muon) + 4.0 * by_muon,
        "ema": 4.0 * number if setting.ema else 0.0,
        "inputs": inputs + 4.0 * setting.batch * source_numbers(config, setting),
        "workspace": float(setting.workspace),
    }
    groups_of_stages = list(step_stages(config, groups, setting))
    stages = [stage for group in groups_of_stages for stage in group]
    has_grads = setting.accumulate > 1  # gradients of earlier micro-batches are kept
    held = sum(static.values()) + (4.0 * number if has_grads else 0.0)
    after, peak_forward, peak_backward = _walk(groups_of_stages, held, has_grads and not setting.working)
    if setting.working:  # all gradients in bf16 are copied to fp32 at the end
        peak_backward = max(peak_backward, held + 6.0 * number)
    by_part: dict[str, float] = {}
    for stage in stages:
        size = stage.saved_bytes
        if setting.checkpointing and stage.name.endswith((" attention", " feed-forward")):
            # A checkpointed layer keeps only its input.
            size = stage.saved.get("input", 0.0) if stage.name.endswith(" attention") else 0.0
        by_part[stage.name] = by_part.get(stage.name, 0.0) + size
    # Fused Adam has no temporaries. Muon holds all updates and directions, and orthogonalises some at a time.
    temporaries = 8.0 * by_muon + 2.0 * min(by_muon, MAX_STACK_ELEMENTS)
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
    """Bytes held after the forward pass, and the peaks of the forward and backward pass.

    A group of several stages is a checkpointed layer: it keeps only its input and is recomputed in the backward pass.
    """
    live = peak_forward = held
    casts = 0.0  # autocast keeps its copies of a checkpointed layer's weights until the forward pass ends
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
    """Bytes that a group keeps from its forward to its backward pass."""
    return group[0].saved_bytes if len(group) == 1 else group[0].saved.get("input", 0.0)
