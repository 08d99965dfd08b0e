"""A scene in words, in English and Korean: one canonical caption each, and which things each of its words speaks of.

The caption is a function of what is to be seen, so a model that looks well can be right every time. Things alike are
counted, the larger group first; of things that differ one is said to stand left of, right of, above, below or inside
the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from .scene import COLOURS, SHAPES, SIZES, Relation, Scene

__all__ = ["Caption", "Language", "caption"]

Language = Literal["en", "ko"]


class Caption(NamedTuple):
    """A caption, and for each word of `text.split()` the numbers of the things it speaks of; `and` has none."""

    text: str
    things: tuple[tuple[int, ...], ...]


_Spoken = list[tuple[str, tuple[int, ...]]]
Group = tuple[tuple[str, str, str], tuple[int, ...]]

_NUMBERS = {1: "a", 2: "two", 3: "three", 4: "four"}
_SIDES = {"left": "left of", "right": "right of", "above": "above", "below": "below", "inside": "inside"}
_KOREAN_SIZES = {"small": "작은", "large": "큰"}
_KOREAN_COLOURS = {
    "red": "빨간", "orange": "주황색", "yellow": "노란", "green": "초록색", "blue": "파란", "purple": "보라색",
    "pink": "분홍색", "black": "검은",
}  # fmt: skip
_KOREAN_SHAPES = {
    "circle": "원", "square": "정사각형", "triangle": "삼각형", "star": "별", "heart": "하트", "diamond": "마름모",
    "cross": "십자가", "ring": "고리",
}  # fmt: skip
_KOREAN_NUMBERS = {1: "한", 2: "두", 3: "세", 4: "네"}
_KOREAN_SIDES = {"left": "왼쪽", "right": "오른쪽", "above": "위", "below": "아래", "inside": "안"}


def caption(scene: Scene, language: Language = "en") -> Caption:
    """The canonical caption of a scene."""
    if language not in ("en", "ko"):
        raise ValueError(f"language={language!r} is not one of en, ko")
    if scene.relations:
        spoken = _related_english(scene) if language == "en" else _related_korean(scene)
    else:
        groups = _groups(scene)
        spoken = _counted_english(groups) if language == "en" else _counted_korean(groups)
    return Caption(" ".join(word for word, _ in spoken), tuple(things for _, things in spoken))


def _groups(scene: Scene) -> list[Group]:
    """Things that look alike, the most numerous first, then in the order of the tables."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for place, thing in enumerate(scene.things):
        found.setdefault(thing.look, []).append(place)

    def order(group: Group) -> tuple[int, int, int, int]:
        (size, colour, shape), members = group
        return -len(members), SIZES.index(size), COLOURS.index(colour), SHAPES.index(shape)

    return sorted(((look, tuple(members)) for look, members in found.items()), key=order)


def _comma(spoken: _Spoken) -> _Spoken:
    word, things = spoken[-1]
    return [*spoken[:-1], (f"{word},", things)]


# ------------------------------------------------------------------------------------------------ English


def _english(group: Group) -> _Spoken:
    """`two small red circles`, every word speaking of all of them."""
    (size, colour, shape), members = group
    ending = "" if len(members) == 1 else "es" if shape == "cross" else "s"
    return [(word, members) for word in (_NUMBERS[len(members)], size, colour, shape + ending)]


def _counted_english(groups: Sequence[Group]) -> _Spoken:
    parts = [_english(group) for group in groups]
    *front, last = parts
    if not front:
        return last
    spoken = [word for part in front[:-1] for word in _comma(part)]
    return [*spoken, *front[-1], ("and", ()), *last]


def _related_english(scene: Scene) -> _Spoken:
    """`a small red circle left of a large blue square and above a large green star`."""
    spoken = _english((scene.things[0].look, (0,)))
    for place, relation in enumerate(scene.relations):
        if place:
            spoken.append(("and", ()))
        between = (0, relation.other)
        spoken += [(word, between) for word in _SIDES[relation.side].split()]
        spoken += _english((scene.things[relation.other].look, (relation.other,)))
    return spoken


# ------------------------------------------------------------------------------------------------ Korean


def _korean(look: tuple[str, str, str], members: tuple[int, ...]) -> _Spoken:
    size, colour, shape = look
    return [(word, members) for word in (_KOREAN_SIZES[size], _KOREAN_COLOURS[colour], _KOREAN_SHAPES[shape])]


def _counted_korean(groups: Sequence[Group]) -> _Spoken:
    """`작은 빨간 원 두 개와 큰 파란 정사각형 한 개`."""
    spoken: _Spoken = []
    for place, (look, members) in enumerate(groups):
        left = len(groups) - place - 1
        counter = "개" + ("" if left == 0 else "와" if left == 1 else ",")
        spoken += [*_korean(look, members), (_KOREAN_NUMBERS[len(members)], members), (counter, members)]
    return spoken


def _related_korean(scene: Scene) -> _Spoken:
    """`큰 파란 정사각형 왼쪽, 큰 초록색 별 위에 있는 작은 빨간 원`."""
    spoken: _Spoken = []
    for relation in scene.relations:
        spoken += _korean(scene.things[relation.other].look, (relation.other,))
        spoken += _side_korean(relation, last=relation is scene.relations[-1])
    return [*spoken, ("있는", ()), *_korean(scene.things[0].look, (0,))]


def _side_korean(relation: Relation, last: bool) -> _Spoken:
    return [(_KOREAN_SIDES[relation.side] + ("에" if last else ","), (0, relation.other))]
