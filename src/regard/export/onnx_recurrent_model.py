"""Recurrent translators whose numbers lie in ONNX graphs."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..attention.attention_map import AttentionMap
from ..attention.cache import ModelCache
from ..attention.cache.static_cache import CacheDtype
from ..config import ModelConfig
from ..models import Memory, Recurrent
from ..models.base_model import padding_mask
from ..models.recurrent import RecurrentMemory
from ..models.recurrent_cells import MemoryCache, MemoryView, StateCache
from .onnx_maps import recurrent_map
from .onnx_running import GraphHead, OnnxModel, first_of, keep_of, new_cache, source_inputs
from .onnx_session import Session


@dataclass(frozen=True, eq=False)
class OnnxRecurrentMemory(RecurrentMemory):
    """Beside the states and where the decoder starts, the keys as attention scores them, (B, 1, S, D)."""

    keys: Tensor = field(default_factory=lambda: torch.zeros(0))


class OnnxRecurrent(OnnxModel, Recurrent):
    """A recurrent translator. Its decoder's graph is one step, so a target of several tokens is a walk."""

    graph_names = ("encoder", "decoder")

    def __init__(self, config: ModelConfig, sessions: dict[str, Session]) -> None:
        with torch.device("meta"):
            Recurrent.__init__(self, config)
        self._open(sessions)
        self.head = GraphHead.instead_of(self.head)

    def new_cache(
        self, batch: int | None = None, max_len: int | None = None, cache_dtype: CacheDtype = "model"
    ) -> ModelCache:
        new_cache(self.config, batch, max_len)  # refuses to preallocate
        return ModelCache([StateCache()], [MemoryCache()])

    def encode(self, source: Tensor, *, keep: Tensor | None = None, positions: Tensor | None = None) -> RecurrentMemory:
        if keep is None and positions is not None:
            keep = positions.expand(source.shape) >= 0
        out = self.sessions["encoder"].run(source_inputs(self.config, source, keep))
        state = tuple(out[name] for name in out if name.startswith("state_"))
        v = out.get("memory_v", torch.zeros(len(source), 1, source.shape[1], 0))
        return OnnxRecurrentMemory(v[:, 0], padding_mask(keep), state, out.get("memory_k", v))

    def decode(
        self,
        target: Tensor,
        memory: Memory | None,
        *,
        keep: Tensor | None = None,
        positions: Tensor | None = None,
        cache: ModelCache | None = None,
    ) -> Tensor:
        """What stands for states before the (empty) head: logits (B, T, V)."""
        return first_of(self._walk(target, memory, keep, positions, cache))

    def _walk(
        self,
        target: Tensor,
        memory: Memory | None,
        keep: Tensor | None,
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
        real = torch.ones(target.shape, dtype=torch.bool) if keep is None else keep.bool()[:, -target.shape[1] :]
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
        self, source: Tensor, target: Tensor, keep: Tensor | None, target_keep: Tensor | None
    ) -> dict[str, AttentionMap]:
        attention = self.decoder.cross_attention
        if attention is None:
            return {}
        memory = self.encode(source, keep=keep)
        assert isinstance(memory, OnnxRecurrentMemory)
        q = self._walk(target, memory, target_keep, None, None)["cross_q_0"]
        return {"decoder.cross_attention": recurrent_map(q, memory.keys, keep, attention.mechanism)}
