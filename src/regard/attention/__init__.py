"""The attention family: one door (``attend``), masks and biases as functions of position, maps that are never stored.

Shapes, here and everywhere: B batch, H query heads, G key/value heads, T queries, S keys, D head width, M model width.
Heads are (B, H, T, D). Masks: True = may look.
"""

from . import biases, masks
from .backends import Attended, attend, explain
from .frame import Frame
from .scores import Additive, Concat, Dot, General, Mechanism

__all__ = [
    "Additive",
    "Attended",
    "Concat",
    "Dot",
    "Frame",
    "General",
    "Mechanism",
    "attend",
    "biases",
    "explain",
    "masks",
]
