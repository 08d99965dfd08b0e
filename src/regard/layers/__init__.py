"""Embeddings of tokens, positions and image patches; norms, feed-forward networks and rotary positions."""

from __future__ import annotations

from .embeddings import (
    LAYOUTS,
    Embeddings,
    Learned,
    PatchEmbedding,
    RegionEmbedding,
    Sinusoidal,
    TokenEmbedding,
    VisionEmbeddings,
    box_geometry,
    interpolate_positions,
)
from .feedforward import (
    ACTIVATIONS,
    FEEDFORWARD_KINDS,
    GATED,
    NORM_KINDS,
    OTHER_NAMES,
    FeedForward,
    LayerNorm,
    RMSNorm,
    activation_function,
    make_norm,
)
from .rope import SCALING_KINDS, Rope, RopeScaling, half_to_interleaved, interleaved_to_half, rotate

# fmt: off
__all__ = [
    "ACTIVATIONS", "FEEDFORWARD_KINDS", "GATED", "LAYOUTS", "NORM_KINDS", "OTHER_NAMES", "SCALING_KINDS", "Embeddings",
    "FeedForward", "LayerNorm", "Learned", "PatchEmbedding", "RMSNorm", "RegionEmbedding", "Rope", "RopeScaling",
    "Sinusoidal", "TokenEmbedding", "VisionEmbeddings", "activation_function", "box_geometry", "half_to_interleaved",
    "interleaved_to_half", "interpolate_positions", "make_norm", "rotate",
]
# fmt: on
