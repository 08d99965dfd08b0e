"""What metrics have in common: results that can be written down, and per-example statistics that add up to a score."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
References = Sequence[str] | Sequence[Sequence[str]]
"""For each example its reference, or its references."""
NOT_WRITTEN = {"written": False}
"""The metadata of a field that stays out of a result's document."""


@dataclass(frozen=True)
class Result:
    """A result that prints as one line and is written as JSON."""

    def text(self) -> str:
        """One short line for a person."""
        raise NotImplementedError

    def document(self) -> dict[str, Any]:
        """Names and values for JSON, without what is None; null where a number is not finite, which JSON cannot say."""
        written = ((field.name, getattr(self, field.name)) for field in fields(self) if field.metadata != NOT_WRITTEN)
        return {name: _plain(value) for name, value in written if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, Result):
        return value.document()
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value


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


@dataclass(frozen=True)
class Case(Result):
    """One example and its score."""

    index: int
    score: float

    def text(self) -> str:
        return f"#{self.index}: {self.score:.3f}"


def worst_cases(statistics: Statistics, k: int) -> tuple[Case, ...]:
    """The k examples with the worst scores, worst first; among equals, the earlier one."""
    if k < 0:
        raise ValueError(f"k={k} is less than 0")
    scores = statistics.each()
    order = np.argsort(scores if statistics.higher_is_better else -scores, kind="stable")
    return tuple(Case(int(i), float(scores[i])) for i in order[:k])


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


def percent(share: float) -> str:
    """0.8754 → 87.54 %."""
    return f"{100 * share:.2f} %"
