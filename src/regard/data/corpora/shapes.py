"""The corpus `shapes`: drawn scenes with captions, the true box of every thing, and the things each word refers to.

Each scene has one canonical caption in English and one in Korean. The caption is a function of the visible scene, so a
perfect model can be right every time. Equal things are counted, the largest group first; of different things, the
first is left of, right of, above, below or inside the others.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import count
from typing import TYPE_CHECKING, Literal, NamedTuple

from ..hashing import Draws, stable_hash
from . import check_index
from .shape_scenes import COLOURS, SHAPES, SIZES, Box, Scene, Traits, box_of, draw, draw_scene

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

Language = Literal["en", "ko"]


class Caption(NamedTuple):
    """A caption, and for each word of `text.split()` the indices of the things it refers to; `and` has none."""

    text: str
    things: tuple[tuple[int, ...], ...]


# Words with the indices of the things they refer to; traits with the indices of the things that have them.
_GroundedWords = list[tuple[str, tuple[int, ...]]]
_Group = tuple[Traits, tuple[int, ...]]

_NUMBERS = {1: "a", 2: "two", 3: "three", 4: "four"}
_RELATIONS = {"left": "left of", "right": "right of", "above": "above", "below": "below", "inside": "inside"}
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
_KOREAN_RELATIONS = {"left": "왼쪽", "right": "오른쪽", "above": "위", "below": "아래", "inside": "안"}


def caption(scene: Scene, language: Language = "en") -> Caption:
    """The canonical caption of a scene."""
    _check_language(language)
    if language == "en":
        words = _related_english(scene) if scene.relations else _counted_english(_groups(scene))
    else:
        words = _related_korean(scene) if scene.relations else _counted_korean(_groups(scene))
    return Caption(" ".join(word for word, _ in words), tuple(things for _, things in words))


def _check_language(language: str) -> None:
    if language not in ("en", "ko"):
        raise ValueError(f"language={language!r} is not one of en, ko")


def _groups(scene: Scene) -> list[_Group]:
    """Groups of things with the same traits, the largest first, then in the order of the tables."""
    groups: dict[Traits, tuple[int, ...]] = {}
    for index, thing in enumerate(scene.things):
        groups[thing.traits] = (*groups.get(thing.traits, ()), index)

    def order(group: _Group) -> tuple[int, int, int, int]:
        (size, colour, shape), members = group
        return -len(members), SIZES.index(size), COLOURS.index(colour), SHAPES.index(shape)

    return sorted(groups.items(), key=order)


def _english(traits: Traits, members: tuple[int, ...]) -> _GroundedWords:
    """`two small red circles`; every word refers to all of them."""
    size, colour, shape = traits
    plural = "" if len(members) == 1 else "es" if shape == "cross" else "s"
    return [(word, members) for word in (_NUMBERS[len(members)], size, colour, shape + plural)]


def _counted_english(groups: list[_Group]) -> _GroundedWords:
    """`two small red circles, a large blue square and a large green star`."""
    words: _GroundedWords = []
    for n, group in enumerate(groups, 1):
        words += [("and", ())] if 1 < n == len(groups) else []
        words += _english(*group)
        if n < len(groups) - 1:
            words[-1] = (f"{words[-1][0]},", words[-1][1])
    return words


def _related_english(scene: Scene) -> _GroundedWords:
    """`a small red circle left of a large blue square and above a large green star`."""
    words = _english(scene.things[0].traits, (0,))
    for number, relation in enumerate(scene.relations):
        words += [("and", ())] if number else []
        words += [(word, (0, relation.other)) for word in _RELATIONS[relation.side].split()]
        words += _english(scene.things[relation.other].traits, (relation.other,))
    return words


def _korean(traits: Traits, members: tuple[int, ...]) -> _GroundedWords:
    size, colour, shape = traits
    return [(word, members) for word in (_KOREAN_SIZES[size], _KOREAN_COLOURS[colour], _KOREAN_SHAPES[shape])]


def _counted_korean(groups: list[_Group]) -> _GroundedWords:
    """`작은 빨간 원 두 개와 큰 파란 정사각형 한 개`."""
    words: _GroundedWords = []
    for remaining, (traits, members) in zip(range(len(groups) - 1, -1, -1), groups, strict=True):
        counter = "개" + ("" if remaining == 0 else "와" if remaining == 1 else ",")
        words += [*_korean(traits, members), (_KOREAN_NUMBERS[len(members)], members), (counter, members)]
    return words


def _related_korean(scene: Scene) -> _GroundedWords:
    """`큰 파란 정사각형 왼쪽, 큰 초록색 별 위에 있는 작은 빨간 원`."""
    words: _GroundedWords = []
    for relation in scene.relations:
        ending = "에" if relation is scene.relations[-1] else ","
        words += _korean(scene.things[relation.other].traits, (relation.other,))
        words.append((_KOREAN_RELATIONS[relation.side] + ending, (0, relation.other)))
    return [*words, ("있는", ()), *_korean(scene.things[0].traits, (0,))]


_EDITION = 1  # part of every random key; increase it when a change gives an index another example
_VALID_SHARE = 12  # one composition in this many is held out for `valid`


@dataclass(frozen=True, slots=True, repr=False)
class CaptionedScene:
    """A scene and its captions; its pixels are drawn on access."""

    scene: Scene
    english: Caption
    korean: Caption
    language: Language = "en"
    size: int = 64

    def __repr__(self) -> str:
        # Corpus fingerprints hash this text, so it keeps the name the class had when the first ones were recorded.
        return "Picture(" + ", ".join(f"{x.name}={getattr(self, x.name)!r}" for x in fields(self)) + ")"

    @property
    def words(self) -> Caption:
        """The caption in the corpus's language, with the things each of its words refers to."""
        return self.english if self.language == "en" else self.korean

    @property
    def caption(self) -> str:
        """The text of the caption in the corpus's language."""
        return self.words.text

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The box of every thing in pixels: x0, y0, x1, y1, with the origin at the upper left corner."""
        boxes, n = map(box_of, self.scene.things), self.size
        return tuple((x0 * n, y0 * n, x1 * n, y1 * n) for x0, y0, x1, y1 in boxes)

    @property
    def image(self) -> NDArray[np.uint8]:
        """The pixels (size, size, 3)."""
        import numpy as np

        return np.asarray(self.pillow())

    def pillow(self, size: int | None = None) -> Image:
        """The scene as a Pillow image of any size."""
        return draw(self.scene, size or self.size)


class Shapes:
    """Scenes of one to four things with captions.

    `train` has no held-out colour–shape combination (`HELD_OUT`) and no composition held out for `valid`, which is
    chosen by a hash of the things regardless of their positions. Each scene of `combinations` has one thing with a
    held-out combination.
    """

    name = "shapes"
    splits = ("train", "valid", "combinations")

    def __init__(self, language: Language = "en", size: int = 64) -> None:
        _check_language(language)
        if size < 16:
            raise ValueError(f"size={size} is too small to tell the shapes apart; it must be at least 16")
        self.language: Language = language
        self.pixels = size

    def size(self, split: str) -> int | None:
        """None: the splits are endless."""
        return None

    def example(self, split: str, index: int) -> CaptionedScene:
        check_index(self, split, index)
        keys = (Draws(self.name, _EDITION, split, index, attempt) for attempt in count())
        scenes = (draw_scene(draws, held_out=split == "combinations") for draws in keys)
        scene = next(x for x in scenes if split == "combinations" or is_held_out_for_valid(x) == (split == "valid"))
        return CaptionedScene(scene, caption(scene, "en"), caption(scene, "ko"), self.language, self.pixels)


def is_held_out_for_valid(scene: Scene) -> bool:
    """Whether the composition of a scene, regardless of positions, is held out from training."""
    parts = sorted("-".join(thing.traits) for thing in scene.things)
    return stable_hash("shapes valid", scene.kind, *parts) % _VALID_SHARE == 0
