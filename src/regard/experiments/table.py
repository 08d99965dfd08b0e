"""Tables as plain text: they read the same in a terminal, a file and a report."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """A line of a table: its name to the left, numbers to the right, a last column apart."""

    name: str
    entries: list[str]
    last: str


def aligned(rows: list[Row]) -> str:
    """Rows under each other, the first one as the head: names flush left, everything else flush right."""
    lines = [[row.name, *row.entries, row.last] for row in rows]
    widths = [max(len(line[n]) for line in lines) for n in range(len(lines[0]))]
    texts = [
        "  ".join([line[0].ljust(widths[0]), *(text.rjust(n) for text, n in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    ]
    return "\n".join([texts[0], "─" * len(texts[0]), *texts[1:]])
