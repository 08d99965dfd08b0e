"""A scene as pixels: outlines drawn four times too large and averaged down, which is anti-aliasing."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

from .scene import Box, Scene, Thing

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["INK", "box_of", "draw", "outline"]

INK = {
    "red": (214, 39, 40),
    "orange": (245, 130, 25),
    "yellow": (238, 205, 30),
    "green": (40, 150, 60),
    "blue": (35, 95, 215),
    "purple": (125, 50, 170),
    "pink": (245, 130, 185),
    "black": (28, 28, 32),
}
_SCALE = 4
_HOLE = 0.55
Points = tuple[tuple[float, float], ...]


def draw(scene: Scene, size: int = 64) -> Image:
    """The scene as an RGB image of size × size pixels."""
    from PIL import Image, ImageDraw

    big = size * _SCALE
    image = Image.new("RGB", (big, big), scene.paper)
    pen = ImageDraw.Draw(image)
    # What contains another thing is drawn before it.
    for thing in sorted(scene.things, key=lambda t: -t.radius):
        red, green, blue = (
            max(0, min(255, ink + tone)) for ink, tone in zip(INK[thing.colour], thing.tone, strict=True)
        )
        if thing.shape in ("circle", "ring"):
            pen.ellipse(_disc(thing, 1.0, big), fill=(red, green, blue))
            if thing.shape == "ring":
                pen.ellipse(_disc(thing, _HOLE, big), fill=scene.paper)
        else:
            pen.polygon([(x * big, y * big) for x, y in _placed(thing)], fill=(red, green, blue))
    return image.reduce(_SCALE)


def box_of(thing: Thing) -> Box:
    """The smallest box around a thing, in shares of the picture's side."""
    if thing.shape in ("circle", "ring"):
        return (thing.x - thing.radius, thing.y - thing.radius, thing.x + thing.radius, thing.y + thing.radius)
    points = _placed(thing)
    xs, ys = [x for x, _ in points], [y for _, y in points]
    return (min(xs), min(ys), max(xs), max(ys))


def _disc(thing: Thing, share: float, big: int) -> Box:
    radius = thing.radius * share
    return (
        (thing.x - radius) * big,
        (thing.y - radius) * big,
        (thing.x + radius) * big - 1,
        (thing.y + radius) * big - 1,
    )


def _placed(thing: Thing) -> list[tuple[float, float]]:
    """The outline where it stands: turned, scaled and moved."""
    cos, sin = math.cos(math.radians(thing.tilt)) * thing.radius, math.sin(math.radians(thing.tilt)) * thing.radius
    return [(thing.x + x * cos - y * sin, thing.y + x * sin + y * cos) for x, y in outline(thing.shape)]


@cache
def outline(shape: str) -> Points:
    """The outline of a shape with corners, within the circle of radius 1 around 0."""
    match shape:
        case "square":
            return ((-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8))
        case "triangle":
            return tuple((1.1 * math.sin(turn), 0.15 - 1.1 * math.cos(turn)) for turn in _turns(3))
        case "diamond":
            return ((0.0, -1.1), (0.75, 0.0), (0.0, 1.1), (-0.75, 0.0))
        case "star":
            radii = [1.1 if corner % 2 == 0 else 0.46 for corner in range(10)]
            return tuple(
                (r * math.sin(turn), 0.05 - r * math.cos(turn)) for r, turn in zip(radii, _turns(10), strict=True)
            )
        case "cross":
            a, b = 0.34, 1.0
            quarter = ((-a, -b), (a, -b), (a, -a))
            return tuple(_turned(point, corner) for corner in range(4) for point in quarter)
        case "heart":
            return tuple(_heart(turn) for turn in _turns(36))
    raise ValueError(f"shape={shape!r} has no outline of corners")


def _turns(n: int) -> list[float]:
    return [2 * math.pi * corner / n for corner in range(n)]


def _turned(point: tuple[float, float], quarters: int) -> tuple[float, float]:
    x, y = point
    for _ in range(quarters):
        x, y = -y, x
    return x, y


def _heart(turn: float) -> tuple[float, float]:
    """x = 16 sin³ t, y = 13 cos t − 5 cos 2t − 2 cos 3t − cos 4t, turned upright and brought to size."""
    x = 16 * math.sin(turn) ** 3
    y = 13 * math.cos(turn) - 5 * math.cos(2 * turn) - 2 * math.cos(3 * turn) - math.cos(4 * turn)
    return x / 16, (-y - 2.5) / 15
