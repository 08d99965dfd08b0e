"""Pictures are read as what they show."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from regard.data.images import open_upright
from regard.text.image_processor import ImageProcessor


@pytest.mark.parametrize("suffix", ["png", "tif"])
@pytest.mark.parametrize("channels", [1, 3])
def test_sixteen_bits_of_grey_keep_their_brightness(tmp_path: Path, suffix: str, channels: int) -> None:
    levels = np.array([[0, 257, 20000], [32768, 65535, 128]], dtype=np.uint16)
    path = tmp_path / f"grey.{suffix}"
    Image.fromarray(levels).save(path)
    wanted = [[0, 1, 78], [128, 255, 0]]
    told = np.asarray(open_upright(path, channels)).reshape(2, 3, channels)
    assert told.tolist() == [[[x] * channels for x in row] for row in wanted]
    with Image.open(path) as image:
        found = ImageProcessor(None, (0.0,) * channels, (1.0,) * channels, rescale=1.0)(image)
    assert found[0, 0].tolist() == wanted
