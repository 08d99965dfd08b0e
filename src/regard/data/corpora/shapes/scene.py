"""Drawing lots for a scene: which things there are, and where they stand so that nobody could see it otherwise.

A scene is of one of these kinds, and a look at it tells which: one thing; several of which some are alike (they are
counted); two that differ (one is left of, right of, above, below or inside the other); three that differ (one of them
stands so to the other two). Coordinates are shares of the picture's side, x to the right and y downwards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

from ..corpus import Draws, stable_hash

__all__ = ["COLOURS", "HELD_OUT", "SHAPES", "SIZES", "Box", "Kind", "Relation", "Scene", "Side", "Thing", "draw_scene"]

Kind = Literal["one", "counted", "two", "three"]
Side = Literal["left", "right", "above", "below", "inside"]
Box = tuple[float, float, float, float]
"""x0, y0, x1, y1."""
Look = tuple[str, str, str]
"""Size, colour, shape: what a caption says of a thing."""

SIZES = ("small", "large")
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "black")
SHAPES = ("circle", "square", "triangle", "star", "heart", "diamond", "cross", "ring")
_RADII = {"small": (0.08, 0.095), "large": (0.135, 0.15)}
# Something stands inside only what is wide in the middle, and that one is drawn larger than large.
_HOLLOW = ("circle", "square", "diamond", "triangle")
_HOLLOW_RADIUS = (0.21, 0.235)
# Corners reach a little beyond the radius.
_GAP = 0.03
_STEPS: dict[Side, tuple[float, float]] = {"left": (1, 0), "right": (-1, 0), "above": (0, 1), "below": (0, -1)}
_SIDES: tuple[Side, ...] = ("left", "right", "above", "below")


@dataclass(frozen=True, slots=True)
class Thing:
    """One drawn object: what it is, and how it is drawn."""

    size: str
    colour: str
    shape: str
    x: float
    y: float
    radius: float
    tilt: float
    """Degrees."""
    tone: tuple[int, int, int]
    """What the drawing adds to the colour's red, green and blue."""

    @property
    def look(self) -> Look:
        return (self.size, self.colour, self.shape)


@dataclass(frozen=True, slots=True)
class Relation:
    """The first thing of a scene is on this side of another."""

    side: Side
    other: int


@dataclass(frozen=True, slots=True)
class Scene:
    """What is to be seen: things, the relations of the first to the others, and the paper they are drawn on."""

    kind: Kind
    things: tuple[Thing, ...]
    relations: tuple[Relation, ...]
    paper: tuple[int, int, int]


@cache
def _held_out() -> frozenset[tuple[str, str]]:
    colours = sorted(COLOURS, key=lambda colour: stable_hash("shapes held out", colour))
    return frozenset(zip(colours, SHAPES, strict=True))


HELD_OUT: frozenset[tuple[str, str]] = _held_out()
"""Colour and shape never seen together in training: one colour for each shape, so each word is seen."""


def draw_scene(draws: Draws, held_out: bool) -> Scene:
    """A scene; `held_out` puts one held-out combination into it, and otherwise it has none."""
    kind: Kind = draws.choice(("one", "counted", "counted", "counted", "two", "two", "three", "three", "three"))
    looks = _looks(draws, kind, held_out)
    relations: list[Relation] = []
    if kind in ("one", "counted"):
        things = _scattered(draws, looks)
    elif kind == "two":
        things, relations = _beside(draws, looks)
    else:
        things, relations = _among(draws, looks)
    paper = (232 + draws.below(24), 232 + draws.below(24), 232 + draws.below(24))
    return Scene(kind, tuple(things), tuple(relations), paper)


# ------------------------------------------------------------------------------------------------ what there is


def _looks(draws: Draws, kind: Kind, held_out: bool) -> list[Look]:
    """The look of each thing: all different, unless they are counted."""
    groups = {"one": (1,), "two": (1, 1), "three": (1, 1, 1)}.get(kind)
    if groups is None:
        groups = draws.choice(((2,), (3,), (4,), (2, 1), (3, 1), (2, 2), (2, 1, 1)))
    different: list[Look] = []
    special = draws.below(len(groups)) if held_out else -1
    while len(different) < len(groups):
        look = _look(draws, len(different) == special)
        if look not in different:
            different.append(look)
    return [look for look, count in zip(different, groups, strict=True) for _ in range(count)]


def _look(draws: Draws, held_out: bool) -> Look:
    while True:
        look = (draws.choice(SIZES), draws.choice(COLOURS), draws.choice(SHAPES))
        if (look[1:] in HELD_OUT) == held_out:
            return look


def _thing(draws: Draws, look: Look, x: float, y: float, radius: float) -> Thing:
    tilt = 0.0 if look[2] in ("circle", "ring") else draws.uniform(-10, 10)
    tone = (draws.below(25) - 12, draws.below(25) - 12, draws.below(25) - 12)
    return Thing(*look, x, y, radius, tilt, tone)


