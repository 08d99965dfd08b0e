"""What a feed-forward network keeps of its hidden layer for the backward pass, by activation."""

from __future__ import annotations

from typing import NamedTuple


class Hidden(NamedTuple):
    """In hidden layers (B, T, d_ff) in the precision of the products."""

    saved: int
    """Kept between forward and backward pass."""
    backward: int
    """More than that on the way back: gradients, less what is free by then (the next product's input goes first)."""
    own_output: bool = False
    """Whether the activation keeps its own output: then dropout behind it makes one more."""


HIDDEN = {
    "relu": Hidden(1, 2, own_output=True),  # its output, which the next product keeps too
    "gelu": Hidden(2, 1),  # its input, and its output as the next product's input
    "gelu_tanh": Hidden(2, 1),
    "silu": Hidden(2, 1),
    "quick_gelu": Hidden(3, 2),  # x, σ(1.702 x) and their product
    "relu2": Hidden(2, 2, own_output=True),
    "swiglu": Hidden(4, 2),  # gate and up, f(gate), and the product
    "geglu": Hidden(4, 2),
    "geglu_tanh": Hidden(4, 2),
    "reglu": Hidden(4, 2, own_output=True),
}
