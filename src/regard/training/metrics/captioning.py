"""Captions with several references each: BLEU-1 to BLEU-4, CIDEr-D (Vedantam et al. 2015), exact match.

CIDEr-D(c) = 10 · mean over n ≤ 4 and references s of  e^(-(l_c - l_s)² / 2σ²) · min(g(c), g(s)) · g(s) / ‖g(c)‖‖g(s)‖
with g(c)_w, w an n-gram = count of w in c · log(images / images with w in a reference), σ = 6.
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Literal

import numpy as np

from .statistics import NOT_WRITTEN, References, Result, Statistics, mean_statistics, percent, reference_lists
from .translating import chrf_statistics, exact_statistics, main_script, sacre_statistics

Unit = Literal["auto", "words", "characters"]
Gram = tuple[str, ...]

_ORDERS = (1, 2, 3, 4)
_SIGMA = 6.0


@dataclass(frozen=True)
class CaptionScores(Result):
    """How close captions are to any of their references."""

    n: int
    bleu_1: float
    bleu_2: float
    bleu_3: float
    bleu_4: float
    """From 0 to 100, not smoothed."""
    cider: float
    """CIDEr-D from 0 to 10, as its authors' program prints it; papers often show 100 times that."""
    exact: float
    signature: str
    scores: tuple[float, ...] = field(default=(), repr=False, metadata=NOT_WRITTEN)
    """Of every caption by itself, from 0 to 1: its chrF against the closest reference, which puts bad ones in order
    where CIDEr-D is 0 for all of them. Not part of the document."""

    def text(self) -> str:
        bleu = f"{self.bleu_1:.1f} {self.bleu_2:.1f} {self.bleu_3:.1f} {self.bleu_4:.1f}"
        return f"BLEU-1..4 {bleu}, CIDEr-D {self.cider:.3f}, exact {percent(self.exact)} ({self.signature})"


def captions(hypotheses: Sequence[str], references: References, unit: Unit = "auto") -> CaptionScores:
    """All of them at once. A hypothesis and its references become lower-case units without punctuation.

    ``unit``: words stand between spaces. Korean, Chinese and Japanese go by characters without spaces ("auto" decides
    by the references): a Korean word carries its particles, so that 4-grams of words would hardly ever match.
    With one image alone every n-gram is in all images, log(1 / 1) = 0, and CIDEr-D is 0 whatever the caption.
    """
    by_order = [bleu_n_statistics(hypotheses, references, order, unit) for order in _ORDERS]
    bleu_1, bleu_2, bleu_3, bleu_4 = (statistics.corpus() for statistics in by_order)
    return CaptionScores(
        n=len(hypotheses),
        bleu_1=bleu_1,
        bleu_2=bleu_2,
        bleu_3=bleu_3,
        bleu_4=bleu_4,
        cider=cider_statistics(hypotheses, references, unit).corpus(),
        exact=exact_statistics(hypotheses, references).corpus(),
        signature=by_order[-1].signature,
        scores=tuple((chrf_statistics(hypotheses, references).each() / 100).tolist()),
    )


def bleu_n_statistics(
    hypotheses: Sequence[str], references: References, order: int = 4, unit: Unit = "auto"
) -> Statistics:
    """BLEU up to n-grams of ``order``: counts clipped by the most any reference has, the closest one's length."""
    from sacrebleu.metrics import BLEU

    if order not in _ORDERS:
        raise ValueError(f"order={order} is not one of 1, 2, 3, 4")
    outputs, lists, signature = _in_units(hypotheses, references, unit)
    metric = BLEU(tokenize="none", smooth_method="none", max_ngram_order=order, force=True)
    joined = [[" ".join(own) for own in some] for some in lists]
    raw = sacre_statistics(f"BLEU-{order}", metric, [" ".join(own) for own in outputs], joined)
    return Statistics(raw.name, raw.rows, raw.score, signature=signature)


def cider_statistics(hypotheses: Sequence[str], references: References, unit: Unit = "auto") -> Statistics:
    """CIDEr-D of every caption. Document frequencies come from all references, and stay so in a resampled corpus."""
    outputs, lists, signature = _in_units(hypotheses, references, unit)
    seen = Counter(chain.from_iterable({gram for own in some for gram in _grams(own)} for some in lists))
    idf = {gram: math.log(len(lists) / n) for gram, n in seen.items()}
    unseen = math.log(len(lists))
    scores = [_cider(own, some, idf, unseen) for own, some in zip(outputs, lists, strict=True)]
    return mean_statistics("CIDEr-D", scores, signature=signature)


def _cider(output: list[str], references: list[list[str]], idf: dict[Gram, float], unseen: float) -> float:
    ours = _vectors(output, idf, unseen)
    total = 0.0
    for reference in references:
        theirs = _vectors(reference, idf, unseen)
        closeness = np.mean([_clipped_cosine(ours[n], theirs[n]) for n in _ORDERS])
        total += float(closeness) * math.exp(-((len(output) - len(reference)) ** 2) / (2 * _SIGMA**2))
    return 10 * total / len(references)


def _clipped_cosine(ours: dict[Gram, float], theirs: dict[Gram, float]) -> float:
    """min(a, b) · b / ‖a‖‖b‖: saying a word more often than the reference does gains nothing."""
    norms = math.hypot(*ours.values()) * math.hypot(*theirs.values())
    return sum(min(ours[w], theirs[w]) * theirs[w] for w in ours.keys() & theirs.keys()) / norms if norms else 0.0


def _vectors(units: list[str], idf: dict[Gram, float], unseen: float) -> dict[int, dict[Gram, float]]:
    vectors: dict[int, dict[Gram, float]] = {n: {} for n in _ORDERS}
    for gram, count in Counter(_grams(units)).items():
        vectors[len(gram)][gram] = count * idf.get(gram, unseen)
    return vectors


def _grams(units: list[str]) -> list[Gram]:
    return [tuple(units[i : i + n]) for n in _ORDERS for i in range(len(units) - n + 1)]


def _in_units(
    hypotheses: Sequence[str], references: References, unit: Unit
) -> tuple[list[list[str]], list[list[list[str]]], str]:
    """Captions and references in words or characters, and the signature that says so."""
    if unit not in ("auto", "words", "characters"):
        raise ValueError(f"unit={unit!r} is not one of auto, words, characters")
    lists = reference_lists(hypotheses, references)
    if unit == "auto":
        unit = "words" if main_script(chain.from_iterable(lists)) == "spaced" else "characters"
    split = _words if unit == "words" else _characters
    counts = {len(some) for some in lists}
    signature = f"nrefs:{counts.pop() if len(counts) == 1 else 'var'}|case:lc|punct:no|tok:{unit}|smooth:none"
    return [split(text) for text in hypotheses], [[split(text) for text in some] for some in lists], signature


def _words(text: str) -> list[str]:
    return "".join(" " if _is_sign(c) else c for c in text.lower()).split()


def _characters(text: str) -> list[str]:
    return list("".join(_words(text)))


@lru_cache(maxsize=4096)
def _is_sign(character: str) -> bool:
    """Punctuation or a symbol."""
    return unicodedata.category(character)[0] in "PS"
