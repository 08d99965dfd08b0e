"""Refusals of wrong numbers, one sentence each, naming the argument."""

from __future__ import annotations

import math


def check_positive(**sizes: int | float | None) -> None:
    """Refuse counts and sizes below 1, by name; None means "not given" and passes."""
    for name, size in sizes.items():
        if size is not None and not size >= 1:
            raise ValueError(f"{name}={size} must be at least 1")


def check_above_zero(**values: float | None) -> None:
    """Refuse numbers that are not finite and greater than 0, by name; None passes."""
    for name, value in values.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name}={value} must be a finite number above 0")


def check_probability(**values: float) -> None:
    """Refuse what does not lie in [0, 1), by name: rates of dropout and the like."""
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name}={value} must lie in [0, 1)")
