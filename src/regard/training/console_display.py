"""A run on the terminal: formatting of numbers and text, and the live progress line."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TextIO, get_args

from ..foundation.language import localise

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.console import ConsoleOptions, RenderResult
    from rich.live import Live
    from rich.text import Text

JOINER = "\u200d"
GAP = "  "
_PICTURES = {chr(code): chr(0x2400 + code) for code in range(0x20)} | {"\n": "⏎", "\x7f": "␡"}
Style = Literal["auto", "live", "plain", "json", "quiet", "records", "off"]
STYLES = get_args(Style)


def format_count(value: float) -> str:
    """812, 12.3k, 4.56M."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size * 0.99995:
            scaled = value / size
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f}{unit}"
    return f"{value:.0f}"


def format_duration(seconds: float) -> str:
    """0:07, 12:34, 3:04:05, 2 d 3:04:05."""
    whole = max(0, round(seconds))
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    clock = f"{hours}:{minutes:02}:{whole % 60:02}" if hours or days else f"{minutes}:{whole % 60:02}"
    return f"{days} d {clock}" if days else clock


def format_value(value: Any) -> str:
    """A metric or a fact with few digits; other values as printable text."""
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
        return ", ".join(format_value(item) for item in value)
    if isinstance(value, dict):
        return GAP.join(f"{key} {format_value(item)}" for key, item in value.items())
    return printable(str(value))


def printable(text: str) -> str:
    """One line without terminal control: control characters as Unicode symbols, direction overrides as dots."""

    def visible(character: str) -> str:
        code, kind = ord(character), unicodedata.category(character)
        if character in _PICTURES:
            return _PICTURES[character]
        if kind == "Cs":
            return "\ufffd"
        is_direction = 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069
        return "·" if is_direction or kind in ("Cc", "Zl", "Zp") else character

    return "".join(map(visible, text))


def text_width(text: str) -> int:
    """The number of columns a text takes on a terminal."""
    from rich.cells import cell_len  # imported here, because not every command prints

    return cell_len(text)


def clip_to_width(text: str, width: int) -> str:
    """The text in at most ``width`` columns: cut before a whole character, with … in place of the rest."""
    if text_width(text) <= width:
        return text
    end = 0
    for i in range(1, len(text)):
        # A character of width 0, or after a joiner, belongs to the character before it.
        if text_width(text[i]) == 0 or text[i - 1] == JOINER:
            continue
        if text_width(text[:i]) > width - 1:
            break
        end = i
    return text[:end] + "…" if width > 0 else ""


def pad_to_width(text: str, width: int) -> str:
    """The text padded with spaces to ``width`` columns."""
    return text + " " * (width - text_width(text))


def format_pairs(values: dict[str, Any], width: int) -> list[str]:
    """One line per name and value, with the values aligned."""
    names = [localise(printable(str(name)).replace("_", " ")) for name in values]
    widest = max(map(text_width, names), default=0)
    room = width - widest - 2 * len(GAP)
    return [
        f"{GAP}{pad_to_width(name, widest)}{GAP}{clip_to_width(format_value(value), room)}"
        for name, value in zip(names, values.values(), strict=True)
    ]


def format_rows(rows: Sequence[dict[str, Any]], width: int) -> list[str]:
    """Rows as a table if every row fits on a line, else each value on its own line."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[format_value(row[name]) if name in row else "" for name in names] for row in rows]
    lines = [[printable(name) for name in names], *cells]
    widths = [max(map(text_width, column)) for column in zip(*lines, strict=True)]
    if sum(widths) + len(GAP) * len(names) <= width:
        return [(GAP + GAP.join(map(pad_to_width, line, widths))).rstrip() for line in lines]
    return [line for row in rows for line in (*format_pairs(row, width), "")][:-1]


@dataclass
class RunStatus:
    """The numbers in the progress line of a run."""

    steps: int
    step: int = 0
    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    memory_mib: float | None = None
    left_s: float | None = None
    doing: str = ""

    def fields(self) -> dict[str, tuple[str, str]]:
        """The values that are known, as (label, formatted value)."""
        values = ((name, getattr(self, name)) for name in _STATUS_FIELDS)
        known = {name: value for name, value in values if value is not None}
        return {name: (_STATUS_FIELDS[name][0], _STATUS_FIELDS[name][1](value)) for name, value in known.items()}


_STATUS_FIELDS: dict[str, tuple[str, Callable[[float], str]]] = {
    "loss": ("loss", "{:.4f}".format),
    "lr": ("lr", "{:.2e}".format),
    "grad_norm": ("grad", "{:.3g}".format),
    "tokens_per_s": ("", lambda speed: f"{format_count(speed)} tok/s"),
    "mfu": ("MFU", "{:.1%}".format),
    "memory_mib": ("", lambda mib: f"{mib:.0f} MiB" if mib < 10000 else f"{mib / 1024:.1f} GiB"),
    "left_s": ("ETA", format_duration),
}


class Console:
    """Plain lines for logs and pipes; without a file nothing is printed."""

    width = 120

    def __init__(self, status: RunStatus, file: TextIO | None) -> None:
        self.status, self._file = status, file

    def say(self, text: str, style: str = "") -> None:
        """Print a line in the user's language."""
        self.show(localise(text), style)

    def show(self, text: str, style: str = "") -> None:
        """Print a line as it is, such as a sample."""
        if self._file is not None:
            self._file.write(f"{text}\n")
            self._file.flush()

    def show_all(self, lines: Iterable[str]) -> None:
        for text in lines:
            self.show(text)

    def say_at(self, step: int, text: str, style: str = "") -> None:
        """Print a line that begins with a step."""
        steps = f"{self.status.steps:,}"
        self.show(f"step {step:>{len(steps)},}/{steps}{GAP}{localise(text)}", style)

    def line(self) -> None:
        """Show the numbers of ``status``."""
        fields = self.status.fields().values()
        self.say_at(self.status.step, GAP.join(f"{label} {value}".strip() for label, value in fields))

    def report_checkpoint(self, step: int, path: str) -> None:
        self.say_at(step, f"saved {path}", "dim")

    def close(self) -> None:
        """Leave the terminal as it was."""


