"""Multi-head attention: self, cross and causal; MHA, GQA and MQA; with or without a cache.

MultiHead(x) = Concat(head_1 … head_H) W_o,   head_h = Attention(x W_q, x W_k, x W_v)   (Vaswani et al. §3.2.2)

MHA  n_kv_heads = n_heads      GQA  groups share a key head      MQA  n_kv_heads = 1
q  1 2 3 4 5 6 7 8             q  1 2  3 4  5 6  7 8             q  1 2 3 4 5 6 7 8
   | | | | | | | |                 \\/   \\/   \\/   \\/                \\ \\ \\ \\ / / / /
kv 1 2 3 4 5 6 7 8             kv  1    2    3    4              kv        1
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from ..foundation.checks import check_positive
from ..layers.feedforward import CHUNK_TOKENS, should_chunk
from .attend import prepare
from .backends import run
from .biases import Bias
from .cache import Cache, CrossCache
from .edits import apply_edits_to_call, apply_edits_to_heads
from .frame import Frame
from .masks import Mask
from .mechanisms import Dot, Mechanism, Sinks
from .taps import tap_attention

Rotate = Callable[[Tensor, Tensor], Tensor]  # (heads (B, H, T, D), positions) → heads, such as ``layers.Rope``


class MultiHeadAttention(nn.Module):
    """Self-attention over x (B, T, M), or cross-attention from x to ``memory`` (B, S, d_memory).

    Self-attention stores one matrix ``w_qkv``, cross-attention ``w_query`` and ``w_kv``; ``w_q``, ``w_k`` and ``w_v``
    are views of these.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        d_head: int | None = None,
        *,
        d_memory: int | None = None,
        cross: bool = False,
        qkv_bias: bool = True,
        out_bias: bool = True,
        dropout: float = 0.0,
        rope: Rotate | None = None,
        qk_norm: Callable[[int], nn.Module] | None = None,
        qk_norm_over: Literal["head", "all"] = "head",
        position_bias: Bias | None = None,
        mechanism: Mechanism | None = None,
        sinks: bool = False,
        backend: str = "auto",
        n_global: int | None = None,
    ) -> None:
        """``n_global`` leading tokens use projections of their own (Longformer, Beltagy et al. 2020)."""
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        check_positive(d_model=d_model, n_heads=n_heads, n_kv_heads=n_kv_heads, d_head=1 if d_head is None else d_head)
        if d_head is None and d_model % n_heads:
            hint = "pass d_head to choose the head width"
            raise ValueError(f"d_model={d_model} is not divisible by n_heads={n_heads}; {hint}")
        if n_heads % n_kv_heads:
            raise ValueError(f"n_heads={n_heads} is not divisible by n_kv_heads={n_kv_heads}")
        if d_memory is not None and not cross:
            raise ValueError(f"d_memory={d_memory} applies to cross-attention only; pass cross=True")
        self.d_model, self.n_heads, self.n_kv_heads = d_model, n_heads, n_kv_heads
        self.d_head = d_model // n_heads if d_head is None else d_head
        self.d_memory = d_model if d_memory is None else d_memory
        self.cross, self.dropout, self.backend = cross, dropout, backend
        q_rows, kv_rows = n_heads * self.d_head, 2 * n_kv_heads * self.d_head
        if cross:
            self.w_query = nn.Linear(d_model, q_rows, bias=qkv_bias)
            self.w_kv = nn.Linear(self.d_memory, kv_rows, bias=qkv_bias)
        else:
            self.w_qkv = nn.Linear(d_model, q_rows + kv_rows, bias=qkv_bias)
        self.n_global = n_global
        self.w_qkv_global = None if n_global is None else nn.Linear(d_model, q_rows + kv_rows, bias=qkv_bias)
        self.w_o = nn.Linear(q_rows, d_model, bias=out_bias)
        self.rope = rope
        self.norms_all_heads = qk_norm_over == "all"
        q_heads, k_heads = (n_heads, n_kv_heads) if self.norms_all_heads else (1, 1)
        self.q_norm = None if qk_norm is None else qk_norm(q_heads * self.d_head)
        self.k_norm = None if qk_norm is None else qk_norm(k_heads * self.d_head)
        self.position_bias = position_bias
        self.mechanism = Dot() if mechanism is None else mechanism
        self.sinks = Sinks(n_heads) if sinks else None
        self.reset_parameters()

    @property
    def w_q(self) -> Tensor:
        """The query weights (H · D, M), a view."""
        return self.w_query.weight if self.cross else self.w_qkv.weight[: self.n_heads * self.d_head]

    @property
    def w_k(self) -> Tensor:
        """The key weights (G · D, M), a view."""
        return self._kv_weight[: self.n_kv_heads * self.d_head]

    @property
    def w_v(self) -> Tensor:
        """The value weights (G · D, M), a view."""
        return self._kv_weight[self.n_kv_heads * self.d_head :]

    @property
    def writes_by_head(self) -> bool:
        """Whether each head's weighted sum is projected by its own columns of W_o, and nothing changes it before."""
        return self.mechanism.maps == 1 and type(self.mechanism).combine is Mechanism.combine

    def head_outputs(self) -> Tensor:
        """W_o by head (M, H, D), which maps a head's weighted sum to its output; a view."""
        if not self.writes_by_head:
            name = self.mechanism.name
            raise ValueError(f"mechanism {name!r} changes the heads' sums before W_o, so a single head has no output")
        return self.w_o.weight.unflatten(1, (self.n_heads, self.d_head))

    @property
    def _kv_weight(self) -> Tensor:
        return self.w_kv.weight if self.cross else self.w_qkv.weight[self.n_heads * self.d_head :]

    def reset_parameters(self) -> None:
        """Xavier-uniform for q, k, v and o separately."""
        extra = () if self.w_qkv_global is None else self.w_qkv_global.weight.chunk(3)
        for weight in (self.w_q, self.w_k, self.w_v, self.w_o.weight, *extra):
            nn.init.xavier_uniform_(weight)
        for module in self.children():
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        mask: Mask | None = None,
        frame: Frame | None = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
        position_bias: Bias | None = None,
    ) -> Tensor:
        """x (B, T, M) → (B, T, M).

        Positions are 0, 1, 2 … (continuing those in ``cache``) unless given by ``positions``, (T,) or (B, T) with -1
        for padding, or by a ``frame``. ``position_bias`` replaces the layer's own, for layers that share one (T5).
        """
        if self.cross:
            q, k, v, frame = self._cross_heads(x, memory, frame, cache)
        else:
            q, k, v, frame = self._self_heads(x, memory, frame, positions, cache)
        is_global = None
        if self.w_qkv_global is not None and self.n_global:
            q, k, v, is_global = self._add_global_heads(x, q, k, v)
        bias = self.position_bias if position_bias is None else position_bias
        dropout = self.dropout if self.training else 0.0
        sinks = None if self.sinks is None else self.sinks.logits
        call = prepare(q, k, v, mask, bias, mechanism=self.mechanism, frame=frame, dropout=dropout, sinks=sinks)
        call = apply_edits_to_call(self, call)
        output = run(call, self.backend).output
        if is_global is not None:  # keep the half that belongs to each row
            output = torch.where(is_global, output[..., self.d_head :], output[..., : self.d_head])
        output = apply_edits_to_heads(self, call, output)
        output = tap_attention(self, call, output, cache)
        del q, k, v, call  # free their memory before the projection
        output = self.mechanism.combine(output)
        return self.w_o(output.transpose(1, 2).flatten(2))  # (B, T, H · D) → (B, T, M)

    def _add_global_heads(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Concatenate local and global q, k and v along the width, (B, H, T, 2 D); and which rows are global (T, 1).

        A query is 0 in the half it does not use, so that a single attention call scores every row with the right keys.
        """
        assert self.w_qkv_global is not None and self.n_global is not None
        q_global, k_global, v_global = self._project(
            self.w_qkv_global, x, self.n_heads, self.n_kv_heads, self.n_kv_heads
        )
        is_global = (torch.arange(x.shape[1], device=x.device) < self.n_global)[:, None]
        q = torch.cat([q.masked_fill(is_global, 0), q_global.masked_fill(~is_global, 0)], -1)
        return q, torch.cat([k, k_global], -1), torch.cat([v, v_global], -1), is_global

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, T, D), keys and values (B, G, T, D) of a sequence x (B, T, M), after norms and rotation."""
        return self._self_heads(x, None, None, None, None)[:3]

    def store_keys(self, x: Tensor, cache: Cache) -> None:
        """Store the keys and values of all tokens of x (B, T, M) but the last in a cache, for it to attend to."""
        if x.shape[1] > 1:  # the last is rotated too, because frequencies may depend on the length
            _, k, v, _ = self._self_heads(x, None, None, cache.next_positions(x.shape[1], x.device), None)
            cache.update(k[:, :, :-1], v[:, :, :-1])

    def query_heads(self, x: Tensor) -> Tensor:
        """The queries of a cross-attention, x (B, T, M) → (B, H, T, D)."""
        (q,) = self._project(self.w_query, x, self.n_heads)
        return self._normalise(q, self.q_norm)

    def memory_heads(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of a cross-attention, memory (B, S, d_memory) → (B, G, S, D) each."""
        k, v = self._project(self.w_kv, memory, self.n_kv_heads, self.n_kv_heads)
        return self._normalise(k, self.k_norm), v

    def _self_heads(
        self, x: Tensor, memory: Tensor | None, frame: Frame | None, positions: Tensor | None, cache: Cache | None
    ) -> tuple[Tensor, Tensor, Tensor, Frame]:
        if memory is not None:
            raise ValueError("memory was given to self-attention; cross-attention needs cross=True")
        if frame is not None and (positions is not None or cache is not None):
            other = "positions" if cache is None else "cache"
            raise ValueError(f"frame and {other} both define the positions; pass only one of them")
        if isinstance(cache, CrossCache):
            raise TypeError("cache is a CrossCache, which does not add new tokens; self-attention needs another cache")
        self._check_width("x", x, self.d_model)
        q, k, v = self._project(self.w_qkv, x, self.n_heads, self.n_kv_heads, self.n_kv_heads)
        q, k = self._normalise_qk(q, k)
        if self.rope is not None:
            q_pos = self._positions(x, frame, cache) if positions is None else positions
            q, k = self.rope(q, q_pos), self.rope(k, q_pos if frame is None else frame.k_pos)
        if cache is not None:
            k, v = cache.update(k, v, positions)
            frame = cache.frame(self.n_heads)
        elif frame is None and positions is not None:
            frame = Frame(x.shape[0], self.n_heads, positions, positions)
        return q, k, v, Frame.of(q, k) if frame is None else frame

    def _positions(self, x: Tensor, frame: Frame | None, cache: Cache | None) -> Tensor:
        if frame is not None:
            return frame.q_pos
        if cache is not None:
            return cache.next_positions(x.shape[1], x.device)
        return torch.arange(x.shape[1], device=x.device)

    def _cross_heads(
        self, x: Tensor, memory: Tensor | None, frame: Frame | None, cache: Cache | None
    ) -> tuple[Tensor, Tensor, Tensor, Frame]:
        self._check_width("x", x, self.d_model)
        if cache is not None and not isinstance(cache, CrossCache):
            raise TypeError(f"cache is a {type(cache).__name__}, but cross-attention keeps its memory in a CrossCache")
        q = self.query_heads(x)
        if cache is not None and cache.is_filled:
            k, v = cache.update()
        else:
            if memory is None:
                raise ValueError("cross-attention needs memory (B, S, d_memory), or a cache that already holds it")
            self._check_width("memory", memory, self.d_memory)
            k, v = self.memory_heads(memory)
            if cache is not None:
                cache.update(k, v)
        return q, k, v, Frame.of(q, k) if frame is None else frame

    def _project(self, project: nn.Module, x: Tensor, *counts: int) -> list[Tensor]:
        """x (B, T, M) → heads (B, count, T, D) for each count; long inputs go in chunks to save memory."""
        if (fused := getattr(project, "heads", None)) is not None:  # a layer of ``training.fused_layers``
            return fused(x, counts, self.d_head)
        if not should_chunk(x):
            return self._heads(project(x), *counts)
        heads: list[Tensor] = []
        for start in range(0, x.shape[1], CHUNK_TOKENS):
            parts = self._heads(project(x[:, start : start + CHUNK_TOKENS]), *counts)
            heads = heads or [part.new_empty(*part.shape[:2], x.shape[1], self.d_head) for part in parts]
            for out, part in zip(heads, parts, strict=True):
                out[:, :, start : start + CHUNK_TOKENS] = part
        return heads

    def _heads(self, x: Tensor, *counts: int) -> list[Tensor]:
        """(B, T, heads · D) → heads (B, count, T, D) for each count, as views."""
        parts = x.unflatten(-1, (-1, self.d_head)).split(counts, dim=2)
        return [part.transpose(1, 2) for part in parts]

    def _normalise_qk(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self._normalise(q, self.q_norm), self._normalise(k, self.k_norm)

    def _normalise(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        """Normalise x (B, heads, T, D) over each head, or over all heads of a token."""
        if norm is None:
            return x
        if not self.norms_all_heads:
            return norm(x)
        return norm(x.transpose(1, 2).flatten(2)).unflatten(2, (x.shape[1], -1)).transpose(1, 2)

    def _check_width(self, name: str, x: Tensor, width: int) -> None:
        if x.dim() != 3 or x.shape[-1] != width:
            raise ValueError(f"{name} must be (batch, length, {width}), got shape {tuple(x.shape)}")

    def extra_repr(self) -> str:
        counts = f"{self.n_heads}" if self.n_kv_heads == self.n_heads else f"{self.n_heads}/{self.n_kv_heads}"
        return f"{counts} heads of {self.d_head}, backend={self.backend}{', cross' if self.cross else ''}"
