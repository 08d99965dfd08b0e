"""The image of a look: the pixels a model reads, and the part of the picture that they show."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..data.images import pixels_of
from ..generation.prompts import image_pixels
from ..models import Model
from ..text.image_processor import ImageProcessor

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, eq=False)
class LookImage:
    pixels: Tensor
    """(1, C, height, width) as the model reads them."""
    image: Image
    """What they show, in the picture's own resolution: a patch's box is a part of this."""


def read_image(model: Model, what: Any) -> LookImage:
    """A file, an image of Pillow's, an array of bytes, or pixels (C, height, width), as a model reads it."""
    found = image_pixels(model, what)
    if len(found) != 1:
        raise ValueError(f"a look is at one image, got {len(found)}")
    processor = None if model.processor is None else model.processor.image
    if isinstance(what, Tensor):
        return LookImage(found, _painted(found[0], processor))
    return LookImage(found, _seen_part(_opened(what, model.config.n_channels), processor))


def _opened(what: Any, channels: int) -> Image:
    from PIL import Image

    what = what[0] if isinstance(what, list | tuple) else what
    found = pixels_of(Path(what) if isinstance(what, str | Path) else what, channels=channels)
    return Image.fromarray(found[:, :, 0] if channels == 1 else found)


def _seen_part(image: Image, processor: ImageProcessor | None) -> Image:
    """The middle of a picture, where a model is shown no more than that."""
    if processor is None or processor.crop is None:
        return image
    width, height = image.size if processor.size is None else processor._resized(*image.size)
    part = processor.crop[1] / width * image.width, processor.crop[0] / height * image.height
    left, top = (image.width - part[0]) / 2, (image.height - part[1]) / 2
    return image.crop((round(left), round(top), round(left + part[0]), round(top + part[1])))


def _painted(found: Tensor, processor: ImageProcessor | None) -> Image:
    """Pixels (C, height, width) as a picture: by the processor's mean and deviation, or from darkest to brightest."""
    from PIL import Image

    x = found.detach().float().cpu()
    if processor is not None and len(processor.mean) == len(x):
        x = x * torch.tensor(processor.std)[:, None, None] + torch.tensor(processor.mean)[:, None, None]
    else:
        x = (x - x.min()) / (x.max() - x.min()).clamp(min=1e-12)
    values = (x.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    return Image.fromarray(values[:, :, 0] if values.shape[2] == 1 else np.ascontiguousarray(values[:, :, :3]))
