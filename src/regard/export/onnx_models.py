"""Model classes whose forward passes run ONNX graphs; they are called and generate like any other model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..attention import Frame
from ..attention.attention_map import AttentionMap
from ..attention.cache import ModelCache
from ..attention.score_matrix import ScoreMatrix
from ..models import Decoder, Encoder, EncoderDecoder, Memory, Recurrent, Stack
from ..models.base_model import mask_from_padding
from ..models.recurrent import RecurrentMemory
from ..models.recurrent_cells import MemoryCache, MemoryView, StateCache
from .onnx_runtime import (
    Maps,
    OnnxModel,
    logits_or_states,
    memory_padding_mask,
    run_decoder,
    source_inputs,
    stack_maps,
    token_positions,
)


class OnnxEncoder(OnnxModel, Encoder):
    """An encoder-only model."""

    graph_names = ("model",)

    def run(
        self,
        source: Tensor,
        padding_mask: Tensor | None = None,
        segments: Tensor | None = None,
        names: list[str] | None = None,
    ) -> dict[str, Tensor]:
        """The outputs called ``names``, by default all: logits, or states and the pooled vector; queries and keys if
        exported."""
        return self.sessions["model"].run(source_inputs(self.config, source, padding_mask, segments), names)

    def hidden(self, source: Tensor, **options: Any) -> Tensor:
        """The last layer's states (B, S, M), for a model without a head; the graph of any other returns logits."""
        return self(source, **options)

    def forward(self, source: Tensor, *, positions: Tensor | None = None, **options: Any) -> Tensor:
        """Logits or states. Options are those of ``Encoder``."""
        self._refuse_positions(positions)
        return logits_or_states(
            self.run(source, **options, names=["states" if self.config.head == "none" else "logits"])
        )

    def pooled(self, states: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        raise ValueError("the ONNX graph returns the pooled vector together with the states: run(source)['pooled']")

    def _maps(self, source: Tensor, target: Tensor, padding_mask: Tensor | None, target_mask: Tensor | None) -> Maps:
        assert isinstance(self.encoder, Stack)
        return stack_maps("encoder", self.encoder, self.run(source, padding_mask), padding_mask)


class OnnxDecoder(OnnxModel, Decoder):
    """A language model."""

    graph_names = ("decoder",)

    def hidden(self, tokens: Tensor, *, cache: ModelCache | None = None, **options: Any) -> Tensor:
        """Logits (B, T, V) instead of states; the model's head is the identity.

        Prefill of an empty cache returns only the last token's logits (B, 1, V), as generation needs no others.
        """
        return self._logits(tokens, cache is None or cache.length > 0, cache=cache, **options)

    def forward(self, tokens: Tensor, **options: Any) -> Tensor:
        """tokens (B, T) → logits (B, T, V); those at padding are undefined. Options are those of ``Decoder``."""
        return self._logits(tokens, True, **options)

    def _logits(
        self,
        tokens: Tensor,
        all_logits: bool,
        padding_mask: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: ModelCache | None = None,
    ) -> Tensor:
        if documents is not None:
            raise ValueError("an ONNX graph cannot read packed documents")
        positions = token_positions(tokens, padding_mask, positions, cache)
        cache = self.new_cache() if cache is None else cache
        return logits_or_states(run_decoder(self, tokens, positions, cache, all_logits=all_logits))

    def _maps(self, source: Tensor, target: Tensor, padding_mask: Tensor | None, target_mask: Tensor | None) -> Maps:
        positions = token_positions(source, padding_mask, None, None)
        out = run_decoder(self, source, positions, self.new_cache(), all_logits=False, outputs=("q_",))
        return stack_maps("decoder", self.decoder, out, None, positions)


@dataclass(frozen=True, eq=False)
class OnnxMemory(Memory):
    """The encoder graph's output: keys and values of every cross-attention, and no states."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, tensors: dict[str, Tensor], padding_mask: Tensor | None, n_batch: int, width: int) -> OnnxMemory:
        return cls(torch.zeros(n_batch, 0, width), mask_from_padding(padding_mask), tensors)


class OnnxEncoderDecoder(OnnxModel, EncoderDecoder):
    """A translator or a captioner."""

    graph_names = ("encoder", "decoder")

    def encode(self, source: Tensor, *, padding_mask: Tensor | None = None, positions: Tensor | None = None) -> Memory:
        self._refuse_positions(positions)
        graph = self.sessions["encoder"]
        names = [name for name in graph.outputs if name.startswith("cross_")]
        out = graph.run(source_inputs(self.config, source, padding_mask), names)
        return OnnxMemory.of(out, padding_mask, len(source), self.config.d_model)

    def decode(self, target: Tensor, memory: Memory, **options: Any) -> Tensor:
        """Logits (B, T, V) instead of states; the model's head is the identity."""
        return logits_or_states(self._run(target, memory, **options))

    def _run(
        self,
        target: Tensor,
        memory: Memory,
        padding_mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: ModelCache | None = None,
        outputs: tuple[str, ...] = (),
    ) -> dict[str, Tensor]:
        positions = token_positions(target, padding_mask, positions, cache)
        cache = self.new_cache() if cache is None else cache
        n_blocks = len(self.decoder.blocks)
        if not cache.cross[0].is_filled:
            if not isinstance(memory, OnnxMemory):
                raise TypeError(f"memory must come from encode() of this model, got {type(memory).__name__}")
            for layer, cross in enumerate(cache.cross):
                block = layer % n_blocks
                cross.update(memory.tensors[f"cross_k_{block}"], memory.tensors[f"cross_v_{block}"])
        cross_inputs = {}
        for block in range(n_blocks):
            cross_inputs[f"cross_k_{block}"], cross_inputs[f"cross_v_{block}"] = cache.cross[block].update()
        cross_inputs["keep"] = memory_padding_mask(memory, len(target), cross_inputs["cross_k_0"].shape[2])
        return run_decoder(self, target, positions, cache, cross_inputs, all_logits=True, outputs=outputs)

    def _maps(self, source: Tensor, target: Tensor, padding_mask: Tensor | None, target_mask: Tensor | None) -> Maps:
        encoded = self.sessions["encoder"].run(source_inputs(self.config, source, padding_mask))
        memory = OnnxMemory.of(encoded, padding_mask, len(source), self.config.d_model)
        positions = token_positions(target, target_mask, None, None)
        decoded = self._run(target, memory, positions=positions, outputs=("q_", "cross_q_"))
        decoded |= {name: x for name, x in encoded.items() if name.startswith("cross_k_")}
        encoder_maps = stack_maps("encoder", self.encoder, encoded, padding_mask)
        return encoder_maps | stack_maps("decoder", self.decoder, decoded, padding_mask, positions)


@dataclass(frozen=True, eq=False)
class OnnxRecurrentMemory(RecurrentMemory):
    """The encoder's states, the decoder's initial state, and the projected keys (B, 1, S, D)."""

    keys: Tensor = field(default_factory=lambda: torch.zeros(0))


class OnnxRecurrent(OnnxModel, Recurrent):
    """A recurrent translator. Its decoder graph computes one step and runs once per target token."""

    graph_names = ("encoder", "decoder")

    def encode(
        self, source: Tensor, *, padding_mask: Tensor | None = None, positions: Tensor | None = None
    ) -> RecurrentMemory:
        if padding_mask is None and positions is not None:
            padding_mask = positions.expand(source.shape) >= 0
        out = self.sessions["encoder"].run(source_inputs(self.config, source, padding_mask))
        state = tuple(out[name] for name in out if name.startswith("state_"))
        v = out.get("memory_v", torch.zeros(len(source), 1, source.shape[1], 0))
        return OnnxRecurrentMemory(v[:, 0], mask_from_padding(padding_mask), state, out.get("memory_k", v))

    def decode(self, target: Tensor, memory: Memory | None, **options: Any) -> Tensor:
        """Logits (B, T, V) instead of states; the model's head is the identity."""
        return logits_or_states(self._run_steps(target, memory, **options))

    def _run_steps(
        self,
        target: Tensor,
        memory: Memory | None,
        padding_mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: ModelCache | None = None,
    ) -> dict[str, Tensor]:
        cache = self.new_cache() if cache is None else cache
        states, memory_cache = cache.layers[0], cache.cross[0]
        assert isinstance(states, StateCache) and isinstance(memory_cache, MemoryCache)
        if not states.filled:
            if not isinstance(memory, OnnxRecurrentMemory):
                raise TypeError(f"memory must come from encode() of this model, got {type(memory).__name__}")
            states.start(memory.final)
            v = memory.states[:, None]
            memory_cache.fill(MemoryView(memory.keys, v, memory_padding_mask(memory, len(v), v.shape[2])))
        n_new = target.shape[1]
        real = torch.ones(target.shape, dtype=torch.bool) if padding_mask is None else padding_mask.bool()[:, -n_new:]
        real = real if positions is None else real & (positions.expand(target.shape) >= 0)
        steps = [self._run_step(target[:, [t]], real[:, [t]], states, memory_cache) for t in range(n_new)]
        return {name: torch.cat([s[name] for s in steps], dim=2 if name == "cross_q_0" else 1) for name in steps[0]}

    def _run_step(
        self, tokens: Tensor, real: Tensor, states: StateCache, memory_cache: MemoryCache
    ) -> dict[str, Tensor]:
        view = memory_cache.view
        assert view is not None and view.real is not None
        inputs = {"tokens": tokens.long(), "real": real, "keep": view.real, "memory_k": view.k, "memory_v": view.v}
        inputs |= {f"state_{i}": part for i, part in enumerate(states.state())}
        out = self.sessions["decoder"].run(inputs)
        names = [name for name in out if name.startswith("next_state_")]
        states.push(tuple(out.pop(name) for name in names), real[:, 0])
        return out

    def _maps(self, source: Tensor, target: Tensor, padding_mask: Tensor | None, target_mask: Tensor | None) -> Maps:
        attention = self.decoder.cross_attention
        if attention is None:
            return {}
        memory = self.encode(source, padding_mask=padding_mask)
        assert isinstance(memory, OnnxRecurrentMemory)
        q, k = self._run_steps(target, memory, target_mask)["cross_q_0"], memory.keys  # (B, 1, T, D) and (B, 1, S, D)
        mask, mechanism = mask_from_padding(padding_mask), attention.mechanism
        return {"decoder.cross_attention": AttentionMap.of(ScoreMatrix(q, k, mask, None, mechanism, Frame.of(q, k)))}
