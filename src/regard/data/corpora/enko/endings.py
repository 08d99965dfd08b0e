"""The last eojeols of a Korean clause: tense, then the ending that its place in the sentence and the register ask for.

Registers are 해요체 (polite), 합쇼체 (formal) and 해라체 (plain). An eojeol is what Korean writes between two spaces;
each comes with its role, so that the words of the two languages can be aligned.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

from .conjugation import Stem, infinitive, join_eu, join_plain, past
from .hangul import final, with_final

__all__ = ["ENDINGS", "Ending", "Piece", "Register", "Tense", "finish"]

Register = Literal["polite", "formal", "plain"]
Tense = Literal["past", "present", "future"]
Ending = Literal[
    "statement", "question", "adnominal", "quote", "fact", "hope", "because", "so", "but", "and", "when", "if"
]
Piece = tuple[str, str]
"""An eojeol and its role: `verb`, `tense` (the future's 거예요), `link` (때문에, 때)."""

ENDINGS: tuple[Ending, ...] = (
    "statement", "question", "adnominal", "quote", "fact", "hope", "because", "so", "but", "and", "when", "if",
)  # fmt: skip

_FUTURE = {
    ("statement", "polite"): "거예요",
    ("statement", "formal"): "겁니다",
    ("statement", "plain"): "것이다",
    ("question", "polite"): "거예요",
    ("question", "formal"): "겁니까",
    ("question", "plain"): "거니",
}


@cache
def finish(stem: Stem, tense: Tense, ending: Ending, register: Register) -> tuple[Piece, ...]:
    """Stem → eojeols: (먹, past, because) → 먹었기 때문에; (먹, future, statement, polite) → 먹을 거예요."""
    if ending == "adnominal":
        return ((_adnominal(stem, tense), "verb"),)
    if tense == "future":
        return _finish_future(stem, ending, register)
    if tense == "past":
        stem = _past(stem)
    match ending:
        case "statement":
            return ((_statement(stem, register), "verb"),)
        case "question":
            return ((_question(stem, register), "verb"),)
        case "quote":
            return ((_quote(stem) + "고", "verb"),)
        case "fact":
            return ((_quote(stem) + "는", "verb"), ("것을", "link"))
        case "hope":
            return ((_attach(stem, "기를", written_out=True), "verb"),)
        case "because":
            return ((_attach(stem, "기", written_out=True), "verb"), ("때문에", "link"))
        case "so":
            return ((_infinitive(stem) + "서", "verb"),)
        case "but":
            return ((_attach(stem, "지만"), "verb"),)
        case "and":
            return ((_attach(stem, "고"), "verb"),)
        case "when":
            return ((_attach_eu(stem, "ㄹ"), "verb"), ("때", "link"))
        case "if":
            return ((_attach_eu(stem, "면"), "verb"),)


def _finish_future(stem: Stem, ending: Ending, register: Register) -> tuple[Piece, ...]:
    """(으)ㄹ 것이다, in the forms it takes: 먹을 거예요, 먹을 거라고, 먹을 것이기 때문에."""
    will = (_attach_eu(stem, "ㄹ"), "verb")
    match ending:
        case "statement" | "question":
            return (will, (_FUTURE[ending, register], "tense"))
        case "quote":
            return (will, ("거라고", "tense"))
        case "fact":
            return (will, ("거라는", "tense"), ("것을", "link"))
        case "because":
            return (will, ("것이기", "tense"), ("때문에", "link"))
    raise ValueError(f"tense='future' has no ending={ending!r} in this grammar")


def _statement(stem: Stem, register: Register) -> str:
    if register == "formal":
        return _formal(stem) + "다"
    if register == "polite":
        return _polite(stem)
    return _declarative(stem)


def _question(stem: Stem, register: Register) -> str:
    if register == "formal":
        return _formal(stem) + "까"
    return _polite(stem) if register == "polite" else _attach(stem, "니")


def _polite(stem: Stem) -> str:
    """해요체: 먹어요, 가세요, 학생이에요, 의사예요, 아니에요."""
    if stem.irregular == "시":
        return _attach(stem, "")[:-1] + "세요"
    if stem.kind == "copula":
        return stem.text + ("이에요" if final(stem.text) else "예요")
    return stem.text + "에요" if stem.irregular == "아니" else _infinitive(stem) + "요"


def _formal(stem: Stem) -> str:
    """합쇼체 without its last syllable: 먹습니-, 갑니-, 만듭니-, 학생입니-."""
    if stem.kind == "copula" and stem.irregular != "시":
        return stem.text + "입니"
    text = _attach(stem, "")
    return with_final(text, "ㅂ") + "니" if final(text) in ("", "ㄹ") else text + "습니"


def _declarative(stem: Stem) -> str:
    """해라체: verbs say 먹는다 and 간다, everything else 크다, 있다, 먹었다, 학생이다."""
    if stem.kind != "verb":
        return _attach(stem, "다")
    if final(stem.text) in ("", "ㄹ"):
        return with_final(stem.text, "ㄴ") + "다"
    return stem.text + "는다"


def _quote(stem: Stem) -> str:
    """What stands before 고 of reported speech: 먹는다, 크다, 학생이라, 아니라."""
    if stem.kind == "copula" or stem.irregular == "아니" or stem.text.endswith("아니시"):
        return _attach(stem, "라")
    return _declarative(stem)


@cache
def _adnominal(stem: Stem, tense: Tense) -> str:
    """The form before a noun: 먹는, 먹은, 먹을; 큰, 컸던; 있는, 있던."""
    if tense == "future":
        return _attach_eu(stem, "ㄹ")
    if tense == "present":
        return join_plain(stem, "는") if stem.kind in ("verb", "exist") else _attach_eu(stem, "ㄴ")
    if stem.kind == "verb":
        return join_eu(stem, "ㄴ")
    return join_plain(stem, "던") if stem.kind == "exist" else _past(stem).text + "던"


def _past(stem: Stem) -> Stem:
    if stem.kind != "copula":
        return past(stem)
    if stem.irregular == "시":
        return Stem(_attach(stem, "")[:-1] + "셨", "어", "adjective")
    return Stem(stem.text + ("이었" if final(stem.text) else "였"), "어", "adjective")


def _attach(stem: Stem, ending: str, written_out: bool = False) -> str:
    """A consonant ending; the copula's 이 is heard after a consonant and swallowed after a vowel unless written out."""
    if stem.kind != "copula":
        return join_plain(stem, ending) if ending else stem.text
    linking = "이" if final(stem.text) or written_out else ""
    return stem.text + linking + ("시" if stem.irregular == "시" else "") + ending


def _attach_eu(stem: Stem, ending: str) -> str:
    if stem.kind != "copula":
        return join_eu(stem, ending)
    return join_eu(Stem(_attach(stem, "", written_out=True)), ending)


def _infinitive(stem: Stem) -> str:
    if stem.kind != "copula":
        return infinitive(stem)
    if stem.irregular == "시":
        return _attach(stem, "")[:-1] + "셔"
    return stem.text + ("이어" if final(stem.text) else "여")
