"""What is to be seen in an image, in words."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..models import Model
from .batches import at_once
from .config import GenerateConfig
from .generate import generate
from .pictures import pixels
from .prompts import longest
from .texts import Text, Texts, told, understood, usual_beam
from .words import Words


def caption(
    model: Model,
    images: Any,
    config: GenerateConfig | None = None,
    *,
    beam: int | None = None,
    max_new_tokens: int | None = None,
    **fields: Any,
) -> Texts:
    """The caption of one image or of several: paths, images of Pillow's, arrays of bytes, or pixels (B, C, h, w).

    By beam search, beam 4 unless it or a config is given; fields as in ``generate``.
    """
    check_captions(model)
    words, seen = Words(model), pixels(model, images)
    given = {"beam": beam, "max_new_tokens": max_new_tokens}
    fields |= {name: value for name, value in given.items() if value is not None}
    if config is None:
        fields = {"beam": usual_beam(fields), "max_new_tokens": longest(model.config, target=True) - 1, **fields}
    config, strings = understood(model, config, fields, words)
    found: list[list[Text]] = [[] for _ in seen]
    n_read = (model.config.image_size // model.config.patch_size) ** 2
    for group in at_once(model, config, [n_read] * len(seen), [config.max_new_tokens] * len(seen)):
        part: Tensor = seen[group]
        made = generate(model, part, config, strings=strings)
        for index, texts in zip(group, told(made, words, strings), strict=True):
            found[index] = texts
    return Texts(found)


def check_captions(model: Model) -> None:
    """Raise unless the model reads images and writes text."""
    config = model.config
    if config.source != "image" or config.architecture != "encoder-decoder" or config.head != "lm":
        what = f"architecture={config.architecture!r}, source={config.source!r} and head={config.head!r}"
        raise ValueError(f"this model has {what}: it does not caption images")
