"""Classification: accuracy, precision, recall and F1 of each class, macro F1, and the confusion matrix.

precision = tp / predicted, recall = tp / true, F1 = 2 tp / (predicted + true); macro F1 is the mean F1 over classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .statistics import Floats, MetricResult, Statistics, mean_statistics, need_pairs


@dataclass(frozen=True)
class ClassScores(MetricResult):
    """The scores of one class; a ratio without a denominator (the precision of a class never predicted) is 0."""

    label: str
    precision: float
    recall: float
    f1: float
    n_true: int
    n_predicted: int


@dataclass(frozen=True)
class ClassificationScores(MetricResult):
    """The scores of a classifier, from 0 to 1."""

    n: int
    accuracy: float
    macro_f1: float  # mean over the classes that occur in truth or prediction
    classes: tuple[ClassScores, ...]
    confusion: tuple[tuple[int, ...], ...]  # confusion[i][j]: how often j was predicted for i


def classification(
    predicted: ArrayLike, truth: ArrayLike, labels: int | Sequence[str] | None = None
) -> ClassificationScores:
    """``predicted`` and ``truth`` are class indices (N,); ``labels`` their names or number (default: all)."""
    guess, true, names = _classes(predicted, truth, labels)
    size = len(names)
    confusion = np.bincount(true * size + guess, minlength=size * size).reshape(size, size)
    hits, n_predicted, n_true = np.diag(confusion), confusion.sum(0), confusion.sum(1)
    shares = (share(hits, n_predicted), share(hits, n_true), share(2 * hits, n_predicted + n_true))
    columns = zip(names, *(x.tolist() for x in (*shares, n_true, n_predicted)), strict=True)
    accuracy, macro_f1 = float(hits.sum() / len(true)), float(macro_f1_of_counts(hits, n_predicted, n_true))
    classes = tuple(ClassScores(*row) for row in columns)
    return ClassificationScores(len(true), accuracy, macro_f1, classes, tuple(map(tuple, confusion.tolist())))


def accuracy_statistics(predicted: ArrayLike, truth: ArrayLike) -> Statistics:
    """1 for each example whose class is correct."""
    guess, true, _ = _classes(predicted, truth, None)
    return mean_statistics("accuracy", guess == true)


def macro_f1_statistics(predicted: ArrayLike, truth: ArrayLike, labels: int | Sequence[str]) -> Statistics:
    """Hits, predictions and true members of each class (N, 3 · classes); the score is the macro F1 of their sums."""
    guess, true, names = _classes(predicted, truth, labels)
    classes = np.arange(len(names))
    is_guess, is_true = guess[:, None] == classes, true[:, None] == classes
    rows = np.concatenate([is_guess & is_true, is_guess, is_true], axis=1).astype(np.float64)
    return Statistics("macro F1", rows, lambda sums: macro_f1_of_counts(*np.split(sums, 3, axis=-1)))


def macro_f1_of_counts(hits: NDArray[np.number], n_predicted: NDArray[np.number], n_true: NDArray[np.number]) -> Floats:
    """The mean F1 over the classes that occur; 0 if none does."""
    either = n_predicted + n_true
    return share(share(2 * hits, either).sum(-1), np.asarray((either > 0).sum(-1)))


def share(part: NDArray[np.number], whole: NDArray[np.number]) -> Floats:
    return np.divide(part, whole, out=np.zeros(np.shape(whole), dtype=np.float64), where=whole > 0)


def _classes(
    predicted: ArrayLike, truth: ArrayLike, labels: int | Sequence[str] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64], list[str]]:
    """Both as checked class indices, and the name of every class."""
    guess, true = np.asarray(predicted), np.asarray(truth)
    for name, ids in (("predicted", guess), ("truth", true)):
        if ids.ndim != 1:
            raise ValueError(f"{name} has {ids.ndim} dimensions, but must be a list of class numbers")
    need_pairs(predicted=guess, truth=true)
    if labels is None:
        labels = int(max(guess.max(), true.max())) + 1
    names = [str(c) for c in range(labels)] if isinstance(labels, int) else [str(label) for label in labels]
    for name, ids in (("predicted", guess), ("truth", true)):
        if ids.dtype.kind not in "iu":
            raise TypeError(f"{name} must hold class numbers, but holds {ids.dtype}")
        if ids.min() < 0 or ids.max() >= len(names):
            odd = ids.min() if ids.min() < 0 else ids.max()
            raise ValueError(f"{name} holds class {odd}, but classes are 0 to {len(names) - 1}")
    return guess.astype(np.int64), true.astype(np.int64), names
