"""Results in a notebook: tables with bars, heat maps and figures as HTML without scripts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from io import StringIO
from typing import Any

from torch import Tensor

_MAX_ROWS, _MAX_COLS = 64, 96
_CELL = "padding:1px 6px;border:0;text-align:{side};font:12px ui-monospace,monospace;white-space:nowrap"
_BLUE, _RED = "22,104,220", "212,56,13"


def table_html(headers: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    """A table; floats are printed with their sign over a bar of their size, blue if positive and red if negative."""
    shown = [list(row) for row in rows][:_MAX_ROWS]
    sizes = [abs(cell) for row in shown for cell in row if isinstance(cell, float) and not math.isnan(cell)]
    largest = max(sizes, default=0.0) or 1.0
    body = "".join(f"<tr>{''.join(_cell_html(cell, largest) for cell in row)}</tr>" for row in shown)
    head = "".join(f'<th style="{_CELL.format(side="left")}">{escape(name)}</th>' for name in headers)
    return f"<table>{_caption_html(caption)}<tr>{head}</tr>{body}</table>"


def _cell_html(cell: object, largest: float) -> str:
    if not isinstance(cell, float) or math.isnan(cell):
        return f'<td style="{_CELL.format(side="left")}">{escape(str(cell))}</td>'
    share, colour = 100 * abs(cell) / largest, _BLUE if cell >= 0 else _RED
    bar = f"background:linear-gradient(90deg,rgba({colour},.25) {share:.0f}%,transparent {share:.0f}%)"
    return f'<td style="{_CELL.format(side="right")};min-width:90px;{bar}">{cell:+.3f}</td>'


def heatmap_html(values: Tensor, rows: Sequence[str], cols: Sequence[str], caption: str = "") -> str:
    """Numbers (rows, cols) as shades, blue above 0 and red below; a cell's tooltip shows its value."""
    x = values.detach().float().cpu()[:_MAX_ROWS, :_MAX_COLS].nan_to_num(0.0)
    largest = float(x.abs().max()) or 1.0
    lines = []
    for name, row in zip(rows, x.tolist(), strict=False):
        cells = "".join(
            f'<td title="{escape(f"{name}, {col}: {value:.4g}")}" style="width:14px;height:14px;padding:0;border:0;'
            f'background:rgba({_BLUE if value >= 0 else _RED},{abs(value) / largest:.2f})"></td>'
            for col, value in zip(cols, row, strict=False)
        )
        lines.append(f'<tr><th style="{_CELL.format(side="right")}">{escape(name)}</th>{cells}</tr>')
    return f'<table style="border-collapse:collapse">{_caption_html(caption)}{"".join(lines)}</table>'


def _caption_html(caption: str) -> str:
    return f'<caption style="text-align:left">{escape(caption)}</caption>' if caption else ""


def figure_html(figure: Any) -> str:
    """A matplotlib figure as inline SVG."""
    out = StringIO()
    figure.savefig(out, format="svg", facecolor="white")
    svg = out.getvalue()
    return svg[svg.index("<svg") :]
