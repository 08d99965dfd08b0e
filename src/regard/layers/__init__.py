"""Layers: embeddings of tokens, positions and image patches, norms, feed-forward networks, rotary positions."""

from __future__ import annotations

from .embeddings import Embeddings, TokenEmbedding
from .feedforward import ACTIVATIONS, FEEDFORWARD_KINDS, GATED, OTHER_NAMES, FeedForward, activation_function
from .norms import NORM_KINDS, LayerNorm, LayerScale, RMSNorm, TanhGate, make_norm
from .patches import PatchEmbedding, RegionEmbedding, VisionEmbeddings, box_geometry, interpolate_positions
from .positions import LAYOUTS, Learned, Sinusoidal
from .rope import Rope, rotate

# fmt: off
__all__ = [
    "ACTIVATIONS", "FEEDFORWARD_KINDS", "GATED", "LAYOUTS", "NORM_KINDS", "OTHER_NAMES", "Embeddings",
    "FeedForward", "LayerNorm", "LayerScale", "Learned", "PatchEmbedding", "RMSNorm", "RegionEmbedding", "Rope",
    "Sinusoidal", "TanhGate", "TokenEmbedding", "VisionEmbeddings", "activation_function", "box_geometry",
    "interpolate_positions", "make_norm", "rotate",
]
# fmt: on
