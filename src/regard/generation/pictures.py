"""Pictures as a model sees them: files, Pillow's images and arrays, each looked at before it is decoded."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..config import DataConfig
from ..data.images import check_image, pixels_of
from ..errors import BadData
from ..models import Model
from ..text.image_processor import ImageProcessor

_MOST_PIXELS: int = DataConfig.model_fields["max_pixels"].default


def pixels(model: Model, pictures: Any) -> Tensor:
    """One picture or several as pixels (B, C, height, width), prepared as in training; such a tensor is passed on.

    A picture is a file, an image of Pillow's, or an array (height, width) or (height, width, channels) of bytes.
    """
    if model.config.source != "image":
        raise ValueError(f"this model reads source={model.config.source!r}, not images")
    if isinstance(pictures, Tensor):
        return pictures if pictures.dim() == 4 else pictures[None]
    processor = None if model.processor is None else model.processor.image
    if processor is None:
        raise ValueError("this model has no image processor: load one with a preprocessor_config.json, or give pixels")
    several = pictures if isinstance(pictures, Sequence) and not isinstance(pictures, str) else [pictures]
    if not several:
        raise ValueError("there is no image: the list is empty")
    return torch.cat([_prepared(processor, picture, model.config.n_channels) for picture in several])


def _prepared(processor: ImageProcessor, picture: Any, channels: int) -> Tensor:
    from PIL import Image

    if isinstance(picture, str | Path):
        picture = Path(picture)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # said as what is wrong with the file
            wrong = check_image(picture, _MOST_PIXELS, decode=True)
        if wrong is not None:
            raise BadData(f"{picture}: {wrong}")
    elif not isinstance(picture, Image.Image):
        picture = _checked(picture)
    found = pixels_of(picture, channels=channels)
    return processor(Image.fromarray(found[:, :, 0] if channels == 1 else found))


def _checked(picture: Any) -> NDArray[np.uint8]:
    if not isinstance(picture, np.ndarray):
        raise TypeError(f"an image is a path, an image of Pillow's or an array of bytes, not {type(picture).__name__}")
    if picture.dtype != np.uint8 or picture.ndim not in (2, 3) or 0 in picture.shape:
        got = f"{picture.dtype} of shape {picture.shape}"
        raise ValueError(f"an image as an array is uint8 (height, width) or (height, width, channels), got {got}")
    if picture.ndim == 3 and picture.shape[2] not in (1, 3, 4):
        raise ValueError(f"an image has 1, 3 or 4 channels, got an array of shape {picture.shape}")
    return picture[:, :, 0] if picture.ndim == 3 and picture.shape[2] == 1 else picture
