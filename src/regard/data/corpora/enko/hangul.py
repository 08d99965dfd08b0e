"""Hangul as arithmetic: a syllable is 가 + (lead × 21 + vowel) × 28 + tail (Unicode standard, section 3.12).

Everything Korean here that depends on sound depends on the last syllable: 은/는, 이/가, 을/를, 과/와, (으)로.
"""

from __future__ import annotations

from functools import cache

__all__ = ["LEADS", "TAILS", "VOWELS", "compose", "decompose", "final", "is_syllable", "particle", "with_final"]

LEADS = "ㄱㄲㄴㄷㄸㄹㅁㅂㅃㅅㅆㅇㅈㅉㅊㅋㅌㅍㅎ"
VOWELS = "ㅏㅐㅑㅒㅓㅔㅕㅖㅗㅘㅙㅚㅛㅜㅝㅞㅟㅠㅡㅢㅣ"
TAILS = ("", *"ㄱㄲㄳㄴㄵㄶㄷㄹㄺㄻㄼㄽㄾㄿㅀㅁㅂㅄㅅㅆㅇㅈㅊㅋㅌㅍㅎ")

_FIRST = ord("가")
_LAST = ord("힣")


def is_syllable(character: str) -> bool:
    """Whether this is one composed Hangul syllable."""
    return len(character) == 1 and _FIRST <= ord(character) <= _LAST


def decompose(syllable: str) -> tuple[str, str, str]:
    """`값` → (ㄱ, ㅏ, ㅄ); the tail is the empty string where there is none."""
    if not is_syllable(syllable):
        raise ValueError(f"syllable={syllable!r} is not one composed Hangul syllable")
    lead_vowel, tail = divmod(ord(syllable) - _FIRST, len(TAILS))
    lead, vowel = divmod(lead_vowel, len(VOWELS))
    return LEADS[lead], VOWELS[vowel], TAILS[tail]


def compose(lead: str, vowel: str, tail: str = "") -> str:
    """(ㄱ, ㅏ, ㅄ) → `값`: the inverse of `decompose`."""
    if len(lead) != 1 or lead not in LEADS or len(vowel) != 1 or vowel not in VOWELS or tail not in TAILS:
        raise ValueError(f"lead={lead!r}, vowel={vowel!r}, tail={tail!r} do not make a Hangul syllable")
    place = (LEADS.index(lead) * len(VOWELS) + VOWELS.index(vowel)) * len(TAILS) + TAILS.index(tail)
    return chr(_FIRST + place)


def final(word: str) -> str:
    """The consonant a word ends with, or the empty string after a vowel."""
    if not word:
        raise ValueError("word='' has no last syllable")
    return decompose(word[-1])[2]


def with_final(word: str, tail: str) -> str:
    """The word with another final consonant, or none: (`가`, ㄴ) → `간`."""
    lead, vowel, _ = decompose(word[-1])
    return word[:-1] + compose(lead, vowel, tail)


@cache
def particle(word: str, pair: str) -> str:
    """The word with the particle its sound asks for; the pair is written consonant form first, as in `을/를`.

    으로/로 is the exception: after ㄹ it behaves as after a vowel (연필로, but 손으로). Invariable ones have no slash.
    """
    if "/" not in pair:
        return word + pair
    after_consonant, after_vowel = pair.split("/")
    tail = final(word)
    open_end = not tail or (tail == "ㄹ" and after_vowel == "로")
    return word + (after_vowel if open_end else after_consonant)
