"""Models whose weights lie in ONNX graphs: called, decoded with and searched like any other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..attention.attention_map import AttentionMap
from ..attention.cache import ModelCache
from ..attention.cache.static_cache import CacheDtype
from ..config import ModelConfig
from ..models import Decoder, Encoder, EncoderDecoder, Memory, Recurrent
from ..models.base_model import mask_from_padding
from ..models.recurrent import RecurrentMemory
from ..models.recurrent_cells import MemoryCache, MemoryView, StateCache
from .onnx_runtime import (
    GraphHead,
    OnnxModel,
    OnnxSession,
    first_of,
    keep_of,
    new_cache,
    places,
    recurrent_map,
    source_inputs,
    stack_maps,
    step,
)


class OnnxEncoder(OnnxModel, Encoder):
    """An encoder-only model."""

    graph_names = ("model",)

    def __init__(self, config: ModelConfig, sessions: dict[str, OnnxSession]) -> None:
        with torch.device("meta"):
            Encoder.__init__(self, config)
        self._open(sessions)

    def run(
        self, source: Tensor, padding_mask: Tensor | None = None, segments: Tensor | None = None
    ) -> dict[str, Tensor]:
        """All outputs by name: logits, or states and the pooled vector; queries and keys where they were exported."""
        return self.sessions["model"].run(source_inputs(self.config, source, padding_mask, segments))

    def hidden(self, source: Tensor, **options: Any) -> Tensor:
        """The last layer's states, of a model without a head; with one, only the graph has them."""
        if self.config.head != "none":
            raise ValueError(f"head={self.config.head!r} is part of the ONNX graph: states do not come out of it")
        return self(source, **options)

    def forward(
        self,
        source: Tensor,
        *,
        padding_mask: Tensor | None = None,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> Tensor:
        if positions is not None:
            raise ValueError("positions cannot be given: in an encoder's ONNX graph tokens stand at 0, 1, 2 …")
        name = "states" if self.config.head == "none" else "logits"
        return self.sessions["model"].run(source_inputs(self.config, source, padding_mask, segments), [name])[name]

    def pooled(self, states: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        raise ValueError("the pooled vector comes out of the ONNX graph with the states: run(source)['pooled']")

    def _maps(
        self, source: Tensor, target: Tensor, padding_mask: Tensor | None, target_padding_mask: Tensor | None
    ) -> dict[str, AttentionMap]:
        return stack_maps("encoder", self.encoder, self.run(source, padding_mask), padding_mask)


class OnnxDecoder(OnnxModel, Decoder):
    """A language model."""

    graph_names = ("decoder",)

    def __init__(self, config: ModelConfig, sessions: dict[str, OnnxSession]) -> None:
        with torch.device("meta"):
            Decoder.__init__(self, config)
        self._open(sessions)
        self.head = GraphHead.instead_of(self.head)

    def new_cache(
        self, batch: int | None = None, max_len: int | None = None, cache_dtype: CacheDtype = "model"
    ) -> ModelCache:
        return new_cache(self.config, batch, max_len)

    def hidden(
        self,
        tokens: Tensor,
        *,
        padding_mask: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: ModelCache | None = None,
    ) -> Tensor:
        """What stands for states before the (empty) head: logits, (B, T, V); of a prompt, which fills an empty cache,
        those of its last token alone, (B, 1, V), as nothing else is ever asked of it."""
        return self._run(
            tokens, padding_mask, positions, documents, cache, all_logits=cache is None or cache.length > 0
        )

    def forward(
        self,
        tokens: Tensor,
        *,
        padding_mask: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: ModelCache | None = None,
    ) -> Tensor:
        """tokens (B, T) → logits (B, T, V). What comes out at padding means nothing."""
        return self._run(tokens, padding_mask, positions, documents, cache, all_logits=True)

    def _run(
        self,
        tokens: Tensor,
        padding_mask: Tensor | None,
        positions: Tensor | None,
        documents: Tensor | None,
        cache: ModelCache | None,
        all_logits: bool,
    ) -> Tensor:
        if documents is not None:
            raise ValueError("documents cannot be packed into one row of an ONNX graph's input")
        at = places(tokens, padding_mask, positions, cache)
        cache = self.new_cache() if cache is None else cache
        return first_of(step(self.sessions["decoder"], self.config, tokens, at, cache, {}, all_logits))

    def _maps(
        self, source: Tensor, target: Tensor, padding_mask: Tensor | None, target_padding_mask: Tensor | None
    ) -> dict[str, AttentionMap]:
        at = places(source, padding_mask, None, None)
        names = [name for name in self.sessions["decoder"].outputs if name.startswith("q_")]
        out = step(self.sessions["decoder"], self.config, source, at, self.new_cache(), {}, False, names)
        return stack_maps("decoder", self.decoder, out, None, at)


@dataclass(frozen=True, eq=False)
class OnnxMemory(Memory):
    """What an encoder's graph gave: keys and values of every cross-attention, and no states."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, tensors: dict[str, Tensor], padding_mask: Tensor | None, n_batch: int, width: int) -> OnnxMemory:
        return cls(torch.zeros(n_batch, 0, width), mask_from_padding(padding_mask), tensors)


class OnnxEncoderDecoder(OnnxModel, EncoderDecoder):
    """A translator or a captioner."""

    graph_names = ("encoder", "decoder")

    def __init__(self, config: ModelConfig, sessions: dict[str, OnnxSession]) -> None:
        with torch.device("meta"):
            EncoderDecoder.__init__(self, config)
        self._open(sessions)
        self.head = GraphHead.instead_of(self.head)

    def new_cache(
        self, batch: int | None = None, max_len: int | None = None, cache_dtype: CacheDtype = "model"
    ) -> ModelCache:
        return new_cache(self.config, batch, max_len)

    def encode(self, source: Tensor, *, padding_mask: Tensor | None = None, positions: Tensor | None = None) -> Memory:
        if positions is not None:
            raise ValueError("positions cannot be given: in an encoder's ONNX graph tokens stand at 0, 1, 2 …")
        graph = self.sessions["encoder"]
        names = [name for name in graph.outputs if name.startswith("cross_")]
        out = graph.run(source_inputs(self.config, source, padding_mask), names)
        return OnnxMemory.of(out, padding_mask, len(source), self.config.d_model)

    def decode(
        self,
        target: Tensor,
        memory: Memory,
        *,
        padding_mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: ModelCache | None = None,
    ) -> Tensor:
        """What stands for states before the (empty) head: logits (B, T, V)."""
        return first_of(self._step(target, memory, padding_mask, positions, cache)[0])

    def _step(
        self,
        target: Tensor,
        memory: Memory,
        padding_mask: Tensor | None,
        positions: Tensor | None,
        cache: ModelCache | None,
        also: list[str] | None = None,
    ) -> tuple[dict[str, Tensor], Tensor]:
        stand = places(target, padding_mask, positions, cache)
        cache = self.new_cache() if cache is None else cache
        n_blocks = len(self.decoder.blocks)
        if not cache.cross[0].is_filled:
            if not isinstance(memory, OnnxMemory):
                raise TypeError(f"memory must come from encode() of this model, got {type(memory).__name__}")
            for layer, cross in enumerate(cache.cross):
                at = layer % n_blocks
                cross.update(memory.tensors[f"cross_k_{at}"], memory.tensors[f"cross_v_{at}"])
        more = {}
        for block in range(n_blocks):
            more[f"cross_k_{block}"], more[f"cross_v_{block}"] = cache.cross[block].update()
        more["keep"] = keep_of(memory, len(target), more["cross_k_0"].shape[2])
        return step(self.sessions["decoder"], self.config, target, stand, cache, more, True, also), stand

    def _maps(
        self, source: Tensor, target: Tensor, padding_mask: Tensor | None, target_padding_mask: Tensor | None
    ) -> dict[str, AttentionMap]:
        encoder = self.sessions["encoder"].run(source_inputs(self.config, source, padding_mask))
        names = [name for name in self.sessions["decoder"].outputs if name.startswith(("q_", "cross_q_"))]
        memory = OnnxMemory.of(encoder, padding_mask, len(source), self.config.d_model)
        out, at = self._step(target, memory, target_padding_mask, None, None, names)
        seen = {name: x for name, x in encoder.items() if name.startswith("cross_k_")}
        return stack_maps("encoder", self.encoder, encoder, padding_mask) | stack_maps(
            "decoder", self.decoder, out | seen, padding_mask, at
        )


@dataclass(frozen=True, eq=False)
class OnnxRecurrentMemory(RecurrentMemory):
    """Beside the states and where the decoder starts, the keys as attention scores them, (B, 1, S, D)."""

    keys: Tensor = field(default_factory=lambda: torch.zeros(0))


class OnnxRecurrent(OnnxModel, Recurrent):
    """A recurrent translator. Its decoder's graph is one step, so a target of several tokens is a walk."""

    graph_names = ("encoder", "decoder")

    def __init__(self, config: ModelConfig, sessions: dict[str, OnnxSession]) -> None:
        with torch.device("meta"):
            Recurrent.__init__(self, config)
        self._open(sessions)
        self.head = GraphHead.instead_of(self.head)

    def new_cache(
        self, batch: int | None = None, max_len: int | None = None, cache_dtype: CacheDtype = "model"
    ) -> ModelCache:
        new_cache(self.config, batch, max_len)  # refuses to preallocate
        return ModelCache([StateCache()], [MemoryCache()])

    def encode(
        self, source: Tensor, *, padding_mask: Tensor | None = None, positions: Tensor | None = None
    ) -> RecurrentMemory:
        if padding_mask is None and positions is not None:
            padding_mask = positions.expand(source.shape) >= 0
        out = self.sessions["encoder"].run(source_inputs(self.config, source, padding_mask))
        state = tuple(out[name] for name in out if name.startswith("state_"))
        v = out.get("memory_v", torch.zeros(len(source), 1, source.shape[1], 0))
        return OnnxRecurrentMemory(v[:, 0], mask_from_padding(padding_mask), state, out.get("memory_k", v))

    def decode(
        self,
        target: Tensor,
        memory: Memory | None,
        *,
        padding_mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: ModelCache | None = None,
    ) -> Tensor:
        """What stands for states before the (empty) head: logits (B, T, V)."""
        return first_of(self._walk(target, memory, padding_mask, positions, cache))

    def _walk(
        self,
        target: Tensor,
        memory: Memory | None,
        padding_mask: Tensor | None,
        positions: Tensor | None,
        cache: ModelCache | None,
    ) -> dict[str, Tensor]:
        cache = self.new_cache() if cache is None else cache
        states, seen = cache.layers[0], cache.cross[0]
        assert isinstance(states, StateCache) and isinstance(seen, MemoryCache)
        if not states.filled:
            if not isinstance(memory, OnnxRecurrentMemory):
                raise TypeError(f"memory must come from encode() of this model, got {type(memory).__name__}")
            states.start(memory.final)
            v = memory.states[:, None]
            seen.fill(MemoryView(memory.keys, v, keep_of(memory, len(v), v.shape[2])))
        real = (
            torch.ones(target.shape, dtype=torch.bool)
            if padding_mask is None
            else padding_mask.bool()[:, -target.shape[1] :]
        )
        real = real if positions is None else real & (positions.expand(target.shape) >= 0)
        steps = [self._one(target[:, t : t + 1], real[:, t : t + 1], states, seen) for t in range(target.shape[1])]
        return {name: torch.cat([s[name] for s in steps], dim=2 if name == "cross_q_0" else 1) for name in steps[0]}

    def _one(self, tokens: Tensor, real: Tensor, states: StateCache, seen: MemoryCache) -> dict[str, Tensor]:
        assert seen.view is not None and seen.view.real is not None
        given = {"tokens": tokens.long(), "real": real, "keep": seen.view.real}
        given |= {"memory_k": seen.view.k, "memory_v": seen.view.v}
        given |= {f"state_{i}": part for i, part in enumerate(states.state())}
        out = self.sessions["decoder"].run(given)
        names = [name for name in out if name.startswith("next_state_")]
        states.push(tuple(out.pop(name) for name in names), real[:, 0])
        return out

    def _maps(
        self, source: Tensor, target: Tensor, padding_mask: Tensor | None, target_padding_mask: Tensor | None
    ) -> dict[str, AttentionMap]:
        attention = self.decoder.cross_attention
        if attention is None:
            return {}
        memory = self.encode(source, padding_mask=padding_mask)
        assert isinstance(memory, OnnxRecurrentMemory)
        q = self._walk(target, memory, target_padding_mask, None, None)["cross_q_0"]
        return {"decoder.cross_attention": recurrent_map(q, memory.keys, padding_mask, attention.mechanism)}
