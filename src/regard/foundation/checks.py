"""Checks of arguments with one-sentence errors: numbers out of range, unknown names with the nearest known one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean", "nearest_name", "unknown_name"]


def check_positive(**sizes: int | float | None) -> None:
    """Raise ValueError for a count or size below 1; None passes."""
    for name, size in sizes.items():
        if size is not None and not size >= 1:
            raise ValueError(f"{name}={size} must be at least 1")


def check_not_negative(**sizes: int | float | None) -> None:
    """Raise ValueError for a number below 0; None passes."""
    for name, size in sizes.items():
        if size is not None and not size >= 0:  # refuses NaN too
            raise ValueError(f"{name}={size} must not be negative")


def check_probability(**values: float | None) -> None:
    """Raise ValueError for a value outside [0, 1), such as a dropout rate; None passes."""
    for name, value in values.items():
        if value is not None and not 0 <= value < 1:
            raise ValueError(f"{name}={value} must lie in [0, 1)")


def nearest_name(name: str, known: Iterable[str], cutoff: float = 0.6, *, dotted: bool = True) -> str | None:
    """The known name closest to ``name``; None if none is similar.

    With ``dotted`` names (``train.steps``) a match of the last part comes first: ``model.lr`` suggests ``train.lr``.
    """
    names = list(known)
    if not dotted:  # file names, versions
        return next(iter(difflib.get_close_matches(name, names, 1, cutoff)), None)
    last = name.rpartition(".")[2]
    lasts = {each.rpartition(".")[2] for each in names}
    similar = [last] if last in lasts else difflib.get_close_matches(last, lasts, 1, cutoff)
    same = [each for each in names if similar and each.rpartition(".")[2] == similar[0]]
    close = difflib.get_close_matches(name, same or names, 1, 0.0 if same else cutoff)
    return close[0] if close else None


def did_you_mean(
    name: str, known: Iterable[str], cutoff: float = 0.6, *, dotted: bool = True, quoted: bool = False
) -> str:
    """``; did you mean train.steps?`` as the end of an error message, or "" if no name is similar."""
    nearest = nearest_name(name, known, cutoff, dotted=dotted)
    return "" if nearest is None else f"; did you mean {nearest!r}?" if quoted else f"; did you mean {nearest}?"


def unknown_name(what: str, name: object, known: Iterable[str], nearest: str | None = None) -> ValueError:
    """The error for a name that is not in a table: it suggests the nearest name and lists all of them."""
    names = list(known)
    nearest = nearest or nearest_name(str(name), names, cutoff=0.4)
    hint = "" if nearest is None else f" did you mean {nearest!r}?"
    return ValueError(f"{what}={name!r} is not known;{hint} known: {', '.join(names)}")
