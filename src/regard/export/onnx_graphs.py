"""A model as graphs for ONNX: named tensors in, named tensors out, every length free, the cache among them.

    model     what an encoder reads → its logits or states                            encoder-only, ViT, classifiers
    encoder   what an encoder reads → keys and values of every cross-attention        computed once a source
    decoder   new tokens and the cache → logits of those wanted, the longer cache     any past, 0 included

For recurrent models the encoder graph gives the initial state and the memory that attention reads, and the decoder
graph is one step. The input ``keep`` is the padding mask of the source; a target token at position -1 is padding. A
row that sees nothing is 0, in the graph as in torch.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import Frame, MultiHeadAttention
from ..attention.biases import Bias
from ..attention.cache import Cache, CrossCache, ModelCache
from ..attention.cache.kv_cache import CacheView
from ..attention.frame import Span
from ..attention.mechanisms import Operands
from ..config import ModelConfig
from ..models import Block, Decoder, Encoder, EncoderDecoder, Memory, Model, Recurrent, Stack
from ..models.base_model import DecoderShape, mask_from_padding
from ..models.heads import TokenHead
from ..models.recurrent_cells import Alignment, MemoryView, State, StateCache

Axes = dict[int, str]
"""The axes of a tensor whose length is free, by name."""

# Lengths to trace with: none of them 0 or 1, which a trace would take for a property of the graph, and no two alike.
B, N, P, S, T = 2, 4, 5, 6, 3


class Notes:
    """Queries and keys seen while a graph is traced."""

    def __init__(self) -> None:
        self.pages: list[tuple[Tensor, Tensor]] = []

    def write(self, q: Tensor, k: Tensor) -> None:
        self.pages.append((q, k))

    def named(self, *names: str) -> dict[str, Tensor]:
        """As outputs: q_0, k_0, q_1 …"""
        return {f"{name}_{i}": x for i, page in enumerate(self.pages) for name, x in zip(names, page, strict=False)}


class Graph(nn.Module):
    """Something to be written as one ONNX file. ``inputs`` are examples and the names of their free axes."""

    def __init__(self, inputs: dict[str, tuple[Tensor, Axes]]) -> None:
        super().__init__()
        self.input_names = list(inputs)
        self.examples = tuple(example for example, _ in inputs.values())
        self.axes = tuple(axes for _, axes in inputs.values())

    @abstractmethod
    def compute(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """The outputs by name."""

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(self.compute(dict(zip(self.input_names, inputs, strict=True))).values())


def example_of(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def tokens_like(vocab_size: int, *shape: int) -> Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(0))


class LastState(StateCache):
    """The state after the last token: all that a single step has to hand on."""

    def __init__(self) -> None:
        self.now: State = ()

    def push(self, state: State, real: Tensor | None = None) -> State:
        self.now = state
        return state


class RecurrentEncoderGraph(Graph):
    """source (B, S), keep (B, S) → state_0 … and memory_k, memory_v; one where they are the same."""

    def __init__(self, model: Recurrent) -> None:
        axes = {0: "batch", 1: "source"}
        padding_mask = torch.ones(B, S, dtype=torch.bool)
        padding_mask[1, S // 2 :] = False
        super().__init__({"source": (tokens_like(model.config.vocab_size, B, S), axes), "keep": (padding_mask, axes)})
        self.model = model

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

    def __init__(self, model: Recurrent, maps: bool) -> None:
        config = model.config
        with torch.no_grad():
            first = RecurrentEncoderGraph(model)
            given = first.compute(dict(zip(first.input_names, first.examples, strict=True)))
        inputs: dict[str, tuple[Tensor, Axes]] = {
            "tokens": (tokens_like(config.output_vocab_size, B, 1), {0: "batch"}),
            "real": (torch.tensor([[True], [False]]), {0: "batch"}),
        }
        for name, example in given.items():
            axes = {0: "batch"} if name.startswith("state") else {0: "batch", 2: "source"}
            inputs[name] = (example_of(*example.shape), axes)
        if "memory_v" in given:
            inputs["keep"] = (first.examples[1], {0: "batch", 1: "source"})
        super().__init__(inputs)
        self.model = model
        self.n_states = sum(name.startswith("state") for name in given)
        self.notes = Notes()
        attention = model.decoder.cross_attention
        if maps and attention is not None:
            _watch_alignment(attention, self.notes)

    def compute(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        self.notes.pages = []
        model, last = self.model, LastState()
        table = model.token if model.target_token is None else model.target_token
        state = tuple(given[f"state_{i}"] for i in range(self.n_states))
        h = model.decoder.run_steps(table(given["tokens"]), state, self._view(given), given["real"], last)
        out = {"states": h} if model.head is None else {"logits": model.head(h, model.output_table)}
        return out | {f"next_state_{i}": part for i, part in enumerate(last.now)} | self.notes.named("cross_q")

    def _view(self, given: dict[str, Tensor]) -> MemoryView | None:
        if "memory_v" not in given:
            return None
        v = given["memory_v"]
        return MemoryView(given.get("memory_k", v), v, given["keep"])


def _watch_alignment(attention: Alignment, notes: Notes) -> None:
    """The decoder shows its looks, which are q as it is scored, to whoever records: here they are written down."""

    def record_attention(q: Tensor, contexts: Tensor, view: MemoryView, cache: object) -> None:
        notes.write(q, view.k)

    setattr(attention, "record_attention", record_attention)  # noqa: B010 - of this one object, the graph's own copy


def graphs_of(model: Model, maps: bool = False) -> dict[str, Graph]:
    """The graphs of a model by name; ``maps`` adds the queries, and where no cache has them the keys, as outputs."""
    model = traceable(model)
    if isinstance(model, Encoder):
        return {"model": WholeGraph(model, maps)}
    if isinstance(model, Decoder):
        return {"decoder": TextGraph(model, maps)}
    if isinstance(model, EncoderDecoder):
        return {"encoder": SourceGraph(model, maps), "decoder": TargetGraph(model, maps)}
    if isinstance(model, Recurrent):
        return {"encoder": RecurrentEncoderGraph(model), "decoder": RecurrentDecoderGraph(model, maps)}
    raise TypeError(f"model is a {type(model).__name__}; ONNX graphs are written of regard's own models")


def traceable(model: Model) -> Model:
    """A copy to be traced, in float32 on the CPU, whose parameters are the model's own where they already are that."""
    held = {id(p): p for p in (*model.parameters(), *model.buffers())}
    as_they_are = all(p.dtype == torch.float32 and p.device.type == "cpu" for p in model.parameters())
    beside = {id(x): x for x in (model.processor, model.provenance)}
    made = copy.deepcopy(model, {**beside, **held} if as_they_are else beside).eval()
    made = made if as_they_are else made.cpu().float()
    for module in list(made.modules()):
        if isinstance(module, MultiHeadAttention | Alignment):
            module.backend = "auto"  # while tracing it chooses among those that can be traced
        if isinstance(module, MultiHeadAttention | Stack) and module.position_bias is not None:
            module.position_bias = ByPosition(module.position_bias)
    return made


