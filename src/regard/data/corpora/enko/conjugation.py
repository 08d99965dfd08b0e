"""Korean word forms: Hangul syllables, particles, conjugation, and the endings of a clause.

A syllable is 가 + (lead × 21 + vowel) × 28 + tail (Unicode standard, section 3.12). Particles (은/는, 이/가, 을/를,
과/와, (으)로) depend on the sound of the last one.

An ending joins a stem in one of three ways. Endings that begin with a consonant (고, 지, 기) take the stem as the
dictionary has it; endings with 으 (으면, 은, 을, 으시) and with 아/어 (아요, 았, 아서) meet the irregular classes:

    ㅂ 돕다 → 도우면, 도와요     ㄷ 듣다 → 들으면, 들어요     ㅅ 짓다 → 지으면, 지어요
    ㅎ 빨갛다 → 빨가면, 빨개요   르 부르다 → 부르면, 불러요   하 일하다 → 일하면, 일해요
    and without being marked: ㄹ 만들다 → 만드는, 만듭니다, 만들면;  으 쓰다 → 쓰면, 써요

A clause ends in its tense and an ending that depends on its position in the sentence and the register. Registers are
해요체 (polite), 합쇼체 (formal) and 해라체 (plain). An eojeol is a unit of Korean text between two spaces.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Literal, NamedTuple

_LEADS = "ㄱㄲㄴㄷㄸㄹㅁㅂㅃㅅㅆㅇㅈㅉㅊㅋㅌㅍㅎ"
_VOWELS = "ㅏㅐㅑㅒㅓㅔㅕㅖㅗㅘㅙㅚㅛㅜㅝㅞㅟㅠㅡㅢㅣ"
_TAILS = ("", *"ㄱㄲㄳㄴㄵㄶㄷㄹㄺㄻㄼㄽㄾㄿㅀㅁㅂㅄㅅㅆㅇㅈㅊㅋㅌㅍㅎ")
_FIRST, _LAST = ord("가"), ord("힣")


def decompose(syllable: str) -> tuple[str, str, str]:
    """`값` → (ㄱ, ㅏ, ㅄ); a missing tail is the empty string."""
    if len(syllable) != 1 or not _FIRST <= ord(syllable) <= _LAST:
        raise ValueError(f"syllable={syllable!r} is not one composed Hangul syllable")
    lead_vowel, tail = divmod(ord(syllable) - _FIRST, len(_TAILS))
    lead, vowel = divmod(lead_vowel, len(_VOWELS))
    return _LEADS[lead], _VOWELS[vowel], _TAILS[tail]


def compose(lead: str, vowel: str, tail: str = "") -> str:
    """(ㄱ, ㅏ, ㅄ) → `값`: the inverse of `decompose`."""
    if len(lead) != 1 or lead not in _LEADS or len(vowel) != 1 or vowel not in _VOWELS or tail not in _TAILS:
        raise ValueError(f"lead={lead!r}, vowel={vowel!r}, tail={tail!r} do not make a Hangul syllable")
    place = (_LEADS.index(lead) * len(_VOWELS) + _VOWELS.index(vowel)) * len(_TAILS) + _TAILS.index(tail)
    return chr(_FIRST + place)


def final_consonant(word: str) -> str:
    """The consonant a word ends with, or the empty string after a vowel."""
    if not word:
        raise ValueError("word='' has no last syllable")
    return decompose(word[-1])[2]


def with_final_consonant(word: str, tail: str) -> str:
    """The word with another final consonant, or none: (`가`, ㄴ) → `간`."""
    lead, vowel, _ = decompose(word[-1])
    return word[:-1] + compose(lead, vowel, tail)


@cache
def attach_particle(word: str, pair: str) -> str:
    """The word with the form of the particle that its last sound requires; in a pair such as `을/를`, the form after a
    consonant comes first.

    으로/로 is an exception: ㄹ counts as a vowel (연필로, but 손으로). Invariable particles have no slash.
    """
    if "/" not in pair:
        return word + pair
    after_consonant, after_vowel = pair.split("/")
    tail = final_consonant(word)
    open_end = not tail or (tail == "ㄹ" and after_vowel == "로")
    return word + (after_vowel if open_end else after_consonant)


# The kind decides between 먹는다 / 크다 / 있다 and 먹는 / 큰 / 있는; the copula has its own forms.
StemKind = Literal["verb", "adjective", "exist", "copula"]

_BRIGHT = "ㅏㅑㅗ"
# The vowel that results when a stem's vowel meets 아/어. Others keep the ending as a syllable (쉬다 → 쉬어).
_CONTRACTED = {
    "ㅏ": "ㅏ", "ㅓ": "ㅓ", "ㅐ": "ㅐ", "ㅔ": "ㅔ", "ㅕ": "ㅕ",
    "ㅗ": "ㅘ", "ㅜ": "ㅝ", "ㅣ": "ㅕ", "ㅚ": "ㅙ",
}  # fmt: skip
# Irregular stems before 으: the new final consonant, a vowel to append, and whether 으 is dropped.
_BEFORE_EU = {"ㅂ": ("", "우", True), "ㄷ": ("ㄹ", "", False), "ㅅ": ("", "", False), "ㅎ": ("", "", True)}


class Stem(NamedTuple):
    """A verb or adjective without its ending: 먹다 is Stem("먹"), 춥다 is Stem("춥", "ㅂ", "adjective").

    ``irregular`` is empty, an irregular class, 시 (the honorific suffix), 어 (a stem that does not contract with 어:
    피다 → 피어요, 갔 → 갔어요), or 아니 (아니다).
    """

    text: str
    irregular: str = ""
    kind: StemKind = "verb"


@cache
def join_consonant(stem: Stem, ending: str) -> str:
    """Join a stem and an ending that begins with a consonant; ㄹ is dropped before ㄴ and ㅅ: 만들 + 는 → 만드는.

    The copula's 이 is kept after a consonant and dropped after a vowel.
    """
    if stem.kind == "copula":
        return _copula(stem, "이" if final_consonant(stem.text) else "") + ending
    if ending and final_consonant(stem.text) == "ㄹ" and decompose(ending[0])[0] in "ㄴㅅ":
        return with_final_consonant(stem.text, "") + ending
    return stem.text + ending


def _copula(stem: Stem, linking: str = "이") -> str:
    """The noun, the linking 이, and 시 if honorific."""
    return stem.text + linking + ("시" if stem.irregular == "시" else "")


@cache
def join_eu(stem: Stem, ending: str) -> str:
    """Join a stem and an ending with 으, given without it: `면`, `시`, or with a jamo ㄴ, ㄹ, ㅂ first (`ㅂ니다`)."""
    if stem.kind == "copula":
        stem = Stem(_copula(stem))
    if stem.irregular in _BEFORE_EU:
        tail, vowel, open_end = _BEFORE_EU[stem.irregular]
        base = with_final_consonant(stem.text, tail) + vowel
    else:
        base, open_end = stem.text, not final_consonant(stem.text)
    bare = ending[0] in "ㄴㄹㅂ"  # a jamo that becomes the final consonant of the syllable before it
    falls = bare or decompose(ending[0])[0] in "ㄴㅅ"
    if final_consonant(base) == "ㄹ" and not open_end and stem.irregular != "ㄷ":
        base, open_end = (with_final_consonant(base, "") if falls else base), True
    if not open_end:
        base += "으"
    return with_final_consonant(base, ending[0]) + ending[1:] if bare else base + ending


@cache
def infinitive(stem: Stem) -> str:
    """The stem with 아/어, contracted: 가, 와, 먹어, 해, 도와, 들어, 불러, 써."""
    text = stem.text
    if stem.kind == "copula" and stem.irregular == "시":
        return join_consonant(stem, "")[:-1] + "셔"
    lead, vowel, tail = decompose(text[-1])
    if stem.kind == "copula":
        return text + ("이어" if tail else "여")
    match stem.irregular:
        case "하":
            return text[:-1] + "해"
        case "ㅂ":  # only 돕다 and 곱다 keep the bright vowel
            return with_final_consonant(text, "") + ("와" if text in ("돕", "곱") else "워")
        case "ㄷ" | "ㅅ" as irregular:
            return with_final_consonant(text, "ㄹ" if irregular == "ㄷ" else "") + _harmony(vowel)
        case "ㅎ":
            return text[:-1] + compose(lead, "ㅒ" if vowel == "ㅑ" else "ㅐ")
        case "르":
            before = with_final_consonant(text[:-1], "ㄹ")
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
def past_stem(stem: Stem) -> Stem:
    """The stem with 았/었: 먹 → 먹었, 가 → 갔, 하 → 했. It takes the endings of adjectives."""
    return Stem(with_final_consonant(infinitive(stem), "ㅆ"), "어", "adjective")


@cache
def honorific_stem(stem: Stem) -> Stem:
    """The stem with (으)시: 읽 → 읽으시, 만들 → 만드시, 춥 → 추우시."""
    return Stem(join_eu(stem, "시"), "시", "adjective" if stem.kind == "exist" else stem.kind)


Register = Literal["polite", "formal", "plain"]
Tense = Literal["past", "present", "future"]
Ending = Literal[
    "statement", "question", "adnominal", "quote", "fact", "hope", "because", "so", "but", "and", "when", "if"
]
# The text of an eojeol and its role: `verb`, `tense` (the future's 거예요), `link` (때문에, 때).
Eojeol = tuple[str, str]


def _polite(stem: Stem) -> str:
    """해요체: 먹어요, 가세요, 학생이에요, 의사예요, 아니에요."""
    if stem.irregular == "시":
        return join_consonant(stem, "")[:-1] + "세요"
    if stem.kind == "copula":
        return stem.text + ("이에요" if final_consonant(stem.text) else "예요")
    return stem.text + "에요" if stem.irregular == "아니" else infinitive(stem) + "요"


def _formal(stem: Stem) -> str:
    """합쇼체 without its last syllable: 먹습니-, 갑니-, 만듭니-, 학생입니-."""
    if stem.kind == "copula" and stem.irregular != "시":
        return stem.text + "입니"
    text = join_consonant(stem, "")
    return with_final_consonant(text, "ㅂ") + "니" if final_consonant(text) in ("", "ㄹ") else text + "습니"


def _declarative(stem: Stem) -> str:
    """해라체: 먹는다 and 간다 for verbs; 크다, 있다, 먹었다, 학생이다 for everything else."""
    if stem.kind != "verb":
        return join_consonant(stem, "다")
    if final_consonant(stem.text) in ("", "ㄹ"):
        return with_final_consonant(stem.text, "ㄴ") + "다"
    return stem.text + "는다"


def _quote(stem: Stem) -> str:
    """The form before 고 in reported speech: 먹는다, 크다, 학생이라, 아니라."""
    if stem.kind == "copula" or stem.irregular == "아니" or stem.text.endswith("아니시"):
        return join_consonant(stem, "라")
    return _declarative(stem)


@cache
def _adnominal(stem: Stem, tense: Tense) -> str:
    """The form before a noun: 먹는, 먹은, 먹을; 큰, 컸던; 있는, 있던."""
    if tense == "future":
        return join_eu(stem, "ㄹ")
    if tense == "present":
        return join_consonant(stem, "는") if stem.kind in ("verb", "exist") else join_eu(stem, "ㄴ")
    if stem.kind == "verb":
        return join_eu(stem, "ㄴ")
    return join_consonant(stem, "던") if stem.kind == "exist" else past_stem(stem).text + "던"


def _nominal(stem: Stem) -> str:
    """The form before 기, where the copula's 이 is also kept after a vowel."""
    return _copula(stem) if stem.kind == "copula" else stem.text


