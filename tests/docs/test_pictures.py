"""The pictures of docs/learn are what the library draws today."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from . import pictures


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_what_is_drawn_today(name: str, tmp_path: Path) -> None:
    pictures.draw(name, tmp_path / name)
    with Image.open(tmp_path / name) as today, Image.open(pictures.IMAGES / name) as kept:
        assert today.size == kept.size
        apart = np.abs(np.asarray(today.convert("RGB"), dtype=float) - np.asarray(kept.convert("RGB"), dtype=float))
    assert apart.mean() < 2, f"{name} has changed; python -m tests.docs.pictures draws it anew"


def test_no_picture_is_large() -> None:
    large = {file.name: file.stat().st_size for file in pictures.IMAGES.glob("learn-*.png")}
    assert set(large) == set(pictures.PICTURES)
    assert max(large.values()) < 60_000