def _radius(draws: Draws, look: Look) -> float:
    return draws.uniform(*_RADII[look[0]])


# ------------------------------------------------------------------------------------------------ where it stands


def _scattered(draws: Draws, looks: list[Look]) -> list[Thing]:
    """Anywhere, but apart from each other."""
    while True:
        things: list[Thing] = []
        for look in looks:
            radius = _radius(draws, look)
            for _ in range(30):
                x, y = draws.uniform(radius + 0.02, 0.98 - radius), draws.uniform(radius + 0.02, 0.98 - radius)
                if all(math.hypot(x - t.x, y - t.y) > 1.12 * (radius + t.radius) + _GAP for t in things):
                    things.append(_thing(draws, look, x, y, radius))
                    break
        if len(things) == len(looks):
            return things


def _beside(draws: Draws, looks: list[Look]) -> tuple[list[Thing], list[Relation]]:
    """Two things in line. The smaller one is the subject; of two equals the left or the upper one."""
    looks.sort(key=lambda look: SIZES.index(look[0]))
    subject, other = looks
    if subject[0] != other[0] and other[2] in _HOLLOW and subject[1] != other[1] and draws.chance(0.4):
        outer = _hollow(draws, other, draws.uniform(0.3, 0.7), draws.uniform(0.3, 0.7))
        return [_within(draws, subject, outer), outer], [Relation("inside", 1)]
    side = draws.choice(_SIDES if subject[0] != other[0] else ("left", "above"))
    a, b = _radius(draws, subject), _radius(draws, other)
    distance = draws.uniform(a + b + 0.08, 0.62)
    x, y = _line(draws, side, distance, a, b)
    step = _STEPS[side]
    first = _thing(draws, subject, x, y, a)
    second = _thing(draws, other, x + step[0] * distance, y + step[1] * distance, b)
    return [first, second], [Relation(side, 1)]


def _line(draws: Draws, side: Side, distance: float, a: float, b: float) -> tuple[float, float]:
    """Where the first of two things stands so that both are in the picture."""
    margin = max(a, b) + 0.02
    along = draws.uniform(margin, 1 - margin - distance)
    across = draws.uniform(margin, 1 - margin)
    forward = side in ("left", "above")
    start = along if forward else along + distance
    return (start, across) if side in ("left", "right") else (across, start)


def _among(draws: Draws, looks: list[Look]) -> tuple[list[Thing], list[Relation]]:
    """Three things: one at the corner or in the middle of the others, or inside one of them with the third beside."""
    subject, second, third = looks
    inner = subject[0] == "small" and second[0] == "large" and second[2] in _HOLLOW and subject[1] != second[1]
    if inner and draws.chance(0.6):
        return _nested(draws, subject, second, third)
    sides = sorted(draws.shuffled(_SIDES)[:2], key=_SIDES.index)
    radii = [_radius(draws, look) for look in looks]
    x, y = (0.5 + draws.uniform(-0.02, 0.02) - sum(_STEPS[side][axis] for side in sides) * 0.16 for axis in (0, 1))
    things = [_thing(draws, subject, x, y, radii[0])]
    for side, look, radius in zip(sides, (second, third), radii[1:], strict=True):
        distance = max(radius + radii[0] + 0.02, draws.uniform(0.3, 0.33))
        dx, dy = (_STEPS[side][axis] * distance for axis in (0, 1))
        things.append(_thing(draws, look, x + dx, y + dy, radius))
    return things, [Relation(side, place) for place, side in enumerate(sides, 1)]


def _nested(draws: Draws, subject: Look, second: Look, third: Look) -> tuple[list[Thing], list[Relation]]:
    side = draws.choice(_SIDES)
    radius = _radius(draws, third)
    step = _STEPS[side]
    x, y = (0.5 - step[axis] * 0.2 + draws.uniform(-0.03, 0.03) for axis in (0, 1))
    outer = _hollow(draws, second, x, y)
    reach = outer.radius + radius + draws.uniform(0.03, 0.07)
    beside = _thing(draws, third, x + step[0] * reach, y + step[1] * reach, radius)
    return [_within(draws, subject, outer), outer, beside], [Relation("inside", 1), Relation(side, 2)]


def _hollow(draws: Draws, look: Look, x: float, y: float) -> Thing:
    return _thing(draws, look, x, y, draws.uniform(*_HOLLOW_RADIUS))


def _within(draws: Draws, look: Look, outer: Thing) -> Thing:
    lower = 0.02 if outer.shape == "triangle" else 0.0  # a triangle is widest below its middle
    return _thing(draws, look, outer.x, outer.y + lower, draws.uniform(0.08, 0.085))
