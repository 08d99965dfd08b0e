"""Rotary frequencies, and the ways of stretching them to contexts longer than those trained on.

All of it is plain fp32 on the CPU, operation for operation what transformers does: at position 100,000 the last bit of
a frequency is the third decimal of an angle, so a more exact frequency would be a different model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from ..foundation.checks import check_positive
from ..foundation.suggestions import unknown_name

_REQUIRED: dict[str, frozenset[str]] = {
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "yarn": frozenset(),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
    "longrope": frozenset({"short_factor", "long_factor"}),
}
_OPTIONAL: dict[str, frozenset[str]] = {
    "linear": frozenset(),
    "dynamic": frozenset(),
    "yarn": frozenset(
        {
            "factor",
            "original_max_len",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
    "llama3": frozenset({"original_max_len"}),
    "longrope": frozenset({"factor", "original_max_len", "attention_factor"}),
}
SCALING_KINDS = tuple(_REQUIRED)


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched; each kind takes the fields named beside it and no others.

    linear    factor                                                    Chen et al. 2023, position interpolation
    dynamic   factor                                                    NTK-aware, grows with the text beyond max_len
    yarn      factor, original_max_len, attention_factor, beta_fast, beta_slow, mscale, mscale_all_dim, truncate
                                                                        Peng et al. 2023; all but max_len have defaults
    llama3    factor, low_freq_factor, high_freq_factor, original_max_len           Llama 3.1
    longrope  short_factor, long_factor, original_max_len, factor, attention_factor Ding et al. 2024

    original_max_len left out means Rope's max_len; factor left out (yarn, longrope) means max_len / original_max_len.
    """

    kind: str
    factor: float | None = None
    original_max_len: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in SCALING_KINDS:
            raise unknown_name("rope scaling kind", self.kind, SCALING_KINDS)
        required, optional = _REQUIRED[self.kind], _OPTIONAL[self.kind]
        given = {field.name for field in fields(self) if getattr(self, field.name) is not None} - {"kind"}
        if missing := sorted(required - given):
            raise ValueError(f"rope scaling kind {self.kind!r} needs {', '.join(missing)}")
        if unexpected := sorted(given - required - optional):
            raise ValueError(f"rope scaling kind {self.kind!r} does not take {', '.join(unexpected)}")
        for name in ("short_factor", "long_factor"):  # lists come from JSON; a frozen record should hash
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(float(value) for value in getattr(self, name)))
        self._check_values()

    def _check_values(self) -> None:
        if self.factor is not None and not self.factor >= 1.0:
            raise ValueError(f"rope scaling factor={self.factor} must be at least 1")
        for name in ("original_max_len", "attention_factor", "beta_fast", "beta_slow", "low_freq_factor"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"rope scaling {name}={value} must be greater than 0")
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and not high > low:
            raise ValueError(f"high_freq_factor={high} must be greater than low_freq_factor={low}")
        if self.kind == "yarn" and (self.beta_fast or 32) < (self.beta_slow or 1):
            raise ValueError(f"beta_fast={self.beta_fast or 32} must not be less than beta_slow={self.beta_slow or 1}")


class Frequencies(NamedTuple):
    """Radians per position of each pair of dimensions, and the number that cos and sin are multiplied by."""

    short: Tensor  # (D/2,)
    long: Tensor | None  # (D/2,), where texts beyond the original length have their own (longrope)
    attention_factor: float


def base_frequencies(dim: int, base: float | Tensor, device: torch.device | str = "cpu") -> Tensor:
    """θ_i = base^(−2i / dim), i = 0 … dim/2 − 1 (Su et al. 2021, eq. 15)."""
    powers: Tensor = base ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
    return 1.0 / powers


def ntk_base(base: float, factor: float, length: Tensor, max_len: int, dim: int) -> Tensor:
    """Dynamic NTK: the base that keeps the fastest pair and divides the slowest by (factor · length / max_len − …)."""
    return base * ((factor * length / max_len) - (factor - 1)) ** (dim / (dim - 2))


def frequencies(scaling: RopeScaling | None, dim: int, base: float, max_len: int | None) -> Frequencies:
    """The table of frequencies of a rotary embedding over `dim` dimensions."""
    if scaling is None:
        return Frequencies(base_frequencies(dim, base), None, 1.0)
    return _KINDS[scaling.kind](scaling, dim, base, max_len)


def _linear(scaling: RopeScaling, dim: int, base: float, max_len: int | None) -> Frequencies:
    assert scaling.factor is not None
    return Frequencies(base_frequencies(dim, base) / scaling.factor, None, 1.0)


