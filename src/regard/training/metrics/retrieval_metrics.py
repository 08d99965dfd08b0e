"""Metrics of retrieval (the rank of the correct candidate) and of answers (exact match and F1 of words)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .statistics import Floats, MetricResult

CUTOFFS = (1, 5, 10)
_MAX_SIMILARITIES = 1 << 24  # similarities computed at once


def ranks_of(scores: Tensor, target: Tensor) -> NDArray[np.int64]:
    """The rank, from 1, of the correct candidate ``target`` (N,) by scores (N, candidates); ties count against it."""
    own = scores.gather(1, target[:, None])
    others = torch.ones_like(scores, dtype=torch.bool).scatter_(1, target[:, None], False)
    return (1 + ((scores >= own) & others).sum(1)).cpu().numpy()


def retrieval_metrics(ranks: NDArray[np.int64]) -> dict[str, float]:
    """Recall at 1, 5 and 10, and the mean reciprocal rank (Voorhees 1999)."""
    recalls = {f"recall_{k}": float((ranks <= k).mean()) for k in CUTOFFS}
    return {**recalls, "mrr": float((1 / ranks).mean())}


def answer_words(text: str) -> list[str]:
    """The words of an answer, in lower case and without punctuation (SQuAD, Rajpurkar et al. 2016; articles stay)."""
    return re.sub(r"[^\w\s]", " ", text.lower()).split()


def answer_exactness(outputs: Sequence[str], references: Sequence[str]) -> NDArray[np.float64]:
    """1 for each answer with the words of the reference."""
    pairs = zip(outputs, references, strict=True)
    return np.array([answer_words(output) == answer_words(reference) for output, reference in pairs], np.float64)


def answer_f1(outputs: Sequence[str], references: Sequence[str]) -> NDArray[np.float64]:
    """F1 of words: 2 · common / (words of the answer + words of the reference); 1 if neither has any."""
    scores = []
    for output, reference in zip(outputs, references, strict=True):
        answer, expected = Counter(answer_words(output)), Counter(answer_words(reference))
        common = (answer & expected).total()
        scores.append(2 * common / (answer.total() + expected.total()) if answer or expected else 1.0)
    return np.array(scores, np.float64)


@dataclass(frozen=True)
class RetrievalScores(MetricResult):
    """Recall@k in both directions.

    text_recall_k   share of images with one of their own texts among the k nearest texts
    image_recall_k  share of texts with their image among the k nearest images
    """

    n: int
    n_texts: int
    text_recall_1: float
    text_recall_5: float
    text_recall_10: float
    image_recall_1: float
    image_recall_5: float
    image_recall_10: float
    mean_recall: float  # mean of the six recalls


@dataclass(frozen=True)
class Ranks:
    """For each image and each text, the number of wrong candidates at least as similar as the best correct one."""

    images: NDArray[np.int64]
    texts: NDArray[np.int64]
    best_text: NDArray[np.int64]  # the nearest text of each image

    def scores(self) -> RetrievalScores:
        recalls = [float((ranks < k).mean()) for ranks in (self.images, self.texts) for k in CUTOFFS]
        values = [*recalls, float(np.mean(recalls))]
        return RetrievalScores(len(self.images), len(self.texts), *values)


def retrieval_ranks(images: Floats, texts: Floats, owner: NDArray[np.int64]) -> Ranks:
    """Ranks by the cosine of images (N, D) and texts (M, D), unit vectors; ``owner`` (M,) is the image of each text.

    Ties count against the correct candidate, so a model that maps everything to one vector retrieves nothing.
    """
    n_rows = max(1, _MAX_SIMILARITIES // max(len(images), len(texts)))
    text_ranks, image_ranks, best = [], [], []
    for start in range(0, len(texts), n_rows):
        cosines = texts[start : start + n_rows] @ images.T
        correct = cosines[np.arange(len(cosines)), owner[start : start + n_rows]]
        text_ranks.append((cosines >= correct[:, None]).sum(1) - 1)
    for start in range(0, len(images), n_rows):
        cosines = images[start : start + n_rows] @ texts.T
        own = owner[None] == np.arange(start, start + len(cosines))[:, None]
        correct = np.where(own, cosines, -np.inf).max(1)
        image_ranks.append(((cosines >= correct[:, None]) & ~own).sum(1))
        best.append(cosines.argmax(1))
    return Ranks(np.concatenate(image_ranks), np.concatenate(text_ranks), np.concatenate(best))
