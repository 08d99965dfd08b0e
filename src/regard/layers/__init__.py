"""From ids and pixels to vectors, and what stands between the attentions: norms and feed-forward networks."""

from __future__ import annotations

from .embeddings import Embeddings, TokenEmbedding
from .feedforward import ACTIVATIONS, FEEDFORWARD_KINDS, GATED, OTHER_NAMES, FeedForward, activation_function
from .norms import NORM_KINDS, LayerNorm, RMSNorm, make_norm
from .positions import LAYOUTS, Learned, Sinusoidal
from .rope import Rope, half_to_interleaved, interleaved_to_half, rotate
from .rope_scaling import SCALING_KINDS, RopeScaling
from .vision import PatchEmbedding, RegionEmbedding, VisionEmbeddings, box_geometry, interpolate_positions

__all__ = [
    "ACTIVATIONS",
    "FEEDFORWARD_KINDS",
    "GATED",
    "LAYOUTS",
    "NORM_KINDS",
    "OTHER_NAMES",
    "SCALING_KINDS",
    "Embeddings",
    "FeedForward",
    "LayerNorm",
    "Learned",
    "PatchEmbedding",
    "RMSNorm",
    "RegionEmbedding",
    "Rope",
    "RopeScaling",
    "Sinusoidal",
    "TokenEmbedding",
    "VisionEmbeddings",
    "activation_function",
    "box_geometry",
    "half_to_interleaved",
    "interleaved_to_half",
    "interpolate_positions",
    "make_norm",
    "rotate",
]