class LiveLine(Console):
    """A terminal with a live progress line at the bottom and permanent lines above it."""

    def __init__(self, status: RunStatus, file: TextIO, force: bool) -> None:
        super().__init__(status, file)
        from rich.console import Console as RichConsole

        self._console: RichConsole = RichConsole(
            file=file, force_terminal=True if force else None, highlight=False, markup=False, emoji=False
        )
        self._live: Live | None = None
        self._saved = ""

    @property
    def width(self) -> int:  # type: ignore[override]  # a terminal can be resized
        return self._console.width

    def show(self, text: str, style: str = "") -> None:
        from rich.text import Text

        self._console.print(Text(text, style=style), soft_wrap=True)

    def report_checkpoint(self, step: int, path: str) -> None:
        """Print only the last checkpoint, at the end: a line for each would push the rest off the screen."""
        self._saved = f"saved {path}"

    def line(self) -> None:
        """Start the live line when the first numbers arrive."""
        if self._live is None:
            from rich.live import Live

            # stdout is not redirected: it may be a file. Other output to stderr (warnings) appears above the line.
            self._live = Live(self, console=self._console, refresh_per_second=5, transient=True, redirect_stdout=False)
            self._live.start()
            self._console.show_cursor(True)  # a process that is killed could not show it again

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._saved:
            self.say(self._saved, "dim")
            self._saved = ""

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        yield self.render(options.max_width, options.encoding.startswith("utf"))

    def render(self, width: int, unicode: bool = True) -> Text:
        """The live line in at most ``width`` columns; the least important fields are dropped first."""
        from rich.text import Text

        fields = self.status.fields()
        fields.pop("grad_norm", None)
        doing = f"{GAP}{localise(self.status.doing)}" if self.status.doing else ""
        steps = f"{self.status.step:,}/{self.status.steps:,}"
        used = 0
        for name in ("", "memory_mib", "lr", "mfu", "tokens_per_s", "left_s"):
            fields.pop(name, None)
            used = len(steps) + text_width(doing) + sum(len(f"{a} {b}".strip()) + len(GAP) for a, b in fields.values())
            if used + len(GAP) + 10 <= width:
                break
        text = Text(no_wrap=True, overflow="crop", end="")
        if (room := min(30, width - used - len(GAP))) >= 5:
            done = min(1.0, self.status.step / max(1, self.status.steps))
            full = int(room * done)
            text.append(("━" if unicode else "=") * full, "green")
            text.append(("─" if unicode else "-") * (room - full), "dim").append(GAP)
        text.append(steps, "bold")
        for label, value in fields.values():
            text.append(GAP).append(f"{label} " if label else "", "dim").append(value)
        return text.append(doing, "yellow")


class SafeStream:
    """A stream that ignores write errors: a closed pipe or a lost terminal must not end a run."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def make_console(style: Style, status: RunStatus) -> Console:
    """``auto``: live if stderr is a terminal that can move its cursor, else plain. ``json``: plain."""
    if style not in STYLES:
        raise ValueError(f"style={style!r} is not one of {', '.join(STYLES)}")
    if style in ("quiet", "records", "off"):
        return Console(status, None)
    is_capable = sys.stderr.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")
    file: Any = SafeStream(sys.stderr)
    if style == "live" or (style == "auto" and is_capable):
        return LiveLine(status, file, force=not is_capable)
    return Console(status, file)
