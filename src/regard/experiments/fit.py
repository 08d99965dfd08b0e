"""How something grows with length: the exponent of a power law."""

from __future__ import annotations

import math
from collections.abc import Sequence


def exponent(lengths: Sequence[float], values: Sequence[float], longest: int = 3) -> float | None:
    """p of value ≈ c · lengthᵖ: the slope of log value over log length, by least squares, at the ``longest`` lengths.

    At short lengths the constant costs show, not the law. None where fewer than two different lengths are left.
    """
    points = sorted((t, v) for t, v in zip(lengths, values, strict=True) if t > 0 and v > 0)[-longest:]
    x, y = [math.log(t) for t, _ in points], [math.log(v) for _, v in points]
    if len(set(x)) < 2:
        return None
    x_mean, y_mean = sum(x) / len(x), sum(y) / len(y)
    along = sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True))
    return along / sum((a - x_mean) ** 2 for a in x)


def crossing(lengths: Sequence[float], first: Sequence[float], second: Sequence[float]) -> float | None:
    """The length from which ``first`` stays below ``second``, between two measured lengths by the straight line
    through their logarithms; None where it does not end below."""
    gaps = [math.log(a / b) for a, b in zip(first, second, strict=True)]
    if not gaps or gaps[-1] >= 0:
        return None
    above = [n for n, gap in enumerate(gaps) if gap >= 0]
    if not above:
        return lengths[0]
    n = above[-1]
    share = gaps[n] / (gaps[n] - gaps[n + 1])
    return math.exp(math.log(lengths[n]) + share * math.log(lengths[n + 1] / lengths[n]))
