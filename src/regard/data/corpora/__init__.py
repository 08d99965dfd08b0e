"""The embedded corpora: what already stands on every machine, deterministic, without end, held out by composition.

`en-ko` has sentence pairs with their true alignment, `shapes` drawn scenes with captions and the place of every thing,
`stdlib` the text of the reader's own Python standard library.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from .corpus import Corpus, Draws, examples, fingerprint

__all__ = ["CORPORA", "Corpus", "Draws", "examples", "fingerprint", "open_corpus"]


def _en_ko() -> Corpus[Any]:
    from .enko import EnKo

    return EnKo()


def _shapes() -> Corpus[Any]:
    from .shapes import Shapes

    return Shapes()


def _stdlib() -> Corpus[Any]:
    from .stdlib import Stdlib

    return Stdlib()


# Opened when asked for: the tables of one corpus are of no use to the other.
_OPENERS: dict[str, Callable[[], Corpus[Any]]] = {"en-ko": _en_ko, "shapes": _shapes, "stdlib": _stdlib}
CORPORA = tuple(_OPENERS)


def open_corpus(name: str) -> Corpus[Any]:
    """The embedded corpus of this name, as it is by default."""
    if name not in _OPENERS:
        near = difflib.get_close_matches(name, CORPORA, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"corpus={name!r} is not one of {', '.join(CORPORA)}{hint}")
    return _OPENERS[name]()
