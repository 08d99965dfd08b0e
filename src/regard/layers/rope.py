"""Rotary position embeddings (RoPE), and the scalings that extend them beyond the context length of training.

Frequencies are computed in fp32 on the CPU by the same operations as in transformers: at position 100,000 their last
bit changes the third decimal of an angle, so more exact frequencies would give different outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from ..config import RopeScalingConfig
from ..foundation.checks import check_positive


class Frequencies(NamedTuple):
    short: Tensor  # (dim/2,) radians per position, for each pair of dimensions
    long: Tensor | None = None  # (dim/2,) frequencies beyond the original length (longrope)
    attention_factor: float = 1.0  # multiplies cos and sin


def base_frequencies(dim: int, base: float | Tensor, device: torch.device | str = "cpu") -> Tensor:
    """θ_i = base^(−2i / dim), i = 0 … dim/2 − 1 (Su et al. 2021, eq. 15)."""
    powers: Tensor = base ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
    return 1.0 / powers


def frequencies(scaling: RopeScalingConfig | None, dim: int, base: float, max_len: int | None) -> Frequencies:
    """The frequencies of a rotary embedding over ``dim`` dimensions."""
    plain = base_frequencies(dim, base)
    if scaling is None:
        return Frequencies(plain)
    if scaling.kind == "linear":
        assert scaling.factor is not None
        return Frequencies(plain / scaling.factor)
    if scaling.kind == "dynamic":
        if max_len is None:
            raise ValueError("rope scaling kind 'dynamic' needs Rope's max_len, beyond which it scales")
        if dim <= 2:
            raise ValueError(f"rope scaling kind 'dynamic' needs more than 2 rotated dimensions, not {dim}")
        return Frequencies(plain)  # up to max_len; Rope recomputes them for longer inputs
    original, factor = original_length(scaling, max_len), scaling.factor
    if factor is None:
        if max_len is None:
            raise ValueError(f"rope scaling kind {scaling.kind!r} needs factor, or Rope's max_len to derive it from")
        factor = max_len / original
    return {"yarn": _yarn, "llama3": _llama3, "longrope": _longrope}[scaling.kind](scaling, dim, base, original, factor)


def _yarn(scaling: RopeScalingConfig, dim: int, base: float, original: int, factor: float) -> Frequencies:
    """High frequencies are kept, low ones divided by factor, with a linear ramp between them (Peng et al. 2023)."""
    attention_factor = scaling.attention_factor
    if attention_factor is None and scaling.mscale and scaling.mscale_all_dim:
        attention_factor = _yarn_mscale(factor, scaling.mscale) / _yarn_mscale(factor, scaling.mscale_all_dim)
    elif attention_factor is None:
        attention_factor = _yarn_mscale(factor, 1.0)

    def pair_with_rotations(n: float) -> float:
        """The (fractional) pair that makes n full rotations over the original length."""
        return (dim * math.log(original / (n * 2 * math.pi))) / (2 * math.log(base))

    low, high = pair_with_rotations(scaling.beta_fast or 32), pair_with_rotations(scaling.beta_slow or 1)
    if scaling.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # avoid a division by zero
    pair = torch.arange(dim // 2, dtype=torch.float32, device="cpu")
    keep = 1 - ((pair - low) / (high - low)).clamp(0, 1)
    powers: Tensor = base ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    return Frequencies(1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep, None, attention_factor)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(scaling: RopeScalingConfig, dim: int, base: float, original: int, factor: float) -> Frequencies:
    """Wavelengths below original/high are kept, those above original/low multiplied by factor, blended in between."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    assert low is not None and high is not None
    table = base_frequencies(dim, base)
    wavelength = 2 * math.pi / table
    slow, fast = wavelength > original / low, wavelength < original / high
    scaled = torch.where(slow, table / factor, table)
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * scaled / factor + smooth * scaled
    return Frequencies(torch.where(slow | fast, scaled, blended))


def _longrope(scaling: RopeScalingConfig, dim: int, base: float, original: int, factor: float) -> Frequencies:
    """One divisor per pair of dimensions: short_factor up to the original length, long_factor beyond it."""
    attention_factor = scaling.attention_factor
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    exponent = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    tables = []
    for name in ("short_factor", "long_factor"):
        divisors = getattr(scaling, name)
        if len(divisors) != dim // 2:
            raise ValueError(f"{name} has {len(divisors)} numbers, but {dim} rotated dimensions need {dim // 2}")
        tables.append(1.0 / (torch.tensor(divisors, dtype=torch.float32, device="cpu") * base**exponent))
    return Frequencies(tables[0], tables[1], attention_factor)


def original_length(scaling: RopeScalingConfig, max_len: int | None) -> int:
    """The context length of training: original_max_len, or Rope's max_len if it is not set."""
    original = scaling.original_max_len or max_len
    if original is None:
        raise ValueError(f"rope scaling kind {scaling.kind!r} needs original_max_len, or Rope's max_len")
    return original


