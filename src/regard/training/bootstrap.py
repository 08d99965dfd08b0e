"""Is one system better than the other, or was it lucky with these examples? Paired bootstrap resampling (Koehn 2004).

Draw N examples of N with replacement, score both systems on the same draw, and see how the difference varies.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..data import hashing
from .metrics.statistics import Floats, Result, Statistics, need_pairs

_DRAWS_AT_ONCE = 1 << 20  # numbers drawn at a time: memory stays small however many examples there are


@dataclass(frozen=True)
class Comparison(Result):
    """System b against system a over the same examples."""

    metric: str
    a: float
    b: float
    difference: float
    """b - a."""
    low: float
    high: float
    """95 % of the resampled differences lie from low to high."""
    p_value: float
    """How often chance alone would give a difference of this size or more, in either direction."""
    b_wins: float
    """Share of resamples where b is better than a, ties counting half: Koehn's own number."""
    n: int
    samples: int
    seed: int
    signature: str = ""

    @property
    def significant(self) -> bool:
        """p < 0.05."""
        return self.p_value < 0.05

    def text(self) -> str:
        return (
            f"{self.metric} {self.a:.4g} → {self.b:.4g}: {self.difference:+.4g} "
            f"[{self.low:+.4g}, {self.high:+.4g}], p = {self.p_value:.3g} ({self.samples} resamples of {self.n})"
        )


def paired_bootstrap(a: Statistics, b: Statistics, samples: int = 1000, seed: int = 0) -> Comparison:
    """Both systems on the same resamples.   p = (1 + #{|d* - d| ≥ |d|}) / (1 + samples), d = score(b) - score(a)

    The resampled d* scatter around d; moved to scatter around 0, they show what equal systems would do. The same
    seed draws the same examples on every machine and for every metric.
    """
    for name, ours, theirs in (("metric", a.name, b.name), ("signature", a.signature, b.signature)):
        if ours != theirs:
            raise ValueError(f"the systems were scored differently: {name} {ours!r} and {theirs!r}")
    n = need_pairs(a=a.rows, b=b.rows)
    if samples < 1:
        raise ValueError(f"samples={samples} is less than 1")
    score_a, score_b = a.corpus(), b.corpus()
    resampled_a, resampled_b = _resampled(a, b, n, samples, seed)
    differences, difference = resampled_b - resampled_a, score_b - score_a
    # A rounding error must not make a difference of exactly the observed size look smaller than it.
    slack = 1e-9 * max(abs(score_a), abs(score_b))
    as_far = int((np.abs(differences - difference) >= abs(difference) - slack).sum())
    better = differences if a.higher_is_better else -differences
    low, high = np.quantile(differences, [0.025, 0.975])
    return Comparison(
        metric=a.name,
        a=score_a,
        b=score_b,
        difference=difference,
        low=float(low),
        high=float(high),
        p_value=(1 + as_far) / (1 + samples),
        b_wins=float((better > 0).mean() + (better == 0).mean() / 2),
        n=n,
        samples=samples,
        seed=seed,
        signature=a.signature,
    )


def _resampled(a: Statistics, b: Statistics, n: int, samples: int, seed: int) -> tuple[Floats, Floats]:
    """The scores (samples,) of both systems on the same draws."""
    at_once = max(1, _DRAWS_AT_ONCE // n)
    scores_a, scores_b = [], []
    for start in range(0, samples, at_once):
        counts = _counts(n, start, min(start + at_once, samples), seed)
        scores_a.append(a.score(counts @ a.rows))
        scores_b.append(b.score(counts @ b.rows))
    return np.concatenate(scores_a), np.concatenate(scores_b)


def _counts(n: int, start: int, stop: int, seed: int) -> NDArray[np.float64]:
    """How often samples start … stop - 1 draw each example: (stop - start, n), every row adding up to n."""
    places = np.arange(start * n, stop * n)
    drawn = hashing.integers(hashing.stable_key("bootstrap", seed), places, n)
    cells = drawn + np.repeat(np.arange(stop - start) * n, n)
    return np.bincount(cells, minlength=(stop - start) * n).reshape(-1, n).astype(np.float64)
