"""Korean conjugation: three ways to join an ending, and what each irregular class does to them.

Endings that begin with a consonant (고, 지, 기) take the stem as the dictionary has it; endings with 으 (으면, 은,
을, 으시) and endings with 아/어 (아요, 았, 아서) meet the irregular classes:

    ㅂ 돕다 → 도우면, 도와요     ㄷ 듣다 → 들으면, 들어요     ㅅ 짓다 → 지으면, 지어요
    ㅎ 빨갛다 → 빨가면, 빨개요   르 부르다 → 부르면, 불러요   하 일하다 → 일하면, 일해요
    and without being marked: ㄹ 만들다 → 만드는, 만듭니다, 만들면;  으 쓰다 → 쓰면, 써요
"""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple

from .hangul import compose, decompose, final, with_final

__all__ = ["CLASSES", "Kind", "Stem", "honorific", "infinitive", "join_eu", "join_plain", "past"]

Kind = Literal["verb", "adjective", "exist", "copula"]
"""What decides 먹는다 / 크다 / 있다 and 먹는 / 큰 / 있는; the copula has forms of its own."""

CLASSES = ("", "ㅂ", "ㄷ", "ㅅ", "ㅎ", "르", "하", "시", "어", "아니")
"""Regular, the irregular classes, 시 the honorific suffix, 어 a stem that takes 어 whole (피다 → 피어요, 갔 → 갔어요),
and 아니다."""

_BRIGHT = "ㅏㅑㅗ"
# Where a vowel meets 아/어: the vowel it becomes. What is not listed keeps the ending as a syllable (쉬다 → 쉬어).
_CONTRACTED = {
    "ㅏ": "ㅏ", "ㅓ": "ㅓ", "ㅐ": "ㅐ", "ㅔ": "ㅔ", "ㅕ": "ㅕ",
    "ㅗ": "ㅘ", "ㅜ": "ㅝ", "ㅣ": "ㅕ", "ㅚ": "ㅙ",
}  # fmt: skip


class Stem(NamedTuple):
    """A verb or adjective without its ending: 먹다 is Stem("먹"), 춥다 is Stem("춥", "ㅂ", "adjective")."""

    text: str
    irregular: str = ""
    kind: Kind = "verb"


@cache
def join_plain(stem: Stem, ending: str) -> str:
    """Stem and an ending that begins with a consonant; ㄹ falls before ㄴ and ㅅ: 만들 + 는 → 만드는."""
    if final(stem.text) == "ㄹ" and decompose(ending[0])[0] in "ㄴㅅ":
        return with_final(stem.text, "") + ending
    return stem.text + ending


@cache
def join_eu(stem: Stem, ending: str) -> str:
    """Stem and an ending with 으, given without it: `면`, `시`, or a bare ㄴ, ㄹ, ㅂ at its head (`ㄴ`, `ㅂ니다`)."""
    base, open_end = _base_before_eu(stem)
    bare = ending[0] in "ㄴㄹㅂ"  # a jamo that becomes the final consonant of the syllable before it
    falls = bare or decompose(ending[0])[0] in "ㄴㅅ"
    if final(base) == "ㄹ" and not open_end and stem.irregular != "ㄷ":
        base, open_end = (with_final(base, "") if falls else base), True
    if not open_end:
        base += "으"
    return with_final(base, ending[0]) + ending[1:] if bare else base + ending


def _base_before_eu(stem: Stem) -> tuple[str, bool]:
    """What stands before 으 and whether it ends open, so that 으 is not needed."""
    text = stem.text
    match stem.irregular:
        case "ㅂ":
            return with_final(text, "") + "우", True
        case "ㄷ":
            return with_final(text, "ㄹ"), False
        case "ㅅ":
            return with_final(text, ""), False
        case "ㅎ":
            return with_final(text, ""), True
    return text, not final(text)


@cache
def infinitive(stem: Stem) -> str:
    """Stem with 아/어, contracted as it is written: 가, 와, 먹어, 해, 도와, 들어, 불러, 써."""
    text = stem.text
    lead, vowel, tail = decompose(text[-1])
    match stem.irregular:
        case "하":
            return text[:-1] + "해"
        case "ㅂ":  # only 돕다 and 곱다 keep the bright vowel
            return with_final(text, "") + ("와" if text in ("돕", "곱") else "워")
        case "ㄷ":
            return with_final(text, "ㄹ") + _harmony(vowel)
        case "ㅅ":
            return with_final(text, "") + _harmony(vowel)
        case "ㅎ":
            return text[:-1] + compose(lead, "ㅒ" if vowel == "ㅑ" else "ㅐ")
        case "르":
            before = with_final(text[:-1], "ㄹ")
            return before + ("라" if decompose(before[-1])[1] in _BRIGHT else "러")
        case "어" | "아니":
            return text + "어"
    if tail:
        return text + _harmony(vowel)
    if vowel == "ㅡ":
        bright = len(text) > 1 and decompose(text[-2])[1] in _BRIGHT
        return text[:-1] + compose(lead, "ㅏ" if bright else "ㅓ")
    if vowel in _CONTRACTED:
        return text[:-1] + compose(lead, _CONTRACTED[vowel])
    return text + "어"


def _harmony(vowel: str) -> str:
    return "아" if vowel in _BRIGHT else "어"


@cache
def past(stem: Stem) -> Stem:
    """The stem with 았/었: 먹 → 먹었, 가 → 갔, 하 → 했. It takes adjective endings, tense being already said."""
    return Stem(with_final(infinitive(stem), "ㅆ"), "어", "adjective")


@cache
def honorific(stem: Stem) -> Stem:
    """The stem with (으)시: 읽 → 읽으시, 만들 → 만드시, 춥 → 추우시."""
    return Stem(join_eu(stem, "시"), "시", "adjective" if stem.kind == "exist" else stem.kind)
