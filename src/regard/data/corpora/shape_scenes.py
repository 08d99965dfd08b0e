"""Scenes of shapes: the things in them, their positions, and their pixels.

A scene has one thing; or several with equal ones among them, which are counted; or two different ones, of which one is
left of, right of, above, below or inside the other; or three different ones, of which one is so related to both others.
Coordinates are fractions of the image's side, x to the right and y downwards. Images are drawn at four times the size
and averaged down for anti-aliasing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Literal

from ..hashing import Draws, stable_hash

if TYPE_CHECKING:
    from PIL.Image import Image

Kind = Literal["one", "counted", "two", "three"]
Side = Literal["left", "right", "above", "below", "inside"]
Box = tuple[float, float, float, float]  # x0, y0, x1, y1
Traits = tuple[str, str, str]  # size, colour, shape: what a caption says about a thing

SIZES = ("small", "large")
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "black")
SHAPES = ("circle", "square", "triangle", "star", "heart", "diamond", "cross", "ring")
_RADII = {"small": (0.08, 0.095), "large": (0.135, 0.15)}
# Only shapes that are wide in the middle can contain a thing; a container is drawn larger than "large".
_CONTAINERS = ("circle", "square", "diamond", "triangle")
_CONTAINER_RADIUS = (0.21, 0.235)
_GAP = 0.03  # minimum distance between things, since corners extend a little beyond the radius
_STEPS: dict[Side, tuple[float, float]] = {"left": (1, 0), "right": (-1, 0), "above": (0, 1), "below": (0, -1)}
_SIDES: tuple[Side, ...] = ("left", "right", "above", "below")


@dataclass(frozen=True, slots=True)
class Thing:
    """One drawn object: its traits, its position, and how it is drawn."""

    size: str
    colour: str
    shape: str
    x: float
    y: float
    radius: float
    tilt: float  # degrees
    tone: tuple[int, int, int]  # added to the colour's red, green and blue

    @property
    def traits(self) -> Traits:
        return (self.size, self.colour, self.shape)


@dataclass(frozen=True, slots=True)
class Relation:
    """The first thing of a scene is on ``side`` of the thing with index ``other``."""

    side: Side
    other: int


@dataclass(frozen=True, slots=True)
class Scene:
    """Things, the relations of the first to the others, and the colour of the background."""

    kind: Kind
    things: tuple[Thing, ...]
    relations: tuple[Relation, ...]
    paper: tuple[int, int, int]


# Combinations of colour and shape that never occur in training: one colour per shape, so that every word does occur.
HELD_OUT: frozenset[tuple[str, str]] = frozenset(
    zip(sorted(COLOURS, key=lambda colour: stable_hash("shapes held out", colour)), SHAPES, strict=True)
)


def draw_scene(draws: Draws, held_out: bool) -> Scene:
    """Draw a random scene, with exactly one held-out combination if `held_out`, else with none."""
    kind: Kind = draws.choice(("one", "counted", "counted", "counted", "two", "two", "three", "three", "three"))
    all_traits = _draw_all_traits(draws, kind, held_out)
    place = {"two": _place_two, "three": _place_three}.get(kind, _scatter)
    things, relations = place(draws, all_traits)
    paper = (232 + draws.below(24), 232 + draws.below(24), 232 + draws.below(24))
    return Scene(kind, tuple(things), tuple(relations), paper)


def _draw_all_traits(draws: Draws, kind: Kind, held_out: bool) -> list[Traits]:
    """Draw the traits of each thing: all different, except in a scene of kind "counted"."""
    groups = {"one": (1,), "two": (1, 1), "three": (1, 1, 1)}.get(kind)
    if groups is None:
        groups = draws.choice(((2,), (3,), (4,), (2, 1), (3, 1), (2, 2), (2, 1, 1)))
    different: list[Traits] = []
    special = draws.below(len(groups)) if held_out else -1
    while len(different) < len(groups):
        traits = (draws.choice(SIZES), draws.choice(COLOURS), draws.choice(SHAPES))
        if (traits[1:] in HELD_OUT) == (len(different) == special) and traits not in different:
            different.append(traits)
    return [traits for traits, count in zip(different, groups, strict=True) for _ in range(count)]


def _draw_thing(draws: Draws, traits: Traits, x: float, y: float, radius: float) -> Thing:
    tilt = 0.0 if traits[2] in ("circle", "ring") else draws.uniform(-10, 10)
    tone = (draws.below(25) - 12, draws.below(25) - 12, draws.below(25) - 12)
    return Thing(*traits, x, y, radius, tilt, tone)


def _scatter(draws: Draws, all_traits: list[Traits]) -> tuple[list[Thing], list[Relation]]:
    """Place things anywhere without overlap."""
    while True:
        things: list[Thing] = []
        for traits in all_traits:
            radius = draws.uniform(*_RADII[traits[0]])
            for _ in range(30):
                x, y = draws.uniform(radius + 0.02, 0.98 - radius), draws.uniform(radius + 0.02, 0.98 - radius)
                if all(math.hypot(x - t.x, y - t.y) > 1.12 * (radius + t.radius) + _GAP for t in things):
                    things.append(_draw_thing(draws, traits, x, y, radius))
                    break
        if len(things) == len(all_traits):
            return things, []


def _place_two(draws: Draws, all_traits: list[Traits]) -> tuple[list[Thing], list[Relation]]:
    """Place two things in a row or column. The smaller one is the subject; of equal sizes, the left or upper one."""
    subject, other = sorted(all_traits, key=lambda traits: SIZES.index(traits[0]))
    if subject[0] != other[0] and other[2] in _CONTAINERS and subject[1] != other[1] and draws.chance(0.4):
        outer = _container(draws, other, draws.uniform(0.3, 0.7), draws.uniform(0.3, 0.7))
        return [_thing_inside(draws, subject, outer), outer], [Relation("inside", 1)]
    side: Side = draws.choice(_SIDES if subject[0] != other[0] else ("left", "above"))
    a, b = draws.uniform(*_RADII[subject[0]]), draws.uniform(*_RADII[other[0]])
    distance = draws.uniform(a + b + 0.08, 0.62)
    margin = max(a, b) + 0.02
    along, across = draws.uniform(margin, 1 - margin - distance), draws.uniform(margin, 1 - margin)
    start = along if side in ("left", "above") else along + distance
    x, y = (start, across) if side in ("left", "right") else (across, start)
    step = _STEPS[side]
    first = _draw_thing(draws, subject, x, y, a)
    second = _draw_thing(draws, other, x + step[0] * distance, y + step[1] * distance, b)
    return [first, second], [Relation(side, 1)]


def _place_three(draws: Draws, all_traits: list[Traits]) -> tuple[list[Thing], list[Relation]]:
    """Place three things: the subject at the corner or in the middle of the others, or inside one of them, with the
    third beside that one."""
    subject, second, third = all_traits
    inner = subject[0] == "small" and second[0] == "large" and second[2] in _CONTAINERS and subject[1] != second[1]
    if inner and draws.chance(0.6):
        side = draws.choice(_SIDES)
        radius = draws.uniform(*_RADII[third[0]])
        step = _STEPS[side]
        x, y = (0.5 - step[axis] * 0.2 + draws.uniform(-0.03, 0.03) for axis in (0, 1))
        outer = _container(draws, second, x, y)
        reach = outer.radius + radius + draws.uniform(0.03, 0.07)
        beside = _draw_thing(draws, third, x + step[0] * reach, y + step[1] * reach, radius)
        return [_thing_inside(draws, subject, outer), outer, beside], [Relation("inside", 1), Relation(side, 2)]
    sides = sorted(draws.shuffle(_SIDES)[:2], key=_SIDES.index)
    radii = [draws.uniform(*_RADII[traits[0]]) for traits in all_traits]
    x, y = (0.5 + draws.uniform(-0.02, 0.02) - sum(_STEPS[side][axis] for side in sides) * 0.16 for axis in (0, 1))
    things = [_draw_thing(draws, subject, x, y, radii[0])]
    for side, traits, radius in zip(sides, (second, third), radii[1:], strict=True):
        distance = max(radius + radii[0] + 0.02, draws.uniform(0.3, 0.33))
        dx, dy = (_STEPS[side][axis] * distance for axis in (0, 1))
        things.append(_draw_thing(draws, traits, x + dx, y + dy, radius))
    return things, [Relation(side, other) for other, side in enumerate(sides, 1)]


def _container(draws: Draws, traits: Traits, x: float, y: float) -> Thing:
    return _draw_thing(draws, traits, x, y, draws.uniform(*_CONTAINER_RADIUS))


def _thing_inside(draws: Draws, traits: Traits, outer: Thing) -> Thing:
    lower = 0.02 if outer.shape == "triangle" else 0.0  # a triangle is widest below its middle
    return _draw_thing(draws, traits, outer.x, outer.y + lower, draws.uniform(0.08, 0.085))


_RGB = {
    "red": (214, 39, 40), "orange": (245, 130, 25), "yellow": (238, 205, 30), "green": (40, 150, 60),
    "blue": (35, 95, 215), "purple": (125, 50, 170), "pink": (245, 130, 185), "black": (28, 28, 32),
}  # fmt: skip
_SCALE = 4
_RING_HOLE = 0.55


def draw(scene: Scene, size: int = 64) -> Image:
    """The scene as an RGB image of size × size pixels."""
    from PIL import Image, ImageDraw

    big = size * _SCALE
    image = Image.new("RGB", (big, big), scene.paper)
    pen = ImageDraw.Draw(image)
    # Larger things first, so that a container does not cover its content.
    for thing in sorted(scene.things, key=lambda t: -t.radius):
        inks = zip(_RGB[thing.colour], thing.tone, strict=True)
        colour = tuple(max(0, min(255, ink + tone)) for ink, tone in inks)
        if thing.shape in ("circle", "ring"):
            hole = ((_RING_HOLE, scene.paper),) if thing.shape == "ring" else ()
            for share, fill in ((1.0, colour), *hole):
                x0, y0, x1, y1 = box_of(replace(thing, radius=thing.radius * share))
                pen.ellipse((x0 * big, y0 * big, x1 * big - 1, y1 * big - 1), fill=fill)
        else:
            pen.polygon([(x * big, y * big) for x, y in _placed_outline(thing)], fill=colour)
    return image.reduce(_SCALE)


def box_of(thing: Thing) -> Box:
    """The bounding box of a thing, in fractions of the image's side."""
    if thing.shape in ("circle", "ring"):
        return (thing.x - thing.radius, thing.y - thing.radius, thing.x + thing.radius, thing.y + thing.radius)
    xs, ys = zip(*_placed_outline(thing), strict=True)
    return (min(xs), min(ys), max(xs), max(ys))


