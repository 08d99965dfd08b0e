"""Metrics of classifiers: one class or several labels for each example, a number (regression), or a tag for each word.

precision = tp / predicted, recall = tp / true, F1 = 2 tp / (predicted + true); macro F1 is the mean F1 over classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...text.words import entity_spans, has_entities
from .statistics import Floats, Statistics, mean_statistics

_ROUNDING = 1e-12  # a smaller variance, relative to the mean square, is a rounding error: all values are equal
MultiHot = NDArray[np.bool_]  # (N, labels): the labels of each example


@dataclass(frozen=True)
class ClassScores:
    """The scores of one class; a ratio without a denominator (the precision of a class never predicted) is 0."""

    label: str
    precision: float
    recall: float
    f1: float
    n_true: int
    n_predicted: int


@dataclass(frozen=True)
class ClassificationScores:
    """The scores of a classifier, from 0 to 1."""

    n: int
    accuracy: float
    macro_f1: float  # mean over the classes that occur in truth or prediction
    classes: tuple[ClassScores, ...]
    confusion: tuple[tuple[int, ...], ...]  # confusion[i][j]: how often j was predicted for i


def classification(predicted: ArrayLike, truth: ArrayLike, labels: Sequence[str]) -> ClassificationScores:
    """``predicted`` and ``truth`` are class indices (N,); ``labels`` are the names of the classes."""
    guess, true, size = np.asarray(predicted), np.asarray(truth), len(labels)
    confusion = np.bincount(true * size + guess, minlength=size * size).reshape(size, size)
    hits, n_predicted, n_true = np.diag(confusion), confusion.sum(0), confusion.sum(1)
    accuracy, macro_f1 = float(hits.sum() / len(true)), float(macro_f1_of_counts(hits, n_predicted, n_true))
    classes = _class_scores(labels, hits, n_predicted, n_true)
    return ClassificationScores(len(true), accuracy, macro_f1, classes, tuple(map(tuple, confusion.tolist())))


def _class_scores(names: Sequence[str], *counts: NDArray[np.number]) -> tuple[ClassScores, ...]:
    """The scores of each class from its numbers of hits, predictions and true members."""
    hits, n_predicted, n_true = (x.astype(int) for x in counts)
    shares = (share(hits, n_predicted), share(hits, n_true), share(2 * hits, n_predicted + n_true))
    columns = zip(names, *(x.tolist() for x in (*shares, n_true, n_predicted)), strict=True)
    return tuple(ClassScores(*row) for row in columns)


def accuracy_statistics(predicted: ArrayLike, truth: ArrayLike) -> Statistics:
    """1 for each example whose class is correct."""
    return mean_statistics("accuracy", np.asarray(predicted) == np.asarray(truth))


def macro_f1_statistics(predicted: ArrayLike, truth: ArrayLike, n_classes: int) -> Statistics:
    """Hits, predictions and true members of each class (N, 3 · classes); the score is the macro F1 of their sums."""
    is_guess, is_true = (np.asarray(x)[:, None] == np.arange(n_classes) for x in (predicted, truth))
    rows = np.concatenate([is_guess & is_true, is_guess, is_true], axis=1).astype(np.float64)
    return Statistics("macro F1", rows, _macro_f1)


def _micro_f1(sums: Floats) -> Floats:
    """F1 from sums (…, 3) of hits, predictions and true members."""
    return share(2 * sums[..., 0], sums[..., 1] + sums[..., 2])


def _macro_f1(sums: Floats) -> Floats:
    """Macro F1 from sums (…, 3 · classes) of hits, predictions and true members of each class."""
    return macro_f1_of_counts(*np.split(sums, 3, axis=-1))


def macro_f1_of_counts(hits: NDArray[np.number], n_predicted: NDArray[np.number], n_true: NDArray[np.number]) -> Floats:
    """The mean F1 over the classes that occur; 0 if none does."""
    either = n_predicted + n_true
    return share(share(2 * hits, either).sum(-1), np.asarray((either > 0).sum(-1)))


def share(part: NDArray[np.number], whole: NDArray[np.number]) -> Floats:
    return np.divide(part, whole, out=np.zeros(np.shape(whole), dtype=np.float64), where=whole > 0)


# ------------------------------------------------------------------- several labels, numbers, tags


@dataclass(frozen=True)
class MultiLabelScores:
    """The scores of a multi-label classifier, from 0 to 1."""

    n: int
    macro_f1: float  # mean over the labels that occur in truth or prediction
    micro_f1: float  # over all decisions together
    exact: float  # share of examples with all labels correct
    classes: tuple[ClassScores, ...]


def multi_label(predicted: MultiHot, truth: MultiHot, labels: Sequence[str]) -> MultiLabelScores:
    """``predicted`` and ``truth`` have a row per example and a column per label."""
    classes = _class_scores(labels, *(x.sum(0) for x in (predicted & truth, predicted, truth)))
    micro, macro, exact = (each.corpus() for each in multi_label_statistics(predicted, truth))
    return MultiLabelScores(len(truth), macro, micro, exact, classes)


def multi_label_statistics(predicted: MultiHot, truth: MultiHot) -> list[Statistics]:
    """Micro F1, macro F1 and exact match, each a function of sums over examples."""
    counts = [x.astype(np.float64) for x in (predicted & truth, predicted, truth)]
    totals = np.stack([x.sum(1) for x in counts], axis=1)  # (N, 3): hits, predicted, true
    micro = Statistics("micro F1", totals, _micro_f1)
    each = np.concatenate(counts, axis=1)
    macro = Statistics("macro F1", each, _macro_f1)
    return [micro, macro, mean_statistics("exact", (predicted == truth).all(1))]


def regression(predicted: Floats, truth: Floats) -> dict[str, float]:
    """Pearson's r, Spearman's ρ (ties share their mean rank), and the mean squared error.

    A correlation is 0 if either side is constant.
    """
    pairs = (predicted, truth), (_ranks(predicted), _ranks(truth))
    pearson, spearman = (regression_statistics(*pair)[0].corpus() for pair in pairs)
    return {"pearson": pearson, "spearman": spearman, "mse": float(((predicted - truth) ** 2).mean())}


def regression_statistics(predicted: Floats, truth: Floats) -> list[Statistics]:
    errors = mean_statistics("mse", (predicted - truth) ** 2, higher_is_better=False)
    return [Statistics("Pearson", _moments(predicted, truth), _pearson), errors]


def _moments(x: Floats, y: Floats) -> Floats:
    """Moments (N, 6) whose sums give the correlation; centred first, so that no digits are lost in the differences."""
    x, y = x - x.mean(), y - y.mean()
    return np.stack([np.ones_like(x), x, y, x * x, y * y, x * y], axis=1)


def _pearson(sums: Floats) -> Floats:
    n, x, y, xx, yy, xy = np.moveaxis(sums, -1, 0)
    spread_x, spread_y = n * xx - x * x, n * yy - y * y
    varies = (spread_x > _ROUNDING * n * xx) & (spread_y > _ROUNDING * n * yy)
    return share(n * xy - x * y, np.where(varies, np.sqrt(np.abs(spread_x * spread_y)), 0.0)).clip(-1, 1)


def _ranks(values: Floats) -> Floats:
    _, inverse, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return (last - (count - 1) / 2)[inverse]


@dataclass(frozen=True)
class TaggingScores:
    """The scores of a tagger, from 0 to 1."""

    accuracy: float  # share of words with the correct tag
    f1: float  # over all entities if tags are B-X, I-X and O; else the macro F1 of tags
    classes: tuple[ClassScores, ...]  # one per entity type, or per tag


def tagging(predicted: Sequence[Sequence[str]], truth: Sequence[Sequence[str]]) -> TaggingScores:
    """``predicted`` and ``truth`` are the tags of each sentence. As in conlleval and seqeval, an entity is correct if
    its type, its first word and its last word are."""
    accuracy, f1 = (each.corpus() for each in tagging_statistics(predicted, truth))
    classes, counts = _unit_counts(predicted, truth)
    return TaggingScores(accuracy, f1, _class_scores(classes, *counts.sum(0)))


def tagging_statistics(predicted: Sequence[Sequence[str]], truth: Sequence[Sequence[str]]) -> list[Statistics]:
    """Accuracy of words, and F1 of entities or tags, each a function of sums over sentences."""
    n_correct = [sum(a == b for a, b in zip(*pair, strict=True)) for pair in zip(predicted, truth, strict=True)]
    accuracy = mean_statistics("accuracy", n_correct, [max(1, len(tags)) for tags in truth])
    _, counts = _unit_counts(predicted, truth)
    if not _are_entities(truth):
        rows = counts.reshape(len(counts), -1)
        return [accuracy, Statistics("macro F1", rows, _macro_f1)]
    totals = counts.sum(-1)  # (N, 3): hits, predicted, true
    f1 = Statistics("entity F1", totals, _micro_f1)
    return [accuracy, f1]


def _unit_counts(predicted: Sequence[Sequence[str]], truth: Sequence[Sequence[str]]) -> tuple[list[str], Floats]:
    """The entity types or tags, and for each sentence the numbers of hits, predicted and true ones (N, 3, types)."""
    units = entity_spans if _are_entities(truth) else lambda tags: [(tag, i, i) for i, tag in enumerate(tags)]
    pairs = [(set(units(a)), set(units(b))) for a, b in zip(predicted, truth, strict=True)]
    names = sorted({kind for pair in pairs for spans in pair for kind, _, _ in spans})
    column = {name: index for index, name in enumerate(names)}
    counts = np.zeros((len(pairs), 3, len(names)))
    for row, (guess, true) in enumerate(pairs):
        for i, spans in enumerate((guess & true, guess, true)):
            for kind, _, _ in spans:
                counts[row, i, column[kind]] += 1
    return names, counts


def _are_entities(sentences: Sequence[Sequence[str]]) -> bool:
    return has_entities(tag for sentence in sentences for tag in sentence)
