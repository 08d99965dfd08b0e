"""What a sweep's directory may not do: have code imported. It may be anybody's; words that were typed are the reader's.

The same sweep goes on where the mechanism is known: typed again, in REGARD_MIXERS, or entered in ``MIXERS``.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..config.mixers import get_mixer
from ..errors import BadModelFile

__all__ = ["need_known", "need_our_measures"]


def need_known(words: Iterable[str]) -> None:
    """Refuse a mechanism, module:Class, that nobody but a file has named."""
    for word in words:
        field, _, name = word.partition("=")
        if field == "model.mixer" and ":" in name:
            try:
                get_mixer(name)
            except ValueError as error:
                raise BadModelFile(str(error)) from None


def need_our_measures(measures: Iterable[str], file: Path) -> None:
    """Refuse to call a function that nobody but a file has named, unless it is one of regard's."""
    for place in measures:
        if not place.startswith("regard."):
            raise BadModelFile(
                f"{file} asks for {place!r}, and code that a directory names is never run unasked; "
                "regard ablate FILE.toml, the grid it came from, goes on with it"
            )
