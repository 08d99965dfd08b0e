"""Rotary frequencies, and the ways of stretching them to contexts longer than those trained on.

All of it is plain fp32 on the CPU, operation for operation what transformers does: at position 100,000 the last bit of
a frequency is the third decimal of an angle, so a more exact frequency would be a different model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

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
        if foreign := sorted(given - required - optional):
            raise ValueError(f"rope scaling kind {self.kind!r} does not take {', '.join(foreign)}")
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


def plain(dim: int, base: float | Tensor, device: torch.device | str = "cpu") -> Tensor:
    """θ_i = base^(−2i / dim), i = 0 … dim/2 − 1 (Su et al. 2021, eq. 15)."""
    powers: Tensor = base ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
    return 1.0 / powers


def ntk_base(base: float, factor: float, length: Tensor, max_len: int, dim: int) -> Tensor:
    """Dynamic NTK: the base that keeps the fastest pair and divides the slowest by (factor · length / max_len − …)."""
    return base * ((factor * length / max_len) - (factor - 1)) ** (dim / (dim - 2))


def frequencies(scaling: RopeScaling | None, dim: int, base: float, max_len: int | None) -> Frequencies:
    """The table of frequencies of a rotary embedding over `dim` dimensions."""
    if scaling is None:
        return Frequencies(plain(dim, base), None, 1.0)
    return _KINDS[scaling.kind](scaling, dim, base, max_len)


def _linear(scaling: RopeScaling, dim: int, base: float, max_len: int | None) -> Frequencies:
    assert scaling.factor is not None
    return Frequencies(plain(dim, base) / scaling.factor, None, 1.0)


def _dynamic(scaling: RopeScaling, dim: int, base: float, max_len: int | None) -> Frequencies:
    if max_len is None:
        raise ValueError("rope scaling kind 'dynamic' needs Rope's max_len, the length beyond which it stretches")
    if dim <= 2:
        raise ValueError(f"rope scaling kind 'dynamic' needs more than 2 rotated dimensions, not {dim}")
    return Frequencies(plain(dim, base), None, 1.0)  # the table up to max_len; Rope recomputes it beyond


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
    table = plain(dim, base)
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