def _dynamic(scaling: RopeScaling, dim: int, base: float, max_len: int | None) -> Frequencies:
    if max_len is None:
        raise ValueError("rope scaling kind 'dynamic' needs Rope's max_len, the length beyond which it stretches")
    if dim <= 2:
        raise ValueError(f"rope scaling kind 'dynamic' needs more than 2 rotated dimensions, not {dim}")
    return Frequencies(base_frequencies(dim, base), None, 1.0)  # the table up to max_len; Rope recomputes it beyond


def _yarn(scaling: RopeScaling, dim: int, base: float, max_len: int | None) -> Frequencies:
    """Pairs that turn often keep their frequency, pairs that turn less than once are interpolated, a ramp between."""
    original, factor = _original_and_factor(scaling, max_len)
    attention_factor = scaling.attention_factor
    if attention_factor is None and scaling.mscale and scaling.mscale_all_dim:
        attention_factor = _yarn_mscale(factor, scaling.mscale) / _yarn_mscale(factor, scaling.mscale_all_dim)
    elif attention_factor is None:
        attention_factor = _yarn_mscale(factor, 1.0)

    def dimension_turning(times: float) -> float:
        return (dim * math.log(original / (times * 2 * math.pi))) / (2 * math.log(base))

    low, high = dimension_turning(scaling.beta_fast or 32), dimension_turning(scaling.beta_slow or 1)
    if scaling.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    pair = torch.arange(dim // 2, dtype=torch.float32, device="cpu")
    keep = 1 - ((pair - low) / (high - low)).clamp(0, 1)
    powers: Tensor = base ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    return Frequencies(1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep, None, attention_factor)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(scaling: RopeScaling, dim: int, base: float, max_len: int | None) -> Frequencies:
    """Wavelengths above original/low are divided by factor, below original/high kept, smoothed between."""
    original, factor = _original_and_factor(scaling, max_len)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    assert low is not None and high is not None
    table = base_frequencies(dim, base)
    wavelength = 2 * math.pi / table
    slow, fast = wavelength > original / low, wavelength < original / high
    scaled = torch.where(slow, table / factor, table)
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * scaled / factor + smooth * scaled
    return Frequencies(torch.where(slow | fast, scaled, blended), None, 1.0)


def _longrope(scaling: RopeScaling, dim: int, base: float, max_len: int | None) -> Frequencies:
    """One searched divisor per pair: short_factor up to the original length, long_factor beyond it."""
    original, factor = _original_and_factor(scaling, max_len)
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


def original_length(scaling: RopeScaling, max_len: int | None) -> int:
    """The length the frequencies were trained for: original_max_len, else Rope's max_len."""
    original = scaling.original_max_len or max_len
    if original is None:
        raise ValueError(f"rope scaling kind {scaling.kind!r} needs original_max_len, or Rope's max_len")
    return original


def _original_and_factor(scaling: RopeScaling, max_len: int | None) -> tuple[int, float]:
    original = original_length(scaling, max_len)
    if scaling.factor is not None:
        return original, scaling.factor
    if max_len is None:
        raise ValueError(f"rope scaling kind {scaling.kind!r} needs factor, or Rope's max_len to derive it from")
    return original, max_len / original


_KINDS: dict[str, Callable[[RopeScaling, int, float, int | None], Frequencies]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}


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
            long = base_frequencies(self.d_rotary, stretched, positions.device)
        return torch.where(length > limit, long, short)

    def _tables(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        # load_state_dict(assign=True) fills a model built on meta, all but such buffers: they are brought along here.
        if self.short.device == device:
            return self.short, self.long
        short, long = self._tables_on(device)
        if not torch.compiler.is_compiling():
            self.short, self.long = short, long
        return short, long

    def _tables_on(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        short = torch.tensor(self._short, dtype=torch.float32, device=device)
        return short, None if self._long is None else torch.tensor(self._long, dtype=torch.float32, device=device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.short, self.long = self._tables_on(self.short.device)  # .half() and .to_empty() must not touch the values
        return self

    def extra_repr(self) -> str:
        return f"{self.d_head}, base={self.base}, d_rotary={self.d_rotary}, scaling={self.scaling}"


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + d_rotary/2) of x (B, H, T, D) by the angles of (T, d_rotary/2) or (B, T, d_rotary/2)."""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)  # (…, 1, T, d_rotary/2): the same for every head
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = [(first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)]
    return torch.cat(rotated if rest.shape[-1] == 0 else [*rotated, rest], dim=-1)


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