class Rope(nn.Module):
    """Rotary embedding (Su et al. 2021, eq. 34), half-split: dimension i is paired with i + d_rotary/2.

    (x_i, x_{i+d/2}) → (x_i cos pθ_i − x_{i+d/2} sin pθ_i,  x_{i+d/2} cos pθ_i + x_i sin pθ_i),   θ_i = base^(−2i/d)

    Only the first d_rotary = fraction · d_head dimensions are rotated. Angles and rotation are computed in fp32.
    Scalings "dynamic" and "longrope" choose the frequencies by ``length``, by default the largest position + 1.
    x (B, H, T, D), positions (T,) or (B, T) → (B, H, T, D)
    """

    short: Tensor
    long: Tensor | None

    def __init__(
        self,
        d_head: int,
        base: float = 10000.0,
        scaling: RopeScalingConfig | None = None,
        fraction: float = 1.0,
        max_len: int | None = None,
    ) -> None:
        super().__init__()
        check_positive(d_head=d_head, max_len=1 if max_len is None else max_len)
        if not base > 1.0:
            raise ValueError(f"base={base} must be greater than 1")
        self.d_head, self.d_rotary = d_head, rotated_width(d_head, fraction)
        self.base, self.scaling, self.max_len = float(base), scaling, max_len
        table = frequencies(scaling, self.d_rotary, self.base, max_len)
        self.attention_factor = table.attention_factor
        # Python copies, because casts to half precision and the meta device would change or lose the buffers.
        self._short: list[float] = table.short.tolist()
        self._long: list[float] | None = None if table.long is None else table.long.tolist()
        for name, values in zip(("short", "long"), self._tables_on(None), strict=True):
            self.register_buffer(name, values, persistent=False)

    def forward(self, x: Tensor, positions: Tensor, length: int | Tensor | None = None) -> Tensor:
        if x.shape[-1] != self.d_head:
            raise ValueError(f"x has heads of width {x.shape[-1]}, but d_head={self.d_head}")
        if positions.shape[-1] != x.shape[-2]:
            raise ValueError(f"positions have length {positions.shape[-1]}, but x has length {x.shape[-2]}")
        return rotate(x, *self.angles(positions, length))

    def angles(self, positions: Tensor, length: int | Tensor | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles, times attention_factor, in fp32; positions (…, T) → (…, T, d_rotary/2) each."""
        theta = positions.to(torch.float32).unsqueeze(-1) * self._frequencies(positions, length)
        return theta.cos() * self.attention_factor, theta.sin() * self.attention_factor

    def _frequencies(self, positions: Tensor, length: int | Tensor | None) -> Tensor:
        short, long, scaling = self.short, self.long, self.scaling
        if short.device != positions.device:
            # load_state_dict(assign=True) leaves the non-persistent buffers of a meta model on meta: rebuild them.
            short, long = self._tables_on(positions.device)
            if not torch.compiler.is_compiling():
                self.short, self.long = short, long
        if scaling is None or (long is None and scaling.kind != "dynamic"):
            return short
        limit = original_length(scaling, self.max_len)
        if length is None:
            length = positions.max() + 1
        elif not isinstance(length, Tensor):
            length = torch.full((), length, dtype=torch.int64, device=positions.device)
        if long is None:  # dynamic NTK: base · (factor · length / max_len − (factor − 1))^(dim / (dim − 2))
            assert scaling.factor is not None
            dim, factor = self.d_rotary, scaling.factor
            stretched = self.base * ((factor * length.clamp(min=limit) / limit) - (factor - 1)) ** (dim / (dim - 2))
            long = base_frequencies(dim, stretched, positions.device)
        return torch.where(length > limit, long, short)

    def _tables_on(self, device: torch.device | None) -> tuple[Tensor, Tensor | None]:
        short = torch.tensor(self._short, dtype=torch.float32, device=device)
        return short, None if self._long is None else torch.tensor(self._long, dtype=torch.float32, device=device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.short, self.long = self._tables_on(self.short.device)  # undo the effect of .half() and .to_empty()
        return self

    def extra_repr(self) -> str:
        return f"{self.d_head}, base={self.base}, d_rotary={self.d_rotary}, scaling={self.scaling}"


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + d_rotary/2) of x (B, H, T, D); cos and sin are (T, d_rotary/2) or (B, T, d_rotary/2)."""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)  # (…, 1, T, d_rotary/2): the same for every head
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = [(first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)]
    return torch.cat(rotated if rest.shape[-1] == 0 else [*rotated, rest], dim=-1)


def rotated_width(d_head: int, fraction: float) -> int:
    """The number of dimensions of a head that are rotated, which must be even."""
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f"fraction={fraction} must lie in (0, 1]")
    width = int(d_head * fraction)
    if width < 2 or width % 2:
        product = f"d_head={d_head} times fraction={fraction}"
        raise ValueError(f"{product} gives {width} rotated dimensions; the number must be even and positive")
    return width
