"""Linear attention (being written)."""

from __future__ import annotations

from torch import Tensor

from .call import Call


def linear(call: Call) -> Tensor:
    raise NotImplementedError
