"""Chance in training without state: before each batch every generator is seeded from (seed, the batch's number).

What a run draws is then a function of where it stands. Nothing of the generators needs to be stored, a resumed run
continues bit for bit, and dropout is the same whether one process runs all batches of a step or several share them.
"""

from __future__ import annotations

import random

import numpy as np
import torch

from ..data.hashing import stable_key

__all__ = ["seed_everything"]


def seed_everything(seed: int, what: str, number: int = 0) -> None:
    """Seed Python's, numpy's and torch's generators, on every device."""
    key = stable_key("training", what, seed, number)
    random.seed(key)
    np.random.seed(key % 2**32)
    torch.manual_seed(key % 2**63)
