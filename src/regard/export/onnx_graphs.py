"""Models as graphs for ONNX, with named inputs and outputs, dynamic lengths, and the cache as inputs and outputs.

    model     source → logits or states                                       encoder-only models, ViT, classifiers
    encoder   source → keys and values of every cross-attention               computed once per source
    decoder   new tokens and the cache → selected logits, extended cache      the cache may be empty

For recurrent models the encoder graph returns the initial state and the memory that attention reads, and the decoder
graph computes one step. The input ``keep`` is the padding mask of the source; a target token at position -1 is padding.
A row without keys gives 0, in the graph as in torch.
"""

from __future__ import annotations

import copy
import functools
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..attention import Frame, MultiHeadAttention
from ..attention.biases import Bias
from ..attention.cache import Cache, CrossCache, ModelCache
from ..attention.cache.kv_cache import CacheView
from ..attention.frame import Span
from ..attention.mechanisms import Operands
from ..config import ModelConfig
from ..errors import RegardError
from ..models import Memory, Model, Stack
from ..models.base_model import mask_from_padding
from ..models.recurrent_cells import Alignment, MemoryView, Recurrence, State, StateCache

Axes = dict[int, str]
"""The names of a tensor's dynamic axes, by their index."""

# Lengths of the example inputs: all different, and none 0 or 1, on which a trace would specialise.
B, N, P, S, T = 2, 4, 5, 6, 3


class QueryKeyLog:
    """Collects queries and keys while a graph is traced, in the order of the attention calls."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def outputs(self, *names: str) -> dict[str, Tensor]:
        """The graph outputs q_0, k_0, q_1 … for the names "q" and "k"; with one name, the queries alone."""
        return {f"{name}_{i}": x for i, pair in enumerate(self.pairs) for name, x in zip(names, pair, strict=False)}


class Graph(nn.Module):
    """A module to be written as one ONNX file. ``inputs`` are example tensors and the names of their dynamic axes."""

    def __init__(self, model: Any, inputs: dict[str, tuple[Tensor, Axes]]) -> None:
        super().__init__()
        self.model = model
        self.input_names = list(inputs)
        self.examples = tuple(example for example, _ in inputs.values())
        self.axes = tuple(axes for _, axes in inputs.values())

    @abstractmethod
    def compute(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The outputs by name, from the inputs by name."""

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(self.compute(dict(zip(self.input_names, inputs, strict=True))).values())


def example_floats(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def example_tokens(vocab_size: int, *shape: int) -> Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(0))


class LastState(StateCache):
    """Keeps only the state after the last token, which is what the graph of a single step returns."""

    def __init__(self) -> None:
        self.last: State = ()

    def push(self, state: State, real: Tensor | None = None) -> State:
        self.last = state
        return state


