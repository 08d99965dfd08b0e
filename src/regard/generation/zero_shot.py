"""Two-tower models in use: unit vectors of images and texts, and zero-shot classification of images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..config import ModelConfig
from ..data.batching import pad, truncate
from ..models import ModelOrPath, TwoTower, ZeroShotClassifier, open_model
from ..models.two_tower import mean_of_templates
from ..text.processor import Processor
from .generate import inference
from .prompts import image_pixels, max_text_length
from .text_codec import ModelTokenizers

TEMPLATE = "a photo of a {}"
_BATCH = 256  # images or texts


def text_inputs(model: TwoTower, texts: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    """Texts, or rows of token ids, as tokens (B, T) and a padding mask; truncated texts keep their end token."""
    max_len = max_text_length(model.config, target=True)
    rows = [ModelTokenizers(model).target.encode(x) if isinstance(x, str) else list(x) for x in texts]
    tokens, real = pad_texts(model.config, truncate(rows, max_len)[0])
    return tokens.to(model.device), None if real is None else real.to(model.device)


def pad_texts(config: ModelConfig, rows: Sequence[Sequence[int]], multiple: int = 1) -> tuple[Tensor, Tensor | None]:
    """Rows of ids as tokens (B, T), T rounded up to a ``multiple``, and a padding mask (B, T), True at real tokens.

    The mask goes by the rows' lengths, not by id: some models pad with a token that also occurs in texts. It is None
    if the text tower reads padding like any token (pooling "last").
    """
    longest, max_len = max(map(len, rows)), max_text_length(config, target=True)
    reads_padding = config.text_tower.pooling == "last"
    width = max_len if reads_padding else max(longest, min(-(-longest // multiple) * multiple, max_len))
    tokens = pad(rows, config.pad_id, width)
    return tokens, None if reads_padding else torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]


def embed_texts(model: TwoTower, texts: Sequence[Any]) -> Tensor:
    """Unit vectors (B, D) of texts or rows of token ids."""
    with inference(model):
        parts = [texts[start : start + _BATCH] for start in range(0, len(texts), _BATCH)]
        return torch.cat([model.embed_texts(*text_inputs(model, part)) for part in parts])


def embed_images(model: TwoTower, images: Any) -> Tensor:
    """Unit vectors (B, D) of images as for ``caption``: paths, Pillow images, or pixels (B, C, height, width)."""
    dtype = next(model.parameters()).dtype
    with inference(model):
        pixels = image_pixels(model, images)
        return torch.cat([model.embed_images(part.to(model.device, dtype)) for part in pixels.split(_BATCH)])


def zero_shot(
    model: ModelOrPath, classes: Sequence[str], template: str | Sequence[str] = TEMPLATE
) -> ZeroShotClassifier:
    """An image classifier for ``classes``, made from their names without training (Radford et al. 2021, §3.1).

    ``template`` turns a class name into a text, "a photo of a {}"; with several templates, a class vector is the mean
    of their vectors. The result is a model: ``regard.classify(zero_shot(model, ["cat", "dog"]), "photo.png")``.
    """
    model = open_model(model)
    if not isinstance(model, TwoTower):
        kind = f"architecture={model.config.architecture!r}"
        raise ValueError(f"zero-shot classes need architecture='two-tower', such as CLIP; this model has {kind}")
    names = tuple(name.strip() for name in classes if name.strip())
    if len(names) < 2 or len(set(names)) < len(names):
        raise ValueError(f"classes={', '.join(names) or 'none'}: give two or more different names")
    templates = (template,) if isinstance(template, str) else tuple(template)
    for template in templates:
        if "{}" not in template:
            raise ValueError(f"template={template!r} has no {{}} for the class name")
    vectors = [embed_texts(model, [template.replace("{}", name) for name in names]) for template in templates]
    classifier = ZeroShotClassifier(model, mean_of_templates(vectors)).eval()
    classifier.processor = replace(model.processor or Processor(), source=None, target=None, labels=names)
    return classifier
