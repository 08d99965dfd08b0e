"""The pictures of the documentation can be taken, and are those that lie there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from regard.models import Model

from .photographs import IMAGES, LARGEST, PHOTOGRAPHS, film, take, watch


@pytest.mark.slow
def test_every_picture_can_be_taken(models: dict[str, Model], browser: Any, tmp_path: Path) -> None:
    small = {"en-ko": models["en-ko"], "shapes": models["shapes"], "stdlib": models["speaker"]}
    taken = list(take(small, tmp_path, browser))
    assert len(taken) == len(PHOTOGRAPHS)
    for file in taken:
        with Image.open(file) as picture:
            assert picture.width == (780 if "phone" in file.name else 1180)
            assert len(picture.convert("RGB").getcolors(1 << 24) or ()) > 50, f"{file.name} shows nothing"


def test_the_pictures_lie_in_the_documentation() -> None:
    there = {file.name for file in IMAGES.glob("explorer-*.png")}
    assert there == {f"explorer-{each.name}.png" for each in PHOTOGRAPHS}


@pytest.mark.slow
def test_the_moving_picture_moves(models: dict[str, Model], browser: Any, tmp_path: Path) -> None:
    for file in (film(models["en-ko"], tmp_path / "explorer.webp", browser), IMAGES / "explorer.webp"):
        with Image.open(file) as picture:
            assert picture.n_frames >= 12  # type: ignore[attr-defined]  # formats that move have it
        assert file.stat().st_size < LARGEST
    for page in ("README.md", "README.ko.md"):
        assert "docs/images/explorer.webp" in (IMAGES.parents[1] / page).read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_page_that_trains_can_be_taken(models: dict[str, Model], browser: Any, tmp_path: Path) -> None:
    for file in (watch(models["en-ko"], tmp_path / "watch.png", browser), IMAGES / "watch.png"):
        with Image.open(file) as picture:
            assert picture.size == (1440, 900)
