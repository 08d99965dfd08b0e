"""What metrics have in common: results that can be written down, and per-example statistics that add up to a score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...data import hashing
from ...foundation.checks import check_positive
from ...foundation.jsonio import to_jsonable

Floats = NDArray[np.float64]
References = Sequence[str] | Sequence[Sequence[str]]  # for each example its reference, or its references
NOT_WRITTEN = {"written": False}  # the metadata of a field that stays out of a result's document
_DRAWS_AT_ONCE = 1 << 20  # numbers drawn at a time: memory stays small however many examples there are


@dataclass(frozen=True)
class MetricResult:
    """A result that is written as JSON."""

    def to_dict(self) -> dict[str, Any]:
        """Names and values for JSON, without what is None; null where a number is not finite, which JSON cannot say."""
        written = ((field.name, getattr(self, field.name)) for field in fields(self) if field.metadata != NOT_WRITTEN)
        return {name: to_jsonable(value) for name, value in written if value is not None}


@dataclass(frozen=True, eq=False)
class Statistics:
    """What a corpus metric needs of each example: rows (N, K) that add up, and the score of such sums (…, K) → (…).

    A corpus score is not the mean of sentence scores (BLEU adds up its counts first), but it is always a function
    of a sum. So a resampled corpus costs one matrix product, and no text is looked at again.
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
        """The score of every example by itself (N,)."""
        return self.score(self.rows)


def mean_statistics(
    name: str,
    values: ArrayLike,
    weights: ArrayLike | None = None,
    *,
    higher_is_better: bool = True,
    signature: str = "",
) -> Statistics:
    """A mean of per-example values: Σ values / Σ weights. Weights are counts (tokens of a text); None: one each."""
    total = np.asarray(values, dtype=np.float64)
    count = np.ones_like(total) if weights is None else np.asarray(weights, dtype=np.float64)
    need_pairs(values=total, weights=count)
    if not np.isfinite(total).all():
        raise ValueError(f"values[{int(np.argmin(np.isfinite(total)))}] of {name} is not a finite number")
    if not (count > 0).all():
        odd = int(np.argmin(count > 0))
        raise ValueError(f"weights[{odd}] of {name} is {count[odd]:g}, but must be over 0")
    rows = np.stack([total, count], axis=1)
    return Statistics(name, rows, lambda sums: sums[..., 0] / sums[..., 1], higher_is_better, signature)


def need_pairs(**lists: Sequence[Any] | NDArray[Any]) -> int:
    """The number of examples, when every list has that many and there is at least one."""
    (first, one), *rest = ((name, len(items)) for name, items in lists.items())
    for name, n in rest:
        if n != one:
            raise ValueError(f"{first} has {one} examples, but {name} has {n}")
    if one == 0:
        raise ValueError(f"{first} is empty: there is nothing to score")
    return one


def reference_lists(hypotheses: Sequence[str], references: References) -> list[list[str]]:
    """The references of every example as a list, checked against the hypotheses."""
    for name, texts in (("hypotheses", hypotheses), ("references", references)):
        if isinstance(texts, str):
            raise TypeError(f"{name} is one text, but must be a list of them")
    need_pairs(hypotheses=hypotheses, references=references)
    lists = [[own] if isinstance(own, str) else list(own) for own in references]
    for i, own in enumerate(lists):
        if not own:
            raise ValueError(f"references[{i}] is empty: every example needs at least one reference")
    return lists


@dataclass(frozen=True)
class Comparison(MetricResult):
    """System b against system a over the same examples."""

    metric: str
    a: float
    b: float
    difference: float  # b - a
    low: float
    high: float  # 95 % of the resampled differences lie from low to high
    p_value: float  # how often chance alone would give a difference of this size or more, in either direction
    b_wins: float  # share of resamples where b is better than a, ties counting half: Koehn's own number
    n: int
    samples: int
    seed: int
    signature: str = ""


def paired_bootstrap(a: Statistics, b: Statistics, samples: int = 1000, seed: int = 0) -> Comparison:
    """Both systems on the same resamples.   p = (1 + #{|d* - d| ≥ |d|}) / (1 + samples), d = score(b) - score(a)

    The resampled d* scatter around d; moved to scatter around 0, they show what equal systems would do. The same
    seed draws the same examples on every machine and for every metric.
    """
    for name, ours, theirs in (("metric", a.name, b.name), ("signature", a.signature, b.signature)):
        if ours != theirs:
            raise ValueError(f"the systems were scored differently: {name} {ours!r} and {theirs!r}")
    n = need_pairs(a=a.rows, b=b.rows)
    check_positive(samples=samples)
    score_a, score_b = a.corpus(), b.corpus()
    at_once = max(1, _DRAWS_AT_ONCE // n)
    parts = []  # of the resampled differences: both systems on the same draws
    for start in range(0, samples, at_once):
        counts = _counts(n, start, min(start + at_once, samples), seed)
        parts.append(b.score(counts @ b.rows) - a.score(counts @ a.rows))
    differences, difference = np.concatenate(parts), score_b - score_a
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


def _counts(n: int, start: int, stop: int, seed: int) -> NDArray[np.float64]:
    """How often samples start … stop - 1 draw each example: (stop - start, n), every row adding up to n."""
    places = np.arange(start * n, stop * n)
    drawn = hashing.integers(hashing.stable_key("bootstrap", seed), places, n)
    cells = drawn + np.repeat(np.arange(stop - start) * n, n)
    return np.bincount(cells, minlength=(stop - start) * n).reshape(-1, n).astype(np.float64)
