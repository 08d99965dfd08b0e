"""A model as graphs for ONNX: named tensors in, named tensors out, every length free, the cache among them.

    model     what an encoder reads → its logits or states                            encoder-only, ViT, classifiers
    encoder   what an encoder reads → keys and values of every cross-attention        computed once a source
    decoder   new tokens and the cache → logits of those wanted, the extended cache   any past, 0 included

For recurrent models the encoder graph gives the initial state and the memory that attention reads, and the decoder
graph is one step. The input ``keep`` is the padding mask of the source; a target token at position -1 is padding. A
row that sees nothing is 0, in the graph as in torch.
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
"""The axes of a tensor whose length is free, by name."""

# Lengths to trace with: none of them 0 or 1, which a trace would take for a property of the graph, and no two alike.
B, N, P, S, T = 2, 4, 5, 6, 3


class QueryKeyLog:
    """Queries and keys of attention calls while a graph is traced, in the order of the calls."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def outputs(self, *names: str) -> dict[str, Tensor]:
        """As outputs of the graph: q_0, k_0, q_1 …"""
        return {f"{name}_{i}": x for i, pair in enumerate(self.pairs) for name, x in zip(names, pair, strict=False)}


class Graph(nn.Module):
    """A module to be written as one ONNX file. ``inputs`` are example tensors and the names of their free axes."""

    def __init__(self, model: Any, inputs: dict[str, tuple[Tensor, Axes]]) -> None:
        super().__init__()
        self.model = model
        self.input_names = list(inputs)
        self.examples = tuple(example for example, _ in inputs.values())
        self.axes = tuple(axes for _, axes in inputs.values())

    @abstractmethod
    def compute(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """The outputs by name."""

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(self.compute(dict(zip(self.input_names, inputs, strict=True))).values())


def example_floats(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def example_tokens(vocab_size: int, *shape: int) -> Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(0))


class LastState(StateCache):
    """The state after the last token, which is all that a single step returns."""

    def __init__(self) -> None:
        self.last: State = ()

    def push(self, state: State, real: Tensor | None = None) -> State:
        self.last = state
        return state


class RecurrentEncoderGraph(Graph):
    """source (B, S), keep (B, S) → state_0 … and memory_k, memory_v; one where they are the same."""

    def __init__(self, model: Model) -> None:
        super().__init__(model, source_inputs(model.config))

    def compute(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        memory = self.model.encode(given["source"], padding_mask=given["keep"])
        view, state = self.model._start(memory, given["source"].shape[0])
        out = {f"state_{i}": part for i, part in enumerate(state)}
        if view is None:
            return out
        own_keys = {} if view.k is view.v else {"memory_k": view.k}
        return out | own_keys | {"memory_v": view.v}


class RecurrentDecoderGraph(Graph):
    """tokens (B, 1), real (B, 1), state, memory and keep → logits (B, 1, V) and next_state_0 …"""

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
        if maps and attention is not None:  # in place of the method with which the decoder shows q to recorders
            attention.record_attention = lambda q, contexts, view, cache: self.log.pairs.append((q, view.k))

    def compute(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        self.log.pairs = []
        model, cache = self.model, LastState()
        state = tuple(given[f"state_{i}"] for i in range(self.n_states))
        x, view = model.target_table(given["tokens"]), None
        if (v := given.get("memory_v")) is not None:
            view = MemoryView(given.get("memory_k", v), v, given["keep"])
        out = head_output(model, model.decoder.run_steps(x, state, view, given["real"], cache))
        return out | {f"next_state_{i}": part for i, part in enumerate(cache.last)} | self.log.outputs("cross_q")


def graphs_of(model: Model, maps: bool = False) -> dict[str, Graph]:
    """The graphs of a model by name; ``maps`` adds the queries, and where no cache has them the keys, as outputs."""
    if model.config.mixing.recurrent:
        raise RegardError(f"mixer={model.config.mixer!r} keeps a state that ONNX graphs here have no input for")
    model = traceable(model)
    if model.is_encoder_only:
        return {"model": EncoderOnlyGraph(model, maps)}
    if model.is_decoder_only:
        return {"decoder": DecoderGraph(model, maps)}
    if model.is_recurrent:
        return {"encoder": RecurrentEncoderGraph(model), "decoder": RecurrentDecoderGraph(model, maps)}
    return {"encoder": EncoderGraph(model, maps), "decoder": DecoderGraph(model, maps)}


def traceable(model: Model) -> Model:
    """A copy to be traced, in float32 on the CPU; it shares parameters that are so already."""
    shared = {id(x): x for x in (model.processor, model.provenance)}
    is_ready = all(p.dtype == torch.float32 and p.device.type == "cpu" for p in model.parameters())
    if is_ready:
        shared |= {id(p): p for p in (*model.parameters(), *model.buffers())}
    traced = copy.deepcopy(model, shared).eval()
    traced = traced if is_ready else traced.cpu().float()
    for module in list(traced.modules()):
        if isinstance(module, MultiHeadAttention | Alignment):
            module.backend = "auto"  # while tracing it chooses among those that can be traced
        if isinstance(module, Recurrence):
            kernel = functools.partial(run_opaque_kernel, bidirectional=module.back is not None)
            module.run_kernel = kernel  # type: ignore[method-assign]  # of this traced copy alone
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
    """torch.lstm of one layer as one operation of a trace, which would otherwise have each time step by itself."""
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
    """In place of ``Recurrence.run_kernel`` while a graph is traced."""
    run = traced_lstm if len(state) == 2 else traced_gru
    return run(x, *state, weights, bidirectional)


class PairwiseBias(Bias):
    """A bias computed for each pair of positions. The faster form by diagonals treats a single query separately, which
    a trace for all lengths cannot."""

    def __init__(self, bias: Bias) -> None:
        super().__init__()
        self.bias = bias
        self.reads_content, self.n_operands = bias.reads_content, bias.n_operands

    def _frame(self, frame: Frame) -> Frame:
        # No position is larger than its column, so no distance exceeds the number of keys.
        return frame if frame.steady is None else replace(frame, steady=None, limit=frame.n_keys)

    def operands(self, frame: Frame) -> Operands:
        return self.bias.operands(self._frame(frame))

    def tile(self, rows: Span, cols: Span, frame: Frame, operands: Operands, q: Tensor, k: Tensor) -> Tensor:
        return self.bias.tile(rows, cols, self._frame(frame), operands, q, k)

    def check(self, frame: Frame) -> None:
        self.bias.check(frame)


class PastCache(Cache):
    """Keys and values that are inputs of the graph and, with the new ones, its outputs."""

    def __init__(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        self.k, self.v, self.positions = k, v, positions

    def update(self, k: Tensor, v: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        assert positions is not None
        self.k, self.v = torch.cat([self.k, k], dim=2), torch.cat([self.v, v], dim=2)
        all_positions = torch.cat([self.positions, positions], dim=1)
        self._view = CacheView(k.shape[0], positions, all_positions, limit=self.k.shape[2])
        return self.k, self.v


def attentions_of(model: Model, kind: str) -> list[MultiHeadAttention]:
    """The attentions of one kind, those of layers with shared parameters once."""
    modules = (cast(MultiHeadAttention, site.module) for site in model.attention_sites() if site.kind == kind)
    return list(dict.fromkeys(modules))


def log_attentions(model: Model, kind: str, maps: bool) -> QueryKeyLog:
    """A log to which the attentions of one kind append their q and k as they are scored, if ``maps``."""
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
    """Example inputs of an encoder: its source and, except for images, the padding mask."""
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
    """Encoder-only models: source → logits, or states and, where there is a pooler, the pooled vector."""

    def __init__(self, model: Model, maps: bool) -> None:
        inputs = source_inputs(model.config)
        if model.config.n_segments:
            inputs["segments"] = (torch.zeros(B, S, dtype=torch.int64), {0: "batch", 1: "source"})
        super().__init__(model, inputs)
        self.log = log_attentions(model, "encoder", maps)

    def compute(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        padding_mask, self.log.pairs = given.get("keep"), []
        out = self.model(given["source"], padding_mask=padding_mask, segments=given.get("segments"))
        if self.model.config.head != "none":
            return {"logits": out, **self.log.outputs("q", "k")}
        pooled = {} if self.model.pooler is None else {"pooled": self.model.pooled(out, padding_mask)}
        return {"states": out, **pooled, **self.log.outputs("q", "k")}


class EncoderGraph(Graph):
    """The encoder beside a decoder: source → keys and values of each cross-attention."""

    def __init__(self, model: Model, maps: bool) -> None:
        super().__init__(model, source_inputs(model.config))
        self.log = log_attentions(model, "encoder", maps)

    def compute(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        self.log.pairs = []
        states = self.model.encode(given["source"], padding_mask=given.get("keep")).states
        out = {}
        for layer, attention in enumerate(attentions_of(self.model, "cross")):
            cache = CrossCache()
            attention(states[:, :1], states, cache=cache)  # fills the cache; its output is unused and not exported
            out[f"cross_k_{layer}"], out[f"cross_v_{layer}"] = cache.update()
        return out | self.log.outputs("q", "k")


class DecoderGraph(Graph):
    """A decoder: new tokens, and keys and values of those before them → logits, and the cache with the new ones.

    ``wanted`` lists the new tokens whose logits are returned: of a prompt the last one, of a text to score all. Beside
    an encoder, its keys and values are inputs as the encoder's graph returned them.
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

    def compute(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        self.log.pairs, self.cross_log.pairs = [], []
        past = [
            PastCache(given[f"past_k_{layer}"], given[f"past_v_{layer}"], given["past_positions"])
            for layer in range(self.n_layers)
        ]
        states = self._decode(given, past)
        out = head_output(self.model, states.index_select(1, given["wanted"]))
        for layer, cache in enumerate(past):
            out[f"present_k_{layer}"], out[f"present_v_{layer}"] = cache.k, cache.v
        return out | self.log.outputs("q") | self.cross_log.outputs("cross_q")

    def _decode(self, given: dict[str, Tensor], past: list[PastCache]) -> Tensor:
        """The new tokens' states (B, T, M); ``past`` is the cache to decode with."""
        tokens, positions = given["tokens"], given["positions"]
        if not self.n_blocks:
            return self.model.hidden(tokens, positions=positions, cache=ModelCache(past))
        memory = Memory(given["cross_k_0"][:, 0, :0], mask_from_padding(given.get("keep")))  # the states are not needed
        cross = [CrossCache() for _ in past]
        for layer, cache in enumerate(cross):
            block = layer % self.n_blocks
            cache.update(given[f"cross_k_{block}"], given[f"cross_v_{block}"])
        return self.model.decode(tokens, memory, positions=positions, cache=ModelCache(past, cross))


def head_output(model: Model, states: Tensor) -> dict[str, Tensor]:
    """The logits, or the states of a model without a head."""
    return {"states": states} if model.head is None else {"logits": model.head(states, model.output_table)}