def _placed_outline(thing: Thing) -> list[tuple[float, float]]:
    """The outline of a thing in the image: rotated, scaled and translated."""
    cos, sin = math.cos(math.radians(thing.tilt)) * thing.radius, math.sin(math.radians(thing.tilt)) * thing.radius
    return [(thing.x + x * cos - y * sin, thing.y + x * sin + y * cos) for x, y in outline(thing.shape)]


@cache
def outline(shape: str) -> tuple[tuple[float, float], ...]:
    """The vertices of a polygonal shape, roughly within the unit circle."""
    match shape:
        case "square":
            return ((-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8))
        case "triangle":
            return tuple((1.1 * math.sin(turn), 0.15 - 1.1 * math.cos(turn)) for turn in _angles(3))
        case "diamond":
            return ((0.0, -1.1), (0.75, 0.0), (0.0, 1.1), (-0.75, 0.0))
        case "star":
            corners = zip((1.1, 0.46) * 5, _angles(10), strict=True)
            return tuple((r * math.sin(turn), 0.05 - r * math.cos(turn)) for r, turn in corners)
        case "cross":
            a, b = 0.34, 1.0
            points = [(-a, -b), (a, -b), (a, -a)]
            for _ in range(3):  # the same three corners, a quarter turn further
                points += [(-y, x) for x, y in points[-3:]]
            return tuple(points)
        case "heart":
            # x = 16 sin³ t, y = 13 cos t − 5 cos 2t − 2 cos 3t − cos 4t, turned upright and rescaled.
            xs = [16 * math.sin(t) ** 3 for t in _angles(36)]
            ys = [13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t) for t in _angles(36)]
            return tuple((x / 16, (-y - 2.5) / 15) for x, y in zip(xs, ys, strict=True))
    raise ValueError(f"shape={shape!r} has no outline of corners")


def _angles(n: int) -> list[float]:
    return [2 * math.pi * corner / n for corner in range(n)]
