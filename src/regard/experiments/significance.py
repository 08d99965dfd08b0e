"""Whether cells differ from the base by more than seeds do: Dunnett's test, or Welch's if variances differ widely."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, stdev, variance
from typing import Any

import numpy as np

# A cell whose standard deviation is more than this many times the median is tested separately. Among identical cells,
# this happens by chance in about 1 of 100 sweeps of two cells with three seeds, and in 8 of 100 of twenty with two.
APART = 5.0
_DRAWS = 200_000


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and its standard error s/√n, which is None with a single seed."""

    values: tuple[float, ...]
    mean: float
    se: float | None


def estimate(values: Sequence[float]) -> Estimate:
    se = None if len(values) < 2 else stdev(values) / math.sqrt(len(values))
    return Estimate(tuple(values), fmean(values), se)


def welch(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Two-sided p of equal means when variances may differ (Welch 1947); None if a side has a single value.

    t = (ā - b̄) / √(s²ₐ/nₐ + s²_b/n_b), with Welch–Satterthwaite degrees of freedom.
    """
    if len(a) < 2 or len(b) < 2:
        return None
    wa, wb = variance(a) / len(a), variance(b) / len(b)
    gap = fmean(a) - fmean(b)
    if wa + wb == 0:
        return 1.0 if gap == 0 else 0.0
    df = (wa + wb) ** 2 / (wa**2 / (len(a) - 1) + wb**2 / (len(b) - 1))
    return t_two_sided(gap / math.sqrt(wa + wb), df)


def t_two_sided(t: float, df: float) -> float:
    """P(|T| ≥ |t|) of Student's distribution.

    1 - 2 Γ((df + 1) / 2) / (√π Γ(df / 2)) ∫ cos^(df - 1) φ dφ, from 0 to arctan(|t| / √df), by Gauss and Legendre.
    """
    nodes, weights = np.polynomial.legendre.leggauss(200)
    half = math.atan(abs(t) / math.sqrt(df)) / 2
    integral = half * float(weights @ np.cos(half * (1 + nodes)) ** (df - 1))
    factor = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(math.pi)
    return max(0.0, 1 - 2 * factor * integral)


# ------------------------------------------------------------------------------------- many cells against one base


@dataclass(frozen=True)
class CellComparison:
    """p-values corrected for all cells together, and the cells that were tested separately.

    ``apart`` are the cells whose standard deviation is over five times the median, or all cells if the base's is. They
    would distort the pooled variance, so they form a family of their own, tested by Welch's t-test with Bonferroni's
    correction. Each family then gets half of the error rate: the p-values of both are doubled.
    """

    p: dict[str, float]
    apart: tuple[str, ...] = ()


def compare(base: Sequence[float], cells: Mapping[str, Sequence[float]]) -> CellComparison:
    """Compare every cell with the base by Dunnett's test; empty unless the base and a cell have two values each.

    Pooling assumes that all cells have the same variance. If they do not, the p of a cell with a larger variance is too
    small: repeat barely significant results with more seeds.
    """
    cells = {name: values for name, values in cells.items() if len(values) > 1}
    if len(base) < 2 or not cells:
        return CellComparison({})
    spreads = sorted(stdev(values) for values in (base, *cells.values()))
    limit = APART * spreads[len(spreads) // 2]
    apart = [name for name, values in cells.items() if stdev(values) > limit]
    if stdev(base) > limit:
        apart = list(cells)
    pooled = {name: values for name, values in cells.items() if name not in apart}
    n_families = 2 if apart and pooled else 1
    p_values = {name: min(1.0, n_families * p) for name, p in dunnett(base, pooled).items()}
    for name in apart:
        p = welch(cells[name], base)
        assert p is not None, "both have two values"
        p_values[name] = min(1.0, n_families * len(apart) * p)
    return CellComparison(p_values, tuple(apart))


def dunnett(base: Sequence[float], cells: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Many treatments against one control (Dunnett 1955): two-sided p-values, corrected for the number of cells.

    t_i = (x̄_i - x̄_0) / (s √(1/n_i + 1/n_0)) with s² pooled over all cells; p_i = P(max_j |T_j| ≥ |t_i|), where the T_j
    share the base and s, estimated from 200,000 draws with a fixed seed. Cells whose seeds give nearly the same number
    (BLEU 0), with less than a fifth of the median standard deviation, are left out of s.
    """
    if not cells:
        return {}
    groups = [base, *cells.values()]
    variances = [variance(values) for values in groups]
    least = sorted(variances)[len(groups) // 2] / APART**2
    pooled = [values for values, variance in zip(groups, variances, strict=True) if variance >= least and variance > 0]
    pooled = pooled or groups
    df = sum(len(values) - 1 for values in pooled)
    s = math.sqrt(math.fsum(variance(values) * (len(values) - 1) for values in pooled) / df)
    weights = np.array([1 / len(values) for values in groups])
    gaps = np.array([fmean(values) - fmean(base) for values in cells.values()])
    if s == 0:
        return {name: float(gap == 0) for name, gap in zip(cells, gaps, strict=True)}
    t = np.abs(gaps) / (s * np.sqrt(weights[1:] + weights[0]))
    largest = _largest_t(tuple(len(values) for values in groups), df)
    # The +1 keeps p above 0, which a finite number of draws cannot establish.
    return {name: float((np.count_nonzero(largest >= x) + 1) / (_DRAWS + 1)) for name, x in zip(cells, t, strict=True)}


@lru_cache(maxsize=16)
def _largest_t(sizes: tuple[int, ...], df: int) -> np.ndarray[Any, Any]:
    """200,000 draws of max_j |T_j| when no cell differs from the base; sizes[0] is the base's number of values."""
    weights = 1 / np.array(sizes)
    draw = np.random.default_rng(0)
    means = draw.standard_normal((_DRAWS, len(sizes))) * np.sqrt(weights)
    spread = np.sqrt(draw.chisquare(df, _DRAWS) / df)
    largest: np.ndarray[Any, Any] = np.abs(means[:, 1:] - means[:, :1]) / np.sqrt(weights[1:] + weights[0])
    return largest.max(axis=1) / spread