class ByPosition(Bias):
    """A bias read pair by pair. As diagonals, which is faster, a single query is a case of its own in a trace."""

    def __init__(self, bias: Bias) -> None:
        super().__init__()
        self.bias = bias
        self.reads_content, self.n_operands = bias.reads_content, bias.n_operands

    def _frame(self, frame: Frame) -> Frame:
        # No position lies further along than the place it takes up, so no distance exceeds the number of keys.
        return frame if frame.steady is None else replace(frame, steady=None, limit=frame.n_keys)

    def operands(self, frame: Frame) -> Operands:
        return self.bias.operands(self._frame(frame))

    def tile(self, rows: Span, cols: Span, frame: Frame, operands: Operands, q: Tensor, k: Tensor) -> Tensor:
        return self.bias.tile(rows, cols, self._frame(frame), operands, q, k)

    def check(self, frame: Frame) -> None:
        self.bias.check(frame)


class PastCache(Cache):
    """Keys and values that came in as tensors, and with the new ones go out again."""

    def __init__(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        self.k, self.v, self.positions = k, v, positions

    def update(self, k: Tensor, v: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        assert positions is not None
        self.k, self.v = torch.cat([self.k, k], dim=2), torch.cat([self.v, v], dim=2)
        all_positions = torch.cat([self.positions, positions], dim=1)
        self._view = CacheView(k.shape[0], positions, all_positions, limit=self.k.shape[2])
        return self.k, self.v


def watch(attentions: list[MultiHeadAttention], notes: Notes) -> None:
    """Let these write down their q and k, just as they are scored, in the order they are called."""
    for attention in attentions:
        name = "_cross_heads" if attention.cross else "_self_heads"
        setattr(attention, name, _noting(getattr(attention, name), notes))


def _noting(run: Callable[..., Any], notes: Notes) -> Callable[..., Any]:
    def noting(*args: Any) -> Any:
        out = run(*args)
        notes.write(out[0], out[1])
        return out

    return noting


def attentions_of(stack: Stack, cross: bool = False) -> list[MultiHeadAttention]:
    """The attentions of a stack's blocks; none where Fourier mixing stands in for them."""
    found = [block.cross_attention if cross else block.attention for block in blocks_of(stack)]
    return [attention for attention in found if isinstance(attention, MultiHeadAttention)]


def blocks_of(stack: Stack) -> list[Block]:
    return [block for block in stack.blocks if isinstance(block, Block)]


def source_inputs(config: ModelConfig) -> dict[str, tuple[Tensor, Axes]]:
    """What an encoder reads, and which of it is real; an image has no padding."""
    if config.source == "image":
        size = (B, config.n_channels, config.image_size, config.image_size)
        return {"source": (example_of(*size), {0: "batch"})}
    padding_mask = torch.ones(B, S, dtype=torch.bool)
    padding_mask[1, S // 2 :] = False
    axes = {0: "batch", 1: "source"}
    if config.source == "regions":
        return {"source": (example_of(B, S, config.d_region + config.d_box), axes), "keep": (padding_mask, axes)}
    return {"source": (tokens_like(config.vocab_size, B, S), axes), "keep": (padding_mask, axes)}


class WholeGraph(Graph):
    """Encoder-only models: source → logits, or states and, where there is a pooler, the pooled vector."""

    def __init__(self, model: Encoder, maps: bool) -> None:
        inputs = source_inputs(model.config)
        if model.config.n_segments:
            inputs["segments"] = (torch.zeros(B, S, dtype=torch.int64), {0: "batch", 1: "source"})
        super().__init__(inputs)
        self.model = model
        self.notes = Notes()
        if maps:
            watch(attentions_of(model.encoder), self.notes)

    def compute(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        padding_mask, self.notes.pages = given.get("keep"), []
        out = self.model(given["source"], padding_mask=padding_mask, segments=given.get("segments"))
        if self.model.config.head != "none":
            return {"logits": out, **self.notes.named("q", "k")}
        pooled = {} if self.model.pooler is None else {"pooled": self.model.pooled(out, padding_mask)}
        return {"states": out, **pooled, **self.notes.named("q", "k")}


class SourceGraph(Graph):
    """The encoder beside a decoder: source → keys and values of each cross-attention."""

    def __init__(self, model: EncoderDecoder, maps: bool) -> None:
        super().__init__(source_inputs(model.config))
        self.model = model
        self.notes = Notes()
        if maps:
            watch(attentions_of(model.encoder), self.notes)

    def compute(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        self.notes.pages = []
        states = self.model.encode(given["source"], padding_mask=given.get("keep")).states
        out = {}
        for layer, attention in enumerate(attentions_of(self.model.decoder, cross=True)):
            cache = CrossCache()
            attention(states[:, :1], states, cache=cache)  # what one query would see is not asked for, and not computed
            out[f"cross_k_{layer}"], out[f"cross_v_{layer}"] = cache.update()
        return out | self.notes.named("q", "k")


class StepGraph(Graph):
    """A decoder: new tokens, and keys and values of those before them → logits, and the cache with the new ones.

    ``wanted`` lists the new tokens whose logits are asked for: of a prompt the last one, of a text to score all.
    """

    def __init__(
        self,
        config: ModelConfig,
        decoder: Stack,
        more: dict[str, tuple[Tensor, Axes]],
        maps: bool,
    ) -> None:
        self.n_layers, kv = decoder.n_layers, kv_shape(config)
        axes = {0: "batch", 1: "tokens"}
        inputs: dict[str, tuple[Tensor, Axes]] = {
            "tokens": (tokens_like(config.output_vocab_size, B, T), axes),
            "positions": (torch.arange(P, P + T).repeat(B, 1), axes),
            "wanted": (torch.arange(N) % T, {0: "wanted"}),
            "past_positions": (torch.arange(P).repeat(B, 1), {0: "batch", 1: "past"}),
        }
        for layer in range(self.n_layers):
            for name in ("k", "v"):
                inputs[f"past_{name}_{layer}"] = (example_of(B, kv[0], P, kv[1]), {0: "batch", 2: "past"})
        super().__init__(inputs | more)
        self.notes, self.cross_notes = Notes(), Notes()
        if maps:
            watch(attentions_of(decoder), self.notes)
            watch(attentions_of(decoder, cross=True), self.cross_notes)

    def compute(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        self.notes.pages, self.cross_notes.pages = [], []
        past = [
            PastCache(given[f"past_k_{layer}"], given[f"past_v_{layer}"], given["past_positions"])
            for layer in range(self.n_layers)
        ]
        out = self.logits(given, past, given["wanted"])
        for layer, cache in enumerate(past):
            out[f"present_k_{layer}"], out[f"present_v_{layer}"] = cache.k, cache.v
        return out | self.notes.named("q") | self.cross_notes.named("cross_q")

    @abstractmethod
    def logits(self, given: dict[str, Tensor], past: list[PastCache], wanted: Tensor) -> dict[str, Tensor]:
        """The first output; ``past`` is the cache to decode with."""


class TextGraph(StepGraph):
    """A language model."""

    def __init__(self, model: Decoder, maps: bool) -> None:
        super().__init__(model.config, model.decoder, {}, maps)
        self.model = model

    def logits(self, given: dict[str, Tensor], past: list[PastCache], wanted: Tensor) -> dict[str, Tensor]:
        states = self.model.hidden(given["tokens"], positions=given["positions"], cache=ModelCache(past))
        return answer(self.model.head, self.model.token.weight, states.index_select(1, wanted))


class TargetGraph(StepGraph):
    """The decoder beside an encoder, whose keys and values come in as they came out there."""

    def __init__(self, model: EncoderDecoder, maps: bool) -> None:
        self.n_blocks, kv = len(model.decoder.blocks), kv_shape(model.config)
        axes = {0: "batch", 2: "source"}
        more = {
            f"cross_{name}_{layer}": (example_of(B, kv[0], S, kv[1]), axes)
            for layer in range(self.n_blocks)
            for name in ("k", "v")
        }
        if model.config.source != "image":
            more["keep"] = source_inputs(model.config)["keep"]
        super().__init__(model.config, model.decoder, more, maps)
        self.model = model

    def logits(self, given: dict[str, Tensor], past: list[PastCache], wanted: Tensor) -> dict[str, Tensor]:
        memory = Memory(given["cross_k_0"][:, 0, :0], mask_from_padding(given.get("keep")))  # the states are not needed
        cache = ModelCache(past, list(self._filled(given, len(past))))
        states = self.model.decode(given["tokens"], memory, positions=given["positions"], cache=cache)
        return answer(self.model.head, self.model.output_table, states.index_select(1, wanted))

    def _filled(self, given: dict[str, Tensor], n_layers: int) -> Iterator[CrossCache]:
        for layer in range(n_layers):
            cache, block = CrossCache(), layer % self.n_blocks
            cache.update(given[f"cross_k_{block}"], given[f"cross_v_{block}"])
            yield cache


def answer(head: TokenHead | None, table: Tensor, states: Tensor) -> dict[str, Tensor]:
    """Logits, or of a model without a head its states."""
    return {"states": states} if head is None else {"logits": head(states, table)}


def kv_shape(config: ModelConfig) -> tuple[int, int]:
    """Key heads and their width in the decoder."""
    shape = DecoderShape.of(config)
    return shape.n_kv_heads, shape.d_head
