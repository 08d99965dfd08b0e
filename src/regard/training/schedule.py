"""The learning rate as a pure function of the step: nothing to store, nothing to resume."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..config import TrainConfig

Schedule = Callable[[int], float]
"""The factor on the peak learning rate at a step, counted from 1."""


def schedule_of(train: TrainConfig, d_model: int) -> Schedule:
    """The schedule ``train`` describes. ``train.lr`` is the peak of every one of them, the paper's included.

    It is on ``d_model`` that the paper's peak depends: train.lr=paper_lr(d_model, train.warmup) gives its own rates.
    """
    warmup, steps, floor = train.warmup, train.steps, train.floor
    if train.schedule == "noam":
        return noam(warmup)
    if train.schedule == "cosine":
        return cosine(warmup, steps, floor)
    if train.schedule == "wsd":
        return warmup_stable_decay(warmup, steps, floor=floor)
    return constant(warmup)


def paper_lr(d_model: int, warmup: int) -> float:
    """The peak of the paper's learning rate, d_model^-0.5 · warmup^-0.5: 7e-4 for the base model's 512 and 4,000."""
    return (d_model * max(warmup, 1)) ** -0.5


def noam(warmup: int) -> Schedule:
    """The paper's (Vaswani et al. 2017, eq. 3), scaled so that its peak, at the end of the warm-up, is 1.

    factor = min(step^-0.5, step · warmup^-1.5) · warmup^0.5, times the peak of ``paper_lr``: the paper's rates.
    """
    warmup = max(warmup, 1)
    return lambda step: min((warmup / step) ** 0.5, step / warmup)


def cosine(warmup: int, steps: int, floor: float = 0.0) -> Schedule:
    """Linear warm-up, then half a cosine down to ``floor`` at the last step (Loshchilov & Hutter 2017)."""

    def factor(step: int) -> float:
        if step <= warmup:
            return step / max(warmup, 1)
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))

    return factor


def warmup_stable_decay(warmup: int, steps: int, decay: float = 0.2, floor: float = 0.0) -> Schedule:
    """Up, level, and down in a straight line over the last ``decay`` share of the steps (Hu et al. 2024)."""
    start = max(warmup, steps - round(decay * steps))

    def factor(step: int) -> float:
        if step <= warmup:
            return step / max(warmup, 1)
        if step <= start:
            return 1.0
        return floor + (1 - floor) * max(0.0, (steps - step) / max(1, steps - start))

    return factor


def constant(warmup: int) -> Schedule:
    """Linear warm-up, then level."""
    return lambda step: min(1.0, step / max(warmup, 1))
