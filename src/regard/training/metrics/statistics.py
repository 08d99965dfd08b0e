"""The common part of metrics: per-example statistics whose sum gives a corpus score, and their comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...data import hashing
from ...foundation.jsonio import to_jsonable

Floats = NDArray[np.float64]
References = Sequence[str] | Sequence[Sequence[str]]  # one or several references for each example
_MAX_DRAWS = 1 << 20  # examples drawn at once, to bound memory


@dataclass(frozen=True, eq=False)
class Statistics:
    """A corpus metric as a function of sums: rows (N, K), one per example, and the score of their sum, (…, K) → (…).

    A corpus score is not the mean of sentence scores (BLEU sums its counts first), but it is a function of a sum. So
    resampling a corpus takes one matrix product and does not look at the texts again.
    """

    name: str
    rows: Floats
    score: Callable[[Floats], Floats]
    higher_is_better: bool = True
    signature: str = ""

    def corpus(self) -> float:
        """The score of all examples together."""
        return float(self.score(self.rows.sum(0, keepdims=True))[0])

    def each(self) -> Floats:
        """The score of each example on its own (N,)."""
        return self.score(self.rows)


def mean_statistics(
    name: str,
    values: ArrayLike,
    weights: ArrayLike | None = None,
    *,
    higher_is_better: bool = True,
    signature: str = "",
) -> Statistics:
    """A mean of per-example values: Σ values / Σ weights. Weights are positive counts; None: one each."""
    total = np.asarray(values, dtype=np.float64)
    count = np.ones_like(total) if weights is None else np.asarray(weights, dtype=np.float64)
    rows = np.stack([total, count], axis=1)
    return Statistics(name, rows, lambda sums: sums[..., 0] / sums[..., 1], higher_is_better, signature)


def reference_lists(references: References) -> list[list[str]]:
    """The references of every example as a list."""
    return [[own] if isinstance(own, str) else list(own) for own in references]


@dataclass(frozen=True)
class Comparison:
    """System b compared with system a on the same examples."""

    metric: str
    a: float
    b: float
    difference: float  # b - a
    low: float  # 95 % of the resampled differences lie between low and high
    high: float
    p_value: float  # two-sided: the probability of a difference at least this large between equal systems
    b_wins: float  # share of resamples in which b is better than a, ties counted half (Koehn 2004)
    n: int
    samples: int
    seed: int
    signature: str = ""

    def to_dict(self) -> dict[str, Any]:
        return to_jsonable(self)


def paired_bootstrap(a: Statistics, b: Statistics, samples: int = 1000, seed: int = 0) -> Comparison:
    """Compare two systems, by one metric on the same examples, on the same resamples (Koehn 2004).

    With d = score(b) - score(a), p = (1 + #{|d* - d| ≥ |d|}) / (1 + samples): the resampled d* scatter around d;
    shifted to scatter around 0, they show what equal systems would do. A seed draws the same examples on every machine
    and for every metric.
    """
    n = len(a.rows)
    score_a, score_b = a.corpus(), b.corpus()
    chunk = max(1, _MAX_DRAWS // n)
    parts = []  # resampled differences, both systems on the same draws
    for start in range(0, samples, chunk):
        counts = _counts(n, start, min(start + chunk, samples), seed)
        parts.append(b.score(counts @ b.rows) - a.score(counts @ a.rows))
    differences, difference = np.concatenate(parts), score_b - score_a
    # Differences of exactly the observed size must count despite rounding errors.
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


def _counts(n: int, start: int, stop: int, seed: int) -> NDArray[np.float64]:
    """How often each of the samples start … stop - 1 draws each example (stop - start, n); rows sum to n."""
    draws = np.arange(start * n, stop * n)
    examples = hashing.integers(hashing.stable_key("bootstrap", seed), draws, n)
    cells = examples + np.repeat(np.arange(stop - start) * n, n)
    return np.bincount(cells, minlength=(stop - start) * n).reshape(-1, n).astype(np.float64)
