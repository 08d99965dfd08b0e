"""The image of a look on its way to the page."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from .limits import Limits

if TYPE_CHECKING:
    from PIL.Image import Image

_LONGEST = 640


def as_png(image: Image, limits: Limits) -> bytes:
    """A PNG file that is small enough to be sent: larger pictures are made smaller, small ones stay as they are."""
    longest = _LONGEST
    while True:
        small = image.convert("RGB")
        small.thumbnail((longest, longest))
        out = io.BytesIO()
        small.save(out, "PNG", optimize=True)
        if out.tell() <= limits.response_bytes:
            return out.getvalue()
        longest = longest * 3 // 4
