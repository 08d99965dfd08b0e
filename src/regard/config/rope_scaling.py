"""RopeScalingConfig: how rotary positions scale to texts longer than in training; computed by ``layers.rope``."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from .base import Config

# The required and optional fields of each kind. original_max_len defaults to Rope's max_len; the factor of yarn and
# longrope to max_len / original_max_len.
_REQUIRED: dict[str, set[str]] = {
    "linear": {"factor"},  # Chen et al. 2023
    "dynamic": {"factor"},  # NTK-aware
    "yarn": set(),  # Peng et al. 2023
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "longrope": {"short_factor", "long_factor"},  # Ding et al. 2024
}
_YARN_MAGNITUDE = {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
_OPTIONAL: dict[str, set[str]] = {
    "yarn": {"factor", "original_max_len"} | _YARN_MAGNITUDE,
    "llama3": {"original_max_len"},
    "longrope": {"factor", "original_max_len", "attention_factor"},
}


class RopeScalingConfig(Config):
    """How rotary positions scale to longer texts; each kind has its own fields."""

    kind: Literal["linear", "dynamic", "yarn", "llama3", "longrope"]
    """The scaling rule."""
    factor: float | None = None
    """How many times longer texts are than in training."""
    original_max_len: int | None = None
    """The length the model was trained at."""
    attention_factor: float | None = None
    """Factor on the rotated vectors (yarn, longrope); None: computed."""
    beta_fast: float | None = None
    """Yarn: dimensions with more rotations than this over the trained length are kept."""
    beta_slow: float | None = None
    """Yarn: dimensions with fewer rotations than this over the trained length are fully scaled."""
    mscale: float | None = None
    """Yarn: numerator of the attention factor's magnitude rule."""
    mscale_all_dim: float | None = None
    """Yarn: its denominator."""
    truncate: bool | None = None
    """Yarn: round the borders between scaled and kept dimensions."""
    low_freq_factor: float | None = None
    """Llama 3: wavelengths longer than original_max_len over this are scaled."""
    high_freq_factor: float | None = None
    """Llama 3: wavelengths shorter than original_max_len over this are kept."""
    short_factor: tuple[float, ...] | None = None
    """LongRoPE: one factor per dimension pair for short texts."""
    long_factor: tuple[float, ...] | None = None
    """LongRoPE: the same for long texts."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        kind = self.kind
        given = {name for name in type(self).model_fields if getattr(self, name) is not None} - {"kind"}
        if missing := sorted(_REQUIRED[kind] - given):
            raise ValueError(f"rope scaling kind {kind!r} needs {', '.join(missing)}")
        if unexpected := sorted(given - _REQUIRED[kind] - _OPTIONAL.get(kind, set())):
            raise ValueError(f"rope scaling kind {kind!r} does not take {', '.join(unexpected)}")
        if self.factor is not None and not self.factor >= 1.0:
            raise ValueError(f"rope scaling factor={self.factor} must be at least 1")
        for name in ("original_max_len", "attention_factor", "beta_fast", "beta_slow", "low_freq_factor"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"rope scaling {name}={value} must be greater than 0")
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and not high > low:
            raise ValueError(f"high_freq_factor={high} must be greater than low_freq_factor={low}")
        fast, slow = self.beta_fast or 32, self.beta_slow or 1
        if kind == "yarn" and fast < slow:
            raise ValueError(f"beta_fast={fast} must not be less than beta_slow={slow}")
        return self
