"""Activations that a record computes when they are read instead of storing them.

The widest activations are recomputed from narrower ones to save memory (``recompute_later``); the derived sites of
``models.sites`` are never stored (``derive_later``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from ..generation.generate import inference
from ..models import Model
from ..models.base_model import mask_from_padding
from ..models.sites import CLASSES, HookSite, norms_around
from .residual import check_float_weights, norm_scale


class RecomputedActivation:
    """An activation that a module computes from others (…, T, width) of the record when it is read."""

    def __init__(
        self, site: HookSite, module: nn.Module, run: Callable[..., Tensor], *states: Tensor | RecomputedActivation
    ) -> None:
        self.site, self.run, self.states = site, run, states
        self.module: Any = module
        self._weights = self._weight_versions()

    def compute(self, at: tuple[int, int] | None = None) -> Tensor:
        """The whole activation, or that of one (prompt, position): (1, …, 1, width)."""
        name = self.site.name
        if self._weight_versions() != self._weights:
            remedy = "capture again" if self.site.is_derived else f'capture(…, sites="{name}") stores it'
            raise ValueError(f"{name} is computed when it is read, but the weights have changed since; {remedy}")
        if at is not None and self.site.shape == CLASSES:
            raise ValueError(f"{name} {CLASSES} belong to a whole prompt, not to one position")
        states = [token_of(x, at) if isinstance(x, Tensor) else x.compute(at) for x in self.states]
        with inference(self.module), torch.set_grad_enabled(any(x.requires_grad for x in states)):
            return self.run(*states)

    def _weight_versions(self) -> list[int]:
        return [x._version for x in (*self.module.parameters(), *self.module.buffers())]


def token_of(x: Tensor, at: tuple[int, int] | None) -> Tensor:
    """One (prompt, position) of x (B, …, T, width), as (1, …, 1, width); x itself for None."""
    return x if at is None else x[at[0], None][..., at[1], None, :]


def recompute_later(site: HookSite, kept: Mapping[str, Tensor | RecomputedActivation]) -> RecomputedActivation | None:
    """A wide activation as a function of a narrower one that is kept; None if it has to be stored.

    Neurons are recomputed from the input of their network, the input of a sub-layer from the residual stream.
    """
    block: Any = site.owner
    stem = site.name.removesuffix(site.point)
    if site.point == "ff.neurons" and (states := kept.get(f"{stem}ff.input")) is not None:
        return RecomputedActivation(site, block.ff, block.ff.neurons, states)
    if site.point in ("attention.input", "ff.input"):
        norms, before = norms_around(site)
        if isinstance(norm := norms.before, nn.Module) and isinstance(states := kept.get(before), Tensor):
            return RecomputedActivation(site, norm, norm, states)
    return None


def derive_later(site: HookSite, kept: Mapping[str, Tensor | RecomputedActivation]) -> RecomputedActivation:
    """A derived site other than the logits as a function of activations that are kept."""
    owner: Any = site.owner
    run = partial(results_of_heads, owner) if site.point == "results" else partial(_scale_of_sum, owner)
    return RecomputedActivation(site, owner, run, *(kept[name] for name in site.sources))


def results_of_heads(module: Any, heads: Tensor) -> Tensor:
    """What each head of an attention writes: head_h W_o,h   (B, H, T, D) → (B, H, T, M)"""
    check_float_weights(module)
    return torch.einsum("bhtd,mhd->bhtm", heads, module.head_outputs())


def _scale_of_sum(norm: Any, *states: Tensor) -> Tensor:
    return norm_scale(norm, reduce(torch.add, states))[..., None]


def logits_of_states(model: Model, masks: Mapping[str, Tensor], states: Tensor) -> Tensor:
    """The logits of a model's head, from its final states."""
    if model.class_head is not None:
        return model.class_head(states, mask_from_padding(masks.get("padding_mask")))
    if model.head is None:
        raise ValueError("this model has no head, so it has no logits")
    return model.head(states, model.output_table)
