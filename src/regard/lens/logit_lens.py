"""The logit lens: what a model would say if it stopped after each layer (nostalgebraist 2020).

    p_l = softmax(W · Norm(x_l) + b)

Each layer's state goes through the last norm and the head as if it were the last. Logits of one position are formed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..generation.classes import _labels as class_names
from ..generation.generate import at_rest
from ..models import Encoder
from .interventions import patch
from .look import Look, Next
from .places import stacks


@dataclass(frozen=True)
class Said:
    """What is said after one layer."""

    layer: int
    """-1 for what goes into the first one."""
    best: list[Next]
    """The likeliest tokens, or classes, best first."""
    entropy: float
    """Of all of them, in nats: how undecided it is."""


def logit_lens(look: Look, position: int = -1, k: int = 5) -> list[Said]:
    """What each layer says at one position: the next token, a masked one, or (of the whole input) the class.

    The model runs again, as it is now: inside a ``with`` block of an intervention, with that.
    """
    model = look.model
    found = stacks(model)
    head: Any = getattr(model, "head", None)
    classifier: Any = model.classifier if isinstance(model, Encoder) else None
    if not found or (head is None and classifier is None):
        why = "it has no stack of layers" if not found else f"it has head={model.config.head!r}"
        raise ValueError(f"this model says nothing layer by layer: {why}")
    name = "decoder" if "decoder" in found else "encoder"
    stack, at = found[name], look._position(position)
    logits: dict[int, Tensor] = {}

    def listen(layer: int) -> Callable[[Tensor], Tensor]:
        def heard(x: Tensor) -> Tensor:
            states = x if classifier is not None else x[:, at : at + 1]
            states = states if stack.norm is None else stack.norm(states)
            said = classifier(states) if classifier is not None else head(states, look._table)[:, 0]
            logits[layer] = said[0].float().cpu()
            return x

        return heard

    places: dict[str | tuple[str, int, int], Any] = {
        name: listen(-1),
        **{f"{name}.blocks.{layer}": listen(layer) for layer in range(stack.n_layers)},
    }
    with torch.no_grad(), at_rest(model), patch(model, places):
        run: Any = model.hidden
        run(*look.inputs)
    say = (lambda index: class_names(model)[index]) if classifier is not None else look._say
    return [_said(layer, logits[layer], k, say) for layer in range(-1, stack.n_layers)]


def _said(layer: int, logits: Tensor, k: int, say: Callable[[int], str]) -> Said:
    if k < 1:
        raise ValueError(f"k={k} must be at least 1")
    chances = logits.softmax(-1)
    best = chances.topk(min(k, len(chances)))
    found = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    entropy = float(-torch.xlogy(chances, chances).sum())
    return Said(layer, [Next(index, say(index), chance) for index, chance in found], entropy)
