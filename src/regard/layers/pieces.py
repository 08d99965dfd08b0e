"""Long texts a piece at a time, where every token is computed by itself and what is wide in between need not last."""

from __future__ import annotations

import torch
from torch import Tensor

PIECE = 512
"""Tokens of a piece: enough for a matrix product to run at full speed."""


def is_long(x: Tensor) -> bool:
    """Whether x (B, T, M) is better cut: on a CPU, where no gradient will ask for what was computed on the way."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or x.dim() != 3 or x.device.type != "cpu":
        return False
    return x.shape[1] >= 4 * PIECE
