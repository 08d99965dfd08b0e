"""Rotary position embedding: queries and keys turned by their position, so that their product sees the distance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from ..foundation.checks import check_positive
from .rope_scaling import RopeScaling, frequencies, ntk_base, original_length, plain


class Rope(nn.Module):
    """Rotary embedding (Su et al. 2021, eq. 34), half-split: dimension i is paired with i + d_rotary/2.

    (x_i, x_{i+d/2}) → (x_i cos pθ_i − x_{i+d/2} sin pθ_i,  x_{i+d/2} cos pθ_i + x_i sin pθ_i),   θ_i = base^(−2i/d)

    Only the first d_rotary = fraction · d_head dimensions turn. Angles are fp32 whatever x is; half-precision x is
    turned in fp32 and rounded once. "dynamic" and "longrope" choose their frequencies by the longest text in the batch:
    the largest position + 1, or `length` when given (a cached decode that passes one fixed length stays consistent).
    x (B, H, T, D), positions (T,) or (B, T) → (B, H, T, D)
    """

    short: Tensor
    long: Tensor | None

    def __init__(
        self,
        d_head: int,
        base: float = 10000.0,
        scaling: RopeScaling | None = None,
        fraction: float = 1.0,
        max_len: int | None = None,
    ) -> None:
        super().__init__()
        check_positive(d_head=d_head, max_len=1 if max_len is None else max_len)
        if not base > 1.0:
            raise ValueError(f"base={base} must be greater than 1")
        self.d_head = d_head
        self.d_rotary = rotated_width(d_head, fraction)
        self.base = float(base)
        self.scaling = scaling
        self.max_len = max_len
        table = frequencies(scaling, self.d_rotary, self.base, max_len)
        self.attention_factor = table.attention_factor
        # Kept as numbers too, so that no cast to half precision and no stay on meta can change or lose them.
        self._short: list[float] = table.short.tolist()
        self._long: list[float] | None = None if table.long is None else table.long.tolist()
        self.register_buffer("short", torch.tensor(self._short, dtype=torch.float32), persistent=False)
        long = None if self._long is None else torch.tensor(self._long, dtype=torch.float32)
        self.register_buffer("long", long, persistent=False)

    def forward(self, x: Tensor, positions: Tensor, length: int | Tensor | None = None) -> Tensor:
        if x.shape[-1] != self.d_head:
            raise ValueError(f"x has heads of width {x.shape[-1]}, but d_head={self.d_head}")
        if positions.shape[-1] != x.shape[-2]:
            raise ValueError(f"positions has length {positions.shape[-1]}, but x has length {x.shape[-2]}")
        return rotate(x, *self.angles(positions, length))

    def angles(self, positions: Tensor, length: int | Tensor | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin of every angle, times attention_factor, fp32; positions (…, T) → two of (…, T, d_rotary/2).

        A model whose layers share a Rope computes them once and calls `rotate` in each layer.
        """
        theta = positions.to(torch.float32).unsqueeze(-1) * self._frequencies(positions, length)
        return theta.cos() * self.attention_factor, theta.sin() * self.attention_factor

    def _frequencies(self, positions: Tensor, length: int | Tensor | None) -> Tensor:
        short, long = self._tables(positions.device)
        scaling = self.scaling
        if scaling is None or (long is None and scaling.kind != "dynamic"):
            return short
        limit = original_length(scaling, self.max_len)
        if length is None:
            length = positions.max() + 1
        elif not isinstance(length, Tensor):
            length = torch.full((), length, dtype=torch.int64, device=positions.device)
        if long is None:
            assert scaling.factor is not None
            stretched = ntk_base(self.base, scaling.factor, length.clamp(min=limit), limit, self.d_rotary)
            long = plain(self.d_rotary, stretched, positions.device)
        return torch.where(length > limit, long, short)

    def _tables(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        # load_state_dict(assign=True) fills a model built on meta, all but such buffers: they are brought along here.
        if self.short.device == device:
            return self.short, self.long
        short, long = self._on(device)
        if not torch.compiler.is_compiling():
            self.short, self.long = short, long
        return short, long

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        short = torch.tensor(self._short, dtype=torch.float32, device=device)
        return short, None if self._long is None else torch.tensor(self._long, dtype=torch.float32, device=device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.short, self.long = self._on(self.short.device)  # .half() and .to_empty() must not touch the values
        return self

    def extra_repr(self) -> str:
        return f"{self.d_head}, base={self.base}, d_rotary={self.d_rotary}, scaling={self.scaling}"


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + d_rotary/2) of x (B, H, T, D) by the angles of (T, d_rotary/2) or (B, T, d_rotary/2)."""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)  # (…, 1, T, d_rotary/2): the same for every head
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = [(first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)]
    return torch.cat(turned if rest.shape[-1] == 0 else [*turned, rest], dim=-1)


def rotated_width(d_head: int, fraction: float) -> int:
    """How many of a head's dimensions turn; they come in pairs."""
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f"fraction={fraction} must lie in (0, 1]")
    width = int(d_head * fraction)
    if width < 2 or width % 2:
        raise ValueError(f"d_head={d_head} times fraction={fraction} gives {width} rotated dimensions; it must be even")
    return width


def interleaved_to_half(weight: Tensor, n_heads: int, fraction: float = 1.0) -> Tensor:
    """Reorder the output rows of a query or key projection from pairs (2i, 2i+1) (GPT-J) to pairs (i, i + d/2).

    weight (n_heads · D, …), a bias (n_heads · D,) too; q·k is unchanged when both projections are reordered.
    """
    return _reorder(weight, n_heads, fraction, lambda rows: rows.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2))


def half_to_interleaved(weight: Tensor, n_heads: int, fraction: float = 1.0) -> Tensor:
    """The inverse of `interleaved_to_half`."""
    return _reorder(weight, n_heads, fraction, lambda rows: rows.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2))


def _reorder(weight: Tensor, n_heads: int, fraction: float, change: Callable[[Tensor], Tensor]) -> Tensor:
    if n_heads < 1 or weight.shape[0] % n_heads:
        raise ValueError(f"weight has {weight.shape[0]} rows, which n_heads={n_heads} does not divide")
    heads = weight.unflatten(0, (n_heads, -1))  # (H, D, …)
    width = rotated_width(heads.shape[1], fraction)
    return torch.cat((change(heads[:, :width]), heads[:, width:]), dim=1).flatten(0, 1)