# Endings that are the same in every register, and those that are not.
_JOINING: dict[str, Callable[[Stem], str]] = {
    "quote": lambda stem: _quote(stem) + "고",
    "fact": lambda stem: _quote(stem) + "는",
    "hope": lambda stem: _nominal(stem) + "기를",
    "because": lambda stem: _nominal(stem) + "기",
    "so": lambda stem: infinitive(stem) + "서",
    "but": lambda stem: join_consonant(stem, "지만"),
    "and": lambda stem: join_consonant(stem, "고"),
    "when": lambda stem: join_eu(stem, "ㄹ"),
    "if": lambda stem: join_eu(stem, "면"),
}
_FINAL: dict[tuple[str, str], Callable[[Stem], str]] = {
    ("statement", "polite"): _polite,
    ("statement", "formal"): lambda stem: _formal(stem) + "다",
    ("statement", "plain"): _declarative,
    ("question", "polite"): _polite,
    ("question", "formal"): lambda stem: _formal(stem) + "까",
    ("question", "plain"): lambda stem: join_consonant(stem, "니"),
}
# The future is (으)ㄹ 것이다 in various forms: 먹을 거예요, 먹을 거라고, 먹을 것이기 때문에.
_FUTURE = {
    "statement": {"polite": "거예요", "formal": "겁니다", "plain": "것이다"},
    "question": {"polite": "거예요", "formal": "겁니까", "plain": "거니"},
    "quote": dict.fromkeys(("polite", "formal", "plain"), "거라고"),
    "fact": dict.fromkeys(("polite", "formal", "plain"), "거라는"),
    "because": dict.fromkeys(("polite", "formal", "plain"), "것이기"),
}
_LINKS = {"fact": "것을", "because": "때문에", "when": "때"}


@cache
def conjugate(stem: Stem, tense: Tense, ending: Ending, register: Register) -> tuple[Eojeol, ...]:
    """Stem → eojeols: (먹, past, because) → 먹었기 때문에; (먹, future, statement, polite) → 먹을 거예요."""
    if ending == "adnominal":
        return ((_adnominal(stem, tense), "verb"),)
    link = ((_LINKS[ending], "link"),) if ending in _LINKS else ()
    if tense != "future":
        inflect = _JOINING.get(ending) or _FINAL[ending, register]
        return ((inflect(past_stem(stem) if tense == "past" else stem), "verb"), *link)
    if ending not in _FUTURE:
        raise ValueError(f"tense='future' has no ending={ending!r} in this grammar")
    return ((join_eu(stem, "ㄹ"), "verb"), (_FUTURE[ending][register], "tense"), *link)
