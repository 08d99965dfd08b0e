"""The input of a look as tensors (token ids, pixels or region features), with a display label for each position."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..data.images import open_upright
from ..generation.prompts import image_pixels, max_text_length, token_rows
from ..generation.text_codec import ModelTokenizers
from ..models import Model
from ..text.image_processor import ImageProcessor
from ..text.processor import Processor
from .labels import Box, Label, numbered_labels, patch_labels, token_labels

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, eq=False)
class SourceInput:
    """The first input of a model, with a label for each position."""

    values: Tensor  # (1, T), (1, C, height, width) or (1, R, d_region)
    labels: list[Label]
    text: str | None = None
    image: Image | None = None  # the image cropped as the pixels are, at its original resolution


def read_source(model: Model, source: Any) -> SourceInput:
    """Read text or token ids, an image, or the regions of an image, according to ``config.source``."""
    config = model.config
    if config.source == "text":
        ids = read_token_ids(model, source, "text" if config.architecture == "encoder" else "source")
        tokenizer = tokenizers(model)[0]
        text = source if isinstance(source, str) else decode_ids(ids, tokenizer)
        return SourceInput(torch.tensor([ids], device=model.device), token_labels(ids, tokenizer, config), text)
    if config.source == "image":
        return _read_image(model, source)
    regions = source if isinstance(source, Tensor) else torch.as_tensor(source)
    regions = regions[None] if regions.dim() == 2 else regions
    if regions.dim() != 3 or len(regions) != 1 or not regions.is_floating_point() or not regions.numel():
        raise ValueError(f"a look reads the regions of one image, (R, d_region), got shape {tuple(regions.shape)}")
    boxes: list[Box] | None = None
    if config.d_box:  # the box follows the features of a region
        corners = regions[0, :, config.d_region : config.d_region + 4].tolist()
        boxes = [(x0, y0, x1, y1) for x0, y0, x1, y1 in corners]
    return SourceInput(_to_model(model, regions), numbered_labels("region", regions.shape[1], boxes))


def _to_model(model: Model, x: Tensor) -> Tensor:
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return x.to(model.device, dtype)


def read_token_ids(model: Model, text: Any, name: str) -> list[int]:
    """The ids of one text (or of one row of ids), checked against the vocabulary and the model's maximum length."""
    ids = ModelTokenizers(model).encode_inputs(text, name)[0] if isinstance(text, str) else _single_row(text, name)
    _check_ids(ids, name, model.config.vocab_size, max_text_length(model.config))
    return ids


def read_target_ids(model: Model, target: Any) -> list[int]:
    """The decoder's input: bos_id, then the target without its eos_id, as in training."""
    bos_id, eos_id = model.config.bos_id, model.config.eos_id
    ids = ModelTokenizers(model).target.encode(target) if isinstance(target, str) else _single_row(target, "target")
    ids = ids[:-1] if ids and ids[-1] == eos_id else ids
    ids = ids if bos_id is None or ids[:1] == [bos_id] else [bos_id, *ids]
    _check_ids(ids, "target", model.config.output_vocab_size, max_text_length(model.config, target=True))
    return ids


def _single_row(ids: Any, name: str) -> list[int]:
    rows = token_rows(ids, name=name)
    if len(rows) != 1:
        raise ValueError(f"a look reads one {name}, got {len(rows)}")
    return rows[0]


def _check_ids(ids: list[int], name: str, vocab_size: int, max_len: int) -> None:
    if not ids:
        raise ValueError(f"{name} is empty: there is nothing to look at")
    if len(ids) > max_len:
        raise ValueError(f"{name} has {len(ids):,} tokens, but this model reads at most max_len={max_len:,}")
    for index in ids:
        if not 0 <= index < vocab_size:
            raise ValueError(f"{name} holds token {index}, but the vocabulary has {vocab_size}: 0 to {vocab_size - 1}")


def tokenizers(model: Model) -> tuple[Any, Any]:
    """The source and target tokenizers; None where the model has none."""
    processor = model.processor or Processor()
    return processor.source, processor.tokenizer_of("target")


def decode_ids(ids: list[int], tokenizer: Any) -> str | None:
    return None if tokenizer is None else tokenizer.decode(ids)


def _read_image(model: Model, source: Any) -> SourceInput:
    """Read a file, a PIL image, a uint8 array, or pixels (C, height, width)."""
    values = image_pixels(model, source)
    if len(values) != 1:
        raise ValueError(f"a look reads one image, got {len(values)}")
    processor = None if model.processor is None else model.processor.image
    if isinstance(source, Tensor):
        image = _pixels_to_image(values[0], processor)
    else:
        image = _crop_to_input(source, model.config.n_channels, processor)
    embeddings: Any = model.embeddings
    rows, cols = embeddings.patches.grid_of(*values.shape[2:])
    labels = patch_labels(rows, cols, embeddings.n_class_tokens, embeddings.n_registers)
    return SourceInput(_to_model(model, values), labels, image=image)


def _crop_to_input(source: Any, channels: int, processor: ImageProcessor | None) -> Image:
    """The centre crop that the processor feeds to the model, at the image's original resolution."""
    source = source[0] if isinstance(source, list | tuple) else source
    image = open_upright(Path(source) if isinstance(source, str | Path) else source, channels)
    if processor is None or processor.crop is None:
        return image
    width, height = image.size if processor.size is None else processor._target_size(*image.size)
    crop_width = processor.crop[1] / width * image.width
    crop_height = processor.crop[0] / height * image.height
    left, top = (image.width - crop_width) / 2, (image.height - crop_height) / 2
    return image.crop((round(left), round(top), round(left + crop_width), round(top + crop_height)))


def _pixels_to_image(x: Tensor, processor: ImageProcessor | None) -> Image:
    """Undo the processor's normalisation of pixels (C, height, width); without a processor, stretch them to 0 … 255."""
    from PIL import Image

    x = x.detach().float().cpu()
    if processor is not None and len(processor.mean) == len(x):
        x = x * torch.tensor(processor.std)[:, None, None] + torch.tensor(processor.mean)[:, None, None]
    else:
        x = (x - x.min()) / (x.max() - x.min()).clamp(min=1e-12)
    values = (x.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    return Image.fromarray(values[:, :, 0] if values.shape[2] == 1 else np.ascontiguousarray(values[:, :, :3]))
