"""Numbers and texts as a person reads them in a terminal, where a Hangul syllable takes two columns."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from typing import Any

JOINER = "\u200d"
GAP = "  "


def count(value: float) -> str:
    """812, 12.3k, 4.56M."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size * 0.99995:
            scaled = value / size
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f}{unit}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """0:07, 12:34, 3:04:05, 2 d 3:04:05."""
    whole = max(0, round(seconds))
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    clock = f"{hours}:{minutes:02}:{whole % 60:02}" if hours or days else f"{minutes}:{whole % 60:02}"
    return f"{days} d {clock}" if days else clock


def memory(mib: float) -> str:
    return f"{mib:.0f} MiB" if mib < 10000 else f"{mib / 1024:.1f} GiB"


def number(value: Any) -> str:
    """A metric or a fact in few digits; whatever is not a number as it stands."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        if value == 0 or 1e-3 <= abs(value) < 1e5:
            return f"{value:.4f}" if abs(value) < 10 else f"{value:,.2f}"
        return f"{value:.3g}"
    if isinstance(value, list | tuple):
        return ", ".join(number(item) for item in value)
    if isinstance(value, dict):
        return GAP.join(f"{key} {number(item)}" for key, item in value.items())
    return visible(str(value))


def visible(text: str) -> str:
    """One line that cannot steer the terminal: control characters as their pictures, reversals of direction as dots."""
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    if character == "\n":
        return "⏎"
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    kind = unicodedata.category(character)
    if kind == "Cs":
        return "\ufffd"
    if kind in ("Cc", "Zl", "Zp") or 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069:
        return "·"
    return character


def clip(text: str, width: int) -> str:
    """The text in at most ``width`` columns: cut before a whole character, with … in place of the rest."""
    from rich.cells import cell_len

    if cell_len(text) <= width:
        return text
    used, end, joined = 0, 0, False
    for place, character in enumerate(text):
        size = cell_len(character)
        # What has no width belongs to the character before it, and so does whatever a joiner ties to it.
        if size and not joined and used + size > width - 1:
            break
        if size and not joined:
            used += size
        joined = character == JOINER
        end = place + 1
    return text[:end] + "…" if width > 0 else ""


def pad(text: str, width: int) -> str:
    """The text and as many spaces as fill ``width`` columns."""
    from rich.cells import cell_len

    return text + " " * (width - cell_len(text))


def pairs(values: dict[str, Any], width: int, indent: str = GAP) -> list[str]:
    """Names and values under each other."""
    from rich.cells import cell_len

    names = [visible(str(name)).replace("_", " ") for name in values]
    widest = max(map(cell_len, names), default=0)
    room = width - widest - 2 * len(GAP)
    return [
        f"{indent}{pad(name, widest)}{GAP}{clip(number(value), room)}"
        for name, value in zip(names, values.values(), strict=True)
    ]


def rows(found: Sequence[dict[str, Any]], width: int) -> list[str]:
    """Examples: a table where every row fits in a line, else each value on a line of its own under the one before."""
    from rich.cells import cell_len

    names = list(dict.fromkeys(name for row in found for name in row))
    cells = [[number(row[name]) if name in row else "" for name in names] for row in found]
    widths = [max(map(cell_len, column)) for column in zip(names, *cells, strict=True)]
    if sum(widths) + len(GAP) * len(names) <= width:
        lines = [[visible(name) for name in names], *cells]
        return [(GAP + GAP.join(map(pad, line, widths))).rstrip() for line in lines]
    shown: list[str] = []
    for row in found:
        shown += [*pairs(row, width), ""]
    return shown[:-1]
