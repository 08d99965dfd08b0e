"""Images to pixel tensors, following a model's preprocessor_config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..config import ModelConfig

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_SIDE = 65_535  # pixels, JPEG's own limit; Pillow spends time and memory on every row, however short
_MAX_RESIZED = 50_000_000  # pixels of an image after resizing
_STEPS = ("do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb")
_KINDS = ("ViT", "CLIP", "Siglip", "DeiT", "Bit")  # Bit's processor is also DINOv2's
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def eight_bit(image: Image) -> Image:
    """Scale 16-bit grey levels to 8 bits; Pillow's own conversion would clip them at 255. Other images are returned."""
    from PIL.Image import fromarray

    if not image.mode.startswith("I"):  # I;16 in either byte order, or I, the mode in which Pillow opens some of them
        return image
    return fromarray((np.asarray(image).clip(0, 65535) / 257).round().astype(np.uint8))


@dataclass(frozen=True)
class ImageProcessor:
    """Resize, centre-crop, rescale to [0, 1] and normalise per channel; ``size`` or ``crop`` None skips the step."""

    size: tuple[int, int] | int | None  # height and width, or the shorter side with the aspect ratio preserved
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    rescale: float = 1 / 255
    resample: int = 2  # Pillow's number of the filter; 2 is bilinear
    crop: tuple[int, int] | None = None  # height and width of the centre; a smaller image is padded with black

    def __call__(self, image: Image) -> Tensor:
        """Pixels (1, C, height, width) as float32."""
        return self.normalise(self.resize(image)[None])

    def resize(self, image: Image) -> NDArray[np.uint8]:
        """Resized and cropped pixels (height, width, C)."""
        from PIL.Image import Resampling

        image = eight_bit(image).convert("L" if len(self.mean) == 1 else "RGB")
        if self.size is not None:
            image = image.resize(self._target_size(*image.size), Resampling(self.resample))
        if self.crop is not None:
            left, top = (image.width - self.crop[1]) // 2, (image.height - self.crop[0]) // 2
            image = image.crop((left, top, left + self.crop[1], top + self.crop[0]))
        return np.asarray(image, dtype=np.uint8).reshape(image.height, image.width, len(self.mean))

    def normalise(self, pixels: NDArray[np.uint8]) -> Tensor:
        """Pixels (B, height, width, C) → (B, C, height, width) as float32."""
        scaled = torch.tensor(pixels).permute(0, 3, 1, 2).float() * self.rescale
        mean, std = (torch.tensor(x)[:, None, None] for x in (self.mean, self.std))
        return ((scaled - mean) / std).contiguous()

    def _target_size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height after resizing; the longer side is rounded down, as in transformers."""
        if isinstance(self.size, tuple):
            return self.size[1], self.size[0]
        side = self.size or 0
        longer = int(side * max(width, height) / min(width, height))
        if side * longer > _MAX_RESIZED:
            raise ValueError(f"an image of {width} × {height} pixels is too long to resize to a shorter side of {side}")
        return (side, longer) if width <= height else (longer, side)

    @classmethod
    def read(cls, fields: Mapping[str, Any], config: ModelConfig) -> ImageProcessor:
        """Build a processor from the fields of a preprocessor_config.json; raises ValueError on an unsupported step."""
        kind = _kind(fields)
        clip = kind in ("CLIP", "Bit")
        for name, value in fields.items():
            if value and (name == "use_square_size" or (name.startswith("do_") and name not in _STEPS)):
                raise ValueError(f"{name}={value!r} is not supported; the supported steps are {', '.join(_STEPS)}")
        # As in transformers, a missing field means the default of its kind, and null skips the step.
        side = config.image_size
        mean, std = _mean_and_std(fields, config.n_channels, clip)
        size, resample, crop = None, 2, None
        if fields.get("do_resize", True):
            size = _size("size", fields.get("size", 256 if kind == "DeiT" else side), square=kind in ("ViT", "DeiT"))
            resample = fields.get("resample", 2 if kind == "ViT" else 3)
            if resample not in range(6):
                raise ValueError(f"resample={resample!r} is not one of Pillow's filters, 0 to 5")
        crops = clip or kind == "DeiT"
        if fields.get("do_center_crop", crops):
            if (crop_size := fields.get("crop_size", side if crops else None)) is None:
                raise ValueError("do_center_crop=True, but there is no crop_size")
            sides = _size("crop_size", crop_size, square=True)
            if isinstance(sides, int):
                raise ValueError(f"crop_size={crop_size!r} has no height and width")
            crop = sides
        rescale = float(fields.get("rescale_factor", 1 / 255)) if fields.get("do_rescale", True) else 1.0
        return cls(size, mean, std, rescale, int(resample), crop)

    def fields(self) -> dict[str, Any]:
        """The fields of a preprocessor_config.json that transformers reads the same way."""

        def sides(size: tuple[int, int] | int | None) -> dict[str, int] | None:
            if isinstance(size, int):
                return {"shortest_edge": size}
            return None if size is None else {"height": size[0], "width": size[1]}

        clip = self.crop is not None or isinstance(self.size, int)
        fields = {
            "image_processor_type": "CLIPImageProcessor" if clip else "ViTImageProcessor",
            "do_resize": self.size is not None,
            "size": sides(self.size),
            "resample": self.resample,
            "do_center_crop": self.crop is not None if clip else None,
            "crop_size": sides(self.crop),
            "do_rescale": True,
            "rescale_factor": self.rescale,
            "do_normalize": True,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
        }
        return {name: value for name, value in fields.items() if value is not None}


def _kind(fields: Mapping[str, Any]) -> str:
    """The kind of processor, which determines the defaults and the meaning of a size given as one number."""
    name = fields.get("image_processor_type") or fields.get("feature_extractor_type") or "ViTImageProcessor"
    for kind in _KINDS:
        if name in (f"{kind}FeatureExtractor", *(f"{kind}ImageProcessor{x}" for x in ("", "Fast", "Pil"))):
            return kind
    known = ", ".join(f"{kind}ImageProcessor" for kind in _KINDS)
    raise ValueError(f"image_processor_type={name!r} is not supported; the supported types are {known}")


def _mean_and_std(fields: Mapping[str, Any], n: int, clip: bool) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each of the n channels; 0 and 1 if normalisation is off."""
    if not fields.get("do_normalize", True):
        return (0.0,) * n, (1.0,) * n
    statistics = []
    for name, default in (("image_mean", _CLIP_MEAN), ("image_std", _CLIP_STD)):
        values = fields.get(name, default if clip else (0.5,) * n)
        if not isinstance(values, list | tuple) or len(values) != n:
            raise ValueError(f"{name}={values!r} must have one number for each of n_channels={n}")
        statistics.append(tuple(float(x) for x in values))
    if not min(statistics[1]) > 0:
        raise ValueError(f"image_std={statistics[1]} must be positive")
    return statistics[0], statistics[1]


def _size(name: str, size: Any, square: bool) -> tuple[int, int] | int:
    """(height, width), or the shorter side; ``square``: a single number means a square."""
    if isinstance(size, Mapping):
        size = {side: value for side, value in size.items() if value is not None}
    sides: tuple[int, int] | int
    match size:
        case int(side):
            sides = (side, side) if square else side
        case {"shortest_edge": int(side), **rest} if not rest:
            sides = side
        case {"height": int(height), "width": int(width), **rest} if not rest:
            sides = height, width
        case [int(height), int(width)]:
            sides = height, width
        case _:
            raise ValueError(f"{name}={size!r} is not a number, a height and width, or a shortest_edge")
    both = (sides, sides) if isinstance(sides, int) else sides
    if not 1 <= min(both) <= max(both) <= MAX_SIDE or math.prod(both) > _MAX_RESIZED:
        limits = f"at least 1 pixel and at most {_MAX_RESIZED:,}, with no side over {MAX_SIDE:,}"
        raise ValueError(f"{name}={str(size)[:80]} must have {limits}")
    return sides
