"""Which class a text or an image belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..models import Model
from .batches import at_once
from .config import GenerateConfig
from .generate import at_rest
from .pictures import pixels
from .prompts import side_by_side, sources_of
from .words import Words


@dataclass(frozen=True)
class Classified:
    """The most likely class of one input."""

    label: str
    probability: float
    all: dict[str, float]
    """Every class with its probability, likeliest first."""


def classify(model: Model, inputs: Any, *, truncate: bool = False) -> list[Classified]:
    """The classes of a text or an image, or of several: text or token ids, or what ``caption`` takes.

    ``truncate`` cuts too long a text short, which is otherwise an error.
    """
    check_classifies(model)
    with at_rest(model):
        if model.config.source == "image":
            logits = _of_images(model, pixels(model, inputs))
        else:
            logits = _of_texts(model, inputs, truncate)
    names = _labels(model)
    return [_classified(row, names) for row in logits.softmax(-1).tolist()]


def check_classifies(model: Model) -> None:
    """Raise unless the model knows classes."""
    if model.config.head != "classify":
        raise ValueError(f"this model has head={model.config.head!r}; only with head='classify' does it know classes")


def _of_images(model: Model, seen: Tensor) -> Tensor:
    kind = next(model.parameters()).dtype
    return torch.cat([model(part.to(model.device, kind)).float().cpu() for part in seen.split(64)])


def _of_texts(model: Model, inputs: Any, truncate: bool) -> Tensor:
    """(N, classes), whatever company a text is computed in."""
    several = isinstance(inputs, list | tuple) and any(isinstance(x, str) for x in inputs)
    if isinstance(inputs, str) or several:
        inputs = Words(model).rows([inputs] if isinstance(inputs, str) else inputs, "text")
    sources = sources_of(inputs, None, model.config, truncate)
    logits = torch.zeros(len(sources), model.config.n_classes)
    lengths = [len(source) for source in sources]
    for group in at_once(model, GenerateConfig(), lengths, [0] * len(sources)):
        read = side_by_side([sources[index] for index in group], model)
        logits[group] = model(read.values, keep=read.keep).float().cpu()
    return logits


def _labels(model: Model) -> Sequence[str]:
    """Their names; without any, the names transformers gives them."""
    named = None if model.processor is None else model.processor.labels
    return named or [f"LABEL_{index}" for index in range(model.config.n_classes)]


def _classified(chances: list[float], names: Sequence[str]) -> Classified:
    order = sorted(range(len(names)), key=lambda index: -chances[index])
    return Classified(names[order[0]], chances[order[0]], {names[index]: chances[index] for index in order})
