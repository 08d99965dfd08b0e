"""The corpus `shapes`: drawn scenes with captions, the true box of every thing, and the things each word speaks of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..corpus import Draws, check_place, stable_hash
from .captions import Caption, Language, caption
from .drawing import box_of, draw
from .scene import Box, Scene, draw_scene

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

__all__ = ["Picture", "Shapes"]

# Part of every key: raised when the drawing of lots changes what an index means.
_EDITION = 1
# One composition in so many is kept for `valid`.
_VALID_SHARE = 12


@dataclass(frozen=True, slots=True)
class Picture:
    """A scene, what is said of it, and, when asked for, its pixels."""

    scene: Scene
    english: Caption
    korean: Caption
    language: Language = "en"
    size: int = 64

    @property
    def spoken(self) -> Caption:
        """The caption in the corpus' language, with the things of each word."""
        return self.english if self.language == "en" else self.korean

    @property
    def caption(self) -> str:
        """The caption in the corpus' language."""
        return self.spoken.text

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The box of every thing in pixels: x0, y0, x1, y1, the origin at the upper left corner."""
        return tuple(
            (x0 * self.size, y0 * self.size, x1 * self.size, y1 * self.size)
            for x0, y0, x1, y1 in map(box_of, self.scene.things)
        )

    @property
    def image(self) -> NDArray[np.uint8]:
        """The pixels, (size, size, 3)."""
        import numpy as np

        return np.asarray(self.pillow())

    def pillow(self, size: int | None = None) -> Image:
        """The image as pillow has it, at any size."""
        return draw(self.scene, size or self.size)


class Shapes:
    """Scenes of one to four things with captions.

    `train` has no held-out colour–shape combination (`HELD_OUT`) and no composition kept for `valid` (by a hash of what
    there is, wherever it stands); each picture of `combinations` has one thing with a held-out combination.
    """

    name = "shapes"
    splits = ("train", "valid", "combinations")

    def __init__(self, language: Language = "en", size: int = 64) -> None:
        if language not in ("en", "ko"):
            raise ValueError(f"language={language!r} is not one of en, ko")
        if size < 16:
            raise ValueError(f"size={size} is too small to tell the shapes apart; it must be at least 16")
        self.language: Language = language
        self.pixels = size

    def size(self, split: str) -> int | None:
        """None: there is always a next one."""
        return None

    def example(self, split: str, index: int) -> Picture:
        """The picture at this place."""
        check_place(self, split, index)
        attempt = 0
        while True:
            draws = Draws(self.name, _EDITION, split, index, attempt)
            scene = draw_scene(draws, held_out=split == "combinations")
            if split == "combinations" or kept_for_valid(scene) == (split == "valid"):
                return Picture(scene, caption(scene, "en"), caption(scene, "ko"), self.language, self.pixels)
            attempt += 1


def kept_for_valid(scene: Scene) -> bool:
    """Whether what there is, no matter where, is kept from training."""
    parts = sorted("-".join(thing.look) for thing in scene.things)
    return stable_hash("shapes valid", scene.kind, *parts) % _VALID_SHARE == 0
