"""Self-attention beside recurrence and convolution: Table 1 with numbers put in (Vaswani et al. 2017, §4)."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerKind:
    """One row: what a layer over T vectors of width d costs, and how far apart it leaves two of them."""

    name: str
    complexity: str
    flops: float
    """The term of ``complexity``, multiplications and additions counted, for one text."""
    projections: float
    """What the layer multiplies with matrices beside that term."""
    sequential: float
    """Steps that wait for each other."""
    path: float
    """Steps between the two places farthest apart."""
    path_text: str


def layer_kinds(length: int, width: int, kernel: int = 3, window: int | None = None) -> list[LayerKind]:
    """The four rows of the table for a text of ``length`` and vectors of ``width``."""
    if length < 1 or width < 1 or kernel < 2:
        raise ValueError(f"length={length} and width={width} must be at least 1, kernel={kernel} at least 2")
    t, d, r = float(length), float(width), float(min(window or max(1, length // 8), length))
    return [
        LayerKind("self-attention", "T²·d", 4 * t * t * d, 8 * t * d * d, 1, 1, "1"),
        LayerKind("recurrent", "T·d²", 2 * t * d * d, 2 * t * d * d, t, t, "T"),
        LayerKind("convolutional", "k·T·d²", 2 * kernel * t * d * d, 0.0, 1, max(1.0, math.log(t, kernel)), "logₖ T"),
        LayerKind("self-attention (restricted)", "r·T·d", 4 * r * t * d, 8 * t * d * d, 1, math.ceil(t / r), "T/r"),
    ]
