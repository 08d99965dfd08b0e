"""Images: safe decoding of files, IDX archives, and augmentation as a pure function of (seed, epoch, index)."""

from __future__ import annotations

import math
import os
import struct
import unicodedata
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..errors import BadData
from ..text.image_processor import MAX_SIDE, ImageProcessor, eight_bit
from .examples import ImageExample
from .hashing import bits_of, stable_key
from .table_files import open_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

_MAX_IDX_BYTES = 4 << 30
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # decoded by Pillow itself; EPS would start Ghostscript


def open_image(file: Path | IO[bytes], formats: tuple[str, ...] = IMAGE_FORMATS) -> Image:
    """Open an image file without decoding it, detecting its format from the content; BadData on a side over
    ``MAX_SIDE``."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # callers enforce their own limit on the size
        image = Image.open(file, formats=formats)
    if max(image.size) > MAX_SIDE:
        image.close()
        raise BadData(f"{image.width} × {image.height} pixels; a side has at most {MAX_SIDE:,}")
    return image


def find_image(folder: Path, name: str) -> Path:
    """The file ``name`` of a folder; names are compared in NFC, because macOS decomposes Hangul."""
    path = folder / name
    if name.isascii() or os.path.exists(path):
        return path
    path = folder
    for part in Path(name).parts:
        is_searched = not os.path.lexists(path / part) and os.path.isdir(path)
        names = _names(path, path.stat().st_mtime_ns) if is_searched else {}
        path /= names.get(unicodedata.normalize("NFC", part), part)
    return path


@lru_cache(maxsize=8)
def _names(folder: Path, modified_at: int) -> dict[str, str]:
    """The names in a folder by their NFC form; with another ``modified_at`` the folder is read again."""
    return {unicodedata.normalize("NFC", name): name for name in os.listdir(folder)}


def check_image(path: Path, max_pixels: int, decode: bool) -> str | None:
    """What is wrong with an image file, or None. Its size is checked before anything is decoded."""
    from PIL import Image

    try:
        with open_image(path) as image:
            if math.prod(image.size) > max_pixels:
                return f"{image.width} × {image.height} pixels, more than max_pixels={max_pixels}"
            if decode:
                image.load()
    except FileNotFoundError:
        return "no such file"
    except BadData as error:
        return str(error)
    except Image.DecompressionBombError:
        return "more pixels than can be decoded safely"
    except Exception as error:  # decoders raise many types of exceptions on a damaged file
        return f"cannot be decoded: {str(error) or type(error).__name__}"
    return None


def open_upright(image: Path | Image | NDArray[np.uint8], channels: int = 3) -> Image:
    """An image in grey or RGB, rotated by EXIF orientation; what is transparent becomes white."""
    from PIL import Image, ImageOps

    if isinstance(image, np.ndarray):
        image = Image.fromarray(image[:, :, 0] if image.shape[2:] == (1,) else image)
    try:
        with open_image(image) if isinstance(image, Path) else nullcontext(image) as opened:
            picture = eight_bit(ImageOps.exif_transpose(opened))
            if picture.has_transparency_data:  # the colours of transparent pixels are arbitrary
                white = Image.new("RGBA", picture.size, "white")
                picture = Image.alpha_composite(white, picture.convert("RGBA"))
            return picture.convert("L" if channels == 1 else "RGB")
    except (OSError, ValueError, SyntaxError, BadData, Image.DecompressionBombError) as error:
        raise BadData(f"{image} cannot be decoded: {error}") from None


def has_colours(image: Path | Image | NDArray[np.uint8]) -> bool:
    """Whether the channels of an image differ anywhere; a grey image may be stored as RGB."""
    pixels = np.asarray(open_upright(image))
    return bool((pixels != pixels[:, :, :1]).any())


def image_batch(
    examples: Sequence[ImageExample],
    indices: Sequence[int] | NDArray[np.int64],
    processor: ImageProcessor,
    *,
    shift: int = 0,
    flip: bool = False,
    seed: int = 0,
    epoch: int = 0,
) -> Tensor:
    """Pixels (B, C, height, width), prepared by the processor as they are for predictions.

    ``shift`` translates an image randomly by up to that many pixels in each direction, repeating its edge, and ``flip``
    mirrors it with probability 1/2. Both depend only on (seed, epoch, index).
    """
    rows = [int(index) for index in indices]
    images = [_prepare(examples[index].image, processor) for index in rows]
    if len(sizes := {image.shape[:2] for image in images}) > 1:
        raise ValueError(f"the image processor prepares images of different sizes (height, width): {sorted(sizes)[:2]}")
    pixels = np.stack(images)
    if shift or flip:
        pixels = _augment(pixels, shift, flip, [stable_key("augment", seed, epoch, index) for index in rows])
    return processor.normalise(pixels)


def _prepare(image: Path | Image | NDArray[np.uint8], processor: ImageProcessor) -> NDArray[np.uint8]:
    """Resized and cropped pixels (height, width, C)."""
    channels = len(processor.mean)
    if isinstance(image, np.ndarray) and (processor.size, processor.crop) == (image.shape[:2], None):
        pixels = image.reshape(*image.shape[:2], -1)
        if pixels.shape[2] == channels:  # ready, and Pillow would take ten times as long as the rest of the batch
            return pixels
    return processor.resize(open_upright(image, channels))


def _augment(pixels: NDArray[np.uint8], shift: int, flip: bool, keys: list[int]) -> NDArray[np.uint8]:
    """Shift and mirror images (B, height, width, C) by the random bits of their keys; edges are repeated."""
    n, height, width, _ = pixels.shape
    down, right, mirrored = (bits_of(np.asarray(keys, dtype=np.uint64), index) for index in range(3))
    rows, columns = np.arange(height)[None], np.arange(width)[None].repeat(n, 0)
    if flip:
        columns = np.where(mirrored[:, None] % 2 == 1, width - 1 - columns, columns)
    span = 2 * shift + 1
    rows = np.clip(rows + (down[:, None] % span) - shift, 0, height - 1)
    columns = np.clip(columns + (right[:, None] % span) - shift, 0, width - 1)
    return pixels[np.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]]


class IdxImages(Sequence[ImageExample]):
    """The images of an IDX archive as examples, created on access."""

    def __init__(
        self, images: NDArray[np.uint8], labels: NDArray[np.uint8], rows: NDArray[np.int64] | None = None
    ) -> None:
        self.images, self.labels = images, labels
        self.rows = np.arange(len(images)) if rows is None else rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> ImageExample:  # type: ignore[override]  # no slices
        row = self.rows[index]
        return ImageExample(self.images[row], label=int(self.labels[row]))


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read an IDX file of bytes (MNIST's format): magic 0x00 0x00 0x08 n, n big-endian uint32 sizes, then the bytes."""
    with open_bytes(path) as file:
        magic = file.read(4)
        if len(magic) < 4 or magic[:3] != b"\0\0\x08" or not 1 <= magic[3] <= 4:
            raise BadData(f"{path} is not an IDX file of bytes: it starts with {magic.hex(' ')}")
        head = file.read(4 * magic[3])
        if len(head) < 4 * magic[3]:
            raise BadData(f"{path} ends within its header")
        shape = struct.unpack(f">{magic[3]}I", head)
        n_bytes = math.prod(shape)
        if n_bytes > _MAX_IDX_BYTES:
            raise BadData(f"{path} declares {n_bytes:,} bytes, more than {_MAX_IDX_BYTES:,}")
        content = file.read(n_bytes + 1)
    if len(content) != n_bytes:
        size = "more" if len(content) > n_bytes else f"{len(content):,}"
        raise BadData(f"{path} declares {n_bytes:,} bytes, but has {size}")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)