class RecurrentEncoderGraph(Graph):
    """source (B, S), keep (B, S) → state_0 …, memory_k and memory_v; no memory_k if it equals memory_v."""

    def __init__(self, model: Model) -> None:
        super().__init__(model, source_inputs(model.config))

    def compute(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        memory = self.model.encode(inputs["source"], padding_mask=inputs["keep"])
        view, state = self.model._start(memory, inputs["source"].shape[0])
        out = {f"state_{i}": part for i, part in enumerate(state)}
        if view is None:
            return out
        own_keys = {} if view.k is view.v else {"memory_k": view.k}
        return out | own_keys | {"memory_v": view.v}


class RecurrentDecoderGraph(Graph):
    """tokens (B, 1), real (B, 1), states, memory and keep → logits (B, 1, V) and next_state_0 …"""

    def __init__(self, model: Model, maps: bool) -> None:
        with torch.no_grad():
            encoder = RecurrentEncoderGraph(model)
            encoded = encoder.compute(dict(zip(encoder.input_names, encoder.examples, strict=True)))
        inputs: dict[str, tuple[Tensor, Axes]] = {
            "tokens": (example_tokens(model.config.output_vocab_size, B, 1), {0: "batch"}),
            "real": (torch.tensor([[True], [False]]), {0: "batch"}),
        }
        for name, example in encoded.items():
            axes = {0: "batch"} if name.startswith("state") else {0: "batch", 2: "source"}
            inputs[name] = (example_floats(*example.shape), axes)
        if "memory_v" in encoded:
            inputs["keep"] = (encoder.examples[1], {0: "batch", 1: "source"})
        super().__init__(model, inputs)
        self.n_states = sum(name.startswith("state") for name in encoded)
        self.log = QueryKeyLog()
        attention = model.decoder.cross_attention
        if maps and attention is not None:  # replaces the method that reports q to recorders
            attention.record_attention = lambda q, contexts, view, cache: self.log.pairs.append((q, view.k))

    def compute(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        self.log.pairs = []
        model, cache = self.model, LastState()
        state = tuple(inputs[f"state_{i}"] for i in range(self.n_states))
        x, view = model.target_table(inputs["tokens"]), None
        if (v := inputs.get("memory_v")) is not None:
            view = MemoryView(inputs.get("memory_k", v), v, inputs["keep"])
        out = head_output(model, model.decoder.run_steps(x, state, view, inputs["real"], cache))
        return out | {f"next_state_{i}": part for i, part in enumerate(cache.last)} | self.log.outputs("cross_q")


def onnx_obstacle(config: ModelConfig, maps: bool = False) -> str | None:
    """Why a model with this config cannot be exported to ONNX, or not with ``maps``; None if it can."""
    if config.model_class is not None:
        return f"model_class={config.model_class!r} is not built in, and only built-in classes are exported to ONNX"
    if config.mixing.recurrent:
        return f"mixer={config.mixer!r} has a recurrent state, which the exported ONNX graphs do not support"
    if config.architecture != "encoder" and not config.mixing.by_token:
        return f"mixer={config.mixer!r} has no cache, which the ONNX graph of a decoder must return"
    if config.architecture == "two-tower":
        return "architecture='two-tower' has no ONNX export; `regard export hf` writes it for transformers"
    if maps and (config.global_projections or config.sparsity == "end-blocks"):
        return "the ONNX graphs cannot return the maps of global projections and end-blocks; leave out maps"
    if config.stages is not None and maps:
        return "the ONNX graphs cannot return the keys of stages, which differ in width; leave out maps"
    return None


def graphs_of(model: Model, maps: bool = False) -> dict[str, Graph]:
    """The graphs of a model by name. ``maps`` adds the queries as outputs, and the keys unless the cache has them."""
    if (obstacle := onnx_obstacle(model.config, maps)) is not None:
        raise RegardError(obstacle)
    model = traceable(model)
    if model.is_encoder_only:
        return {"model": EncoderOnlyGraph(model, maps)}
    if model.is_decoder_only:
        return {"decoder": DecoderGraph(model, maps)}
    if model.is_recurrent:
        return {"encoder": RecurrentEncoderGraph(model), "decoder": RecurrentDecoderGraph(model, maps)}
    return {"encoder": EncoderGraph(model, maps), "decoder": DecoderGraph(model, maps)}


def traceable(model: Model) -> Model:
    """A copy to be traced, in float32 on the CPU; it shares the model's parameters if they already are."""
    shared = {id(x): x for x in (model.processor, model.provenance)}
    is_ready = all(p.dtype == torch.float32 and p.device.type == "cpu" for p in model.parameters())
    if is_ready:
        shared |= {id(p): p for p in (*model.parameters(), *model.buffers())}
    traced = copy.deepcopy(model, shared).eval()
    traced = traced if is_ready else traced.cpu().float()
    for module in list(traced.modules()):
        if isinstance(module, MultiHeadAttention | Alignment):
            module.backend = "auto"  # during tracing, it chooses a backend that can be traced
        if isinstance(module, Recurrence):
            kernel = functools.partial(run_opaque_kernel, bidirectional=module.back is not None)
            module.run_kernel = kernel  # type: ignore[method-assign]  # on this copy only
        if isinstance(module, MultiHeadAttention | Stack) and module.position_bias is not None:
            module.position_bias = PairwiseBias(module.position_bias)
    return traced


@torch.library.custom_op(
    "regard::lstm",
    mutates_args=(),
    schema="(Tensor x, Tensor h, Tensor c, Tensor[] weights, bool bidirectional) -> (Tensor, Tensor, Tensor)",
)
def traced_lstm(
    x: Tensor, h: Tensor, c: Tensor, weights: list[Tensor], bidirectional: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer of torch.lstm as a single operation, which a trace would otherwise unroll over time."""
    return torch.lstm(x, (h, c), weights, True, 1, 0.0, False, bidirectional, True)


@torch.library.custom_op(
    "regard::gru",
    mutates_args=(),
    schema="(Tensor x, Tensor h, Tensor[] weights, bool bidirectional) -> (Tensor, Tensor)",
)
def traced_gru(x: Tensor, h: Tensor, weights: list[Tensor], bidirectional: bool) -> tuple[Tensor, Tensor]:
    return torch.gru(x, h, weights, True, 1, 0.0, False, bidirectional, True)


@traced_lstm.register_fake
def _(x: Tensor, h: Tensor, c: Tensor, weights: list[Tensor], bidirectional: bool) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(*x.shape[:2], h.shape[0] * h.shape[2]), torch.empty_like(h), torch.empty_like(c)


@traced_gru.register_fake
def _(x: Tensor, h: Tensor, weights: list[Tensor], bidirectional: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(*x.shape[:2], h.shape[0] * h.shape[2]), torch.empty_like(h)


def run_opaque_kernel(x: Tensor, state: list[Tensor], weights: list[Tensor], bidirectional: bool) -> tuple[Tensor, ...]:
    """Replaces ``Recurrence.run_kernel`` while a graph is traced."""
    run = traced_lstm if len(state) == 2 else traced_gru
    return run(x, *state, weights, bidirectional)


class PairwiseBias(Bias):
    """Computes a bias for each pair of positions.

    The faster computation by diagonals has a special case for a single query, which a trace with dynamic lengths
    cannot represent.
    """

    def __init__(self, bias: Bias) -> None:
        super().__init__()
        self.bias = bias
        self.reads_content, self.n_operands = bias.reads_content, bias.n_operands

    def _frame(self, frame: Frame) -> Frame:
        # No position exceeds its column, so no distance exceeds the number of keys.
        return frame if frame.steady is None else replace(frame, steady=None, limit=frame.n_keys)

    def operands(self, frame: Frame) -> Operands:
        return self.bias.operands(self._frame(frame))

    def tile(self, rows: Span, cols: Span, frame: Frame, operands: Operands, q: Tensor, k: Tensor) -> Tensor:
        return self.bias.tile(rows, cols, self._frame(frame), operands, q, k)

    def check(self, frame: Frame) -> None:
        self.bias.check(frame)


class PastCache(Cache):
    """A cache whose keys and values are inputs of the graph and, with the new ones appended, its outputs."""

    def __init__(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        self.k, self.v, self.positions = k, v, positions

    def update(self, k: Tensor, v: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        assert positions is not None
        self.k, self.v = torch.cat([self.k, k], dim=2), torch.cat([self.v, v], dim=2)
        all_positions = torch.cat([self.positions, positions], dim=1)
        self._view = CacheView(k.shape[0], positions, all_positions, limit=self.k.shape[2])
        return self.k, self.v


def attentions_of(model: Model, kind: str) -> list[MultiHeadAttention]:
    """The attention modules of one kind; layers with shared parameters count once."""
    modules = (cast(MultiHeadAttention, site.module) for site in model.attention_sites() if site.kind == kind)
    return list(dict.fromkeys(modules))


def log_attentions(model: Model, kind: str, maps: bool) -> QueryKeyLog:
    """A log that collects q and k of all attentions of one kind if ``maps``, and stays empty otherwise."""
    log = QueryKeyLog()
    for attention in attentions_of(model, kind) if maps else []:
        name = "_cross_heads" if attention.cross else "_self_heads"
        setattr(attention, name, _with_log(getattr(attention, name), log))
    return log


def _with_log(run: Callable[..., Any], log: QueryKeyLog) -> Callable[..., Any]:
    def run_and_log(*args: Any) -> Any:
        out = run(*args)
        log.pairs.append((out[0], out[1]))
        return out

    return run_and_log


def source_inputs(config: ModelConfig) -> dict[str, tuple[Tensor, Axes]]:
    """Example inputs of an encoder: the source and, except for images, the padding mask."""
    if config.source == "image":
        size = (B, config.n_channels, config.image_size, config.image_size)
        return {"source": (example_floats(*size), {0: "batch"})}
    padding_mask = torch.ones(B, S, dtype=torch.bool)
    padding_mask[1, S // 2 :] = False
    axes = {0: "batch", 1: "source"}
    if config.source == "regions":
        source = example_floats(B, S, config.d_region + config.d_box)
    else:
        source = example_tokens(config.vocab_size, B, S)
    return {"source": (source, axes), "keep": (padding_mask, axes)}


class EncoderOnlyGraph(Graph):
    """Encoder-only model: source → logits, or states and, if there is a pooler, the pooled vector."""

    def __init__(self, model: Model, maps: bool) -> None:
        inputs = source_inputs(model.config)
        if model.config.n_segments:
            inputs["segments"] = (torch.zeros(B, S, dtype=torch.int64), {0: "batch", 1: "source"})
        super().__init__(model, inputs)
        self.log = log_attentions(model, "encoder", maps)

    def compute(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        padding_mask, self.log.pairs = inputs.get("keep"), []
        out = self.model(inputs["source"], padding_mask=padding_mask, segments=inputs.get("segments"))
        if self.model.config.head != "none":
            return {"logits": out, **self.log.outputs("q", "k")}
        pooled = {} if self.model.pooler is None else {"pooled": self.model.pooled(out, padding_mask)}
        return {"states": out, **pooled, **self.log.outputs("q", "k")}


class EncoderGraph(Graph):
    """Encoder of an encoder-decoder: source → keys and values of each cross-attention."""

    def __init__(self, model: Model, maps: bool) -> None:
        super().__init__(model, source_inputs(model.config))
        self.log = log_attentions(model, "encoder", maps)

    def compute(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        self.log.pairs = []
        states = self.model.encode(inputs["source"], padding_mask=inputs.get("keep")).states
        out = {}
        for layer, attention in enumerate(attentions_of(self.model, "cross")):
            cache = CrossCache()
            attention(states[:, :1], states, cache=cache)  # fills the cache; its output is unused and not exported
            out[f"cross_k_{layer}"], out[f"cross_v_{layer}"] = cache.update()
        return out | self.log.outputs("q", "k")


class DecoderGraph(Graph):
    """Decoder: new tokens, and keys and values of past tokens → logits, and the cache with the new tokens.

    ``wanted`` lists the new tokens whose logits are returned: the last one of a prompt, or all of a text to be scored.
    In an encoder-decoder, the outputs of the encoder graph are inputs too.
    """

    def __init__(self, model: Model, maps: bool) -> None:
        shape, axes = model.decoder_shape, {0: "batch", 1: "tokens"}
        inputs: dict[str, tuple[Tensor, Axes]] = {
            "tokens": (example_tokens(model.config.output_vocab_size, B, T), axes),
            "positions": (torch.arange(P, P + T).repeat(B, 1), axes),
            "wanted": (torch.arange(N) % T, {0: "wanted"}),
            "past_positions": (torch.arange(P).repeat(B, 1), {0: "batch", 1: "past"}),
        }
        self.n_layers = shape.n_layers
        self.n_blocks = len(model.decoder.blocks) if model.is_encoder_decoder else 0
        caches = [("past", self.n_layers, P, "past"), ("cross", self.n_blocks, S, "source")]
        for name, n_layers, length, axis in caches:
            for layer in range(n_layers):
                for part in ("k", "v"):
                    example = example_floats(B, shape.n_kv_heads, length, shape.d_head)
                    inputs[f"{name}_{part}_{layer}"] = (example, {0: "batch", 2: axis})
        if model.is_encoder_decoder and model.config.source != "image":
            inputs["keep"] = source_inputs(model.config)["keep"]
        super().__init__(model, inputs)
        self.log, self.cross_log = log_attentions(model, "self", maps), log_attentions(model, "cross", maps)

    def compute(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        self.log.pairs, self.cross_log.pairs = [], []
        past = [
            PastCache(inputs[f"past_k_{layer}"], inputs[f"past_v_{layer}"], inputs["past_positions"])
            for layer in range(self.n_layers)
        ]
        states = self._decode(inputs, past)
        out = head_output(self.model, self._wanted_states(inputs, states))
        for layer, cache in enumerate(past):
            out[f"present_k_{layer}"], out[f"present_v_{layer}"] = cache.k, cache.v
        return out | self.log.outputs("q") | self.cross_log.outputs("cross_q")

    def _wanted_states(self, inputs: dict[str, Tensor], states: Tensor) -> Tensor:
        """The states (B, N, M) whose logits are returned."""
        return states.index_select(1, inputs["wanted"])

    def _decode(self, inputs: dict[str, Tensor], past: list[PastCache]) -> Tensor:
        """The new tokens' states (B, T, M), decoded with the cache ``past``."""
        tokens, positions = inputs["tokens"], inputs["positions"]
        if not self.n_blocks:
            return self.model.hidden(tokens, positions=positions, cache=ModelCache(past))
        memory = Memory(inputs["cross_k_0"][:, 0, :0], mask_from_padding(inputs.get("keep")))  # only the mask is used
        cross = [CrossCache() for _ in past]
        for layer, cache in enumerate(cross):
            block = layer % self.n_blocks
            cache.update(inputs[f"cross_k_{block}"], inputs[f"cross_v_{block}"])
        return self.model.decode(tokens, memory, positions=positions, cache=ModelCache(past, cross))


def head_output(model: Model, states: Tensor) -> dict[str, Tensor]:
    """The logits, or the states if the model has no head."""
    return {"states": states} if model.head is None else {"logits": model.head(states, model.output_table)}
