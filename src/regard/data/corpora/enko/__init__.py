"""`en-ko`: sentence pairs from an English–Korean grammar, without end, with their true alignment."""

from __future__ import annotations

from .combinations import HELD_OUT, combinations_of
from .corpus import EnKo
from .counting import SimpleSentences
from .grammar import REGISTERS, Pair, realise
from .lexicon import lemmas
from .lookup import lookup_accuracy, lookup_table, lookup_translate
from .sentences import MOST_WORDS

__all__ = [
    "HELD_OUT",
    "MOST_WORDS",
    "REGISTERS",
    "EnKo",
    "Pair",
    "SimpleSentences",
    "combinations_of",
    "lemmas",
    "lookup_accuracy",
    "lookup_table",
    "lookup_translate",
    "realise",
]
