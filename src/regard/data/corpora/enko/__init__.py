"""`en-ko`: sentence pairs from an English–Korean grammar, without end, with their true alignment."""

from __future__ import annotations

from .corpus import EnKo
from .grammar import REGISTERS, Pair, realise

__all__ = ["REGISTERS", "EnKo", "Pair", "realise"]
