"""`shapes`: drawn scenes with English and Korean captions and the true place of every thing, without end."""

from __future__ import annotations

from .captions import Caption, caption
from .corpus import Picture, Shapes
from .drawing import box_of, draw
from .scene import COLOURS, HELD_OUT, SHAPES, SIZES, Relation, Scene, Thing

__all__ = [
    "COLOURS",
    "HELD_OUT",
    "SHAPES",
    "SIZES",
    "Caption",
    "Picture",
    "Relation",
    "Scene",
    "Shapes",
    "Thing",
    "box_of",
    "caption",
    "draw",
]
