"""Refusals of wrong arguments in one sentence: numbers out of range, and unknown names with the nearest known one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean", "nearest_name", "unknown_name"]


def check_positive(**sizes: int | float | None) -> None:
    """Refuse counts and sizes below 1, by name; None means "not given" and passes."""
    for name, size in sizes.items():
        if size is not None and not size >= 1:
            raise ValueError(f"{name}={size} must be at least 1")


def check_not_negative(**sizes: int) -> None:
    """Refuse counts below 0, by name."""
    for name, size in sizes.items():
        if size < 0:
            raise ValueError(f"{name}={size} must not be negative")


def check_probability(**values: float) -> None:
    """Refuse what does not lie in [0, 1), by name: rates of dropout and the like."""
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name}={value} must lie in [0, 1)")


def nearest_name(name: str, known: Iterable[str], cutoff: float = 0.6, *, dotted: bool = True) -> str | None:
    """The known name closest to ``name``; None where none is near.

    Of ``dotted`` names (``train.steps``) those that share the last part come first: ``model.lr`` suggests ``train.lr``.
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


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6, *, dotted: bool = True) -> str:
    """``; did you mean train.steps?`` to end a sentence with, or nothing where no name is near."""
    nearest = nearest_name(name, known, cutoff, dotted=dotted)
    return "" if nearest is None else f"; did you mean {nearest}?"


def unknown_name(what: str, name: object, known: Iterable[str], nearest: str | None = None) -> ValueError:
    """The error for a name outside a table: it offers the nearest name, and lists all of them."""
    names = list(known)
    nearest = nearest or nearest_name(str(name), names, cutoff=0.4)
    hint = "" if nearest is None else f" did you mean {nearest!r}?"
    return ValueError(f"{what}={name!r} is not known;{hint} known: {', '.join(names)}")
