"""What an encoder reads: text vectors, an image as patches, or given region features."""

from __future__ import annotations

from torch import nn

from ..config import ModelConfig
from ..layers import Learned, PatchEmbedding, RegionEmbedding, Sinusoidal, VisionEmbeddings
from . import parts


def source_embeddings(config: ModelConfig) -> nn.Module:
    """The encoder's first part. Text brings vectors of the token table, which belongs to the model."""
    if config.source == "text":
        return parts.embeddings(config, config.max_len)
    norm = parts.norm(config) if config.embedding_norm else None
    if config.source == "regions":
        return RegionEmbedding(
            config.d_region, d_model=config.d_model, d_box=config.d_box, norm=norm, dropout=config.embedding_dropout
        )
    patches = PatchEmbedding(config.image_size, config.patch_size, config.n_channels, config.d_model)
    n_places = (config.image_size // config.patch_size) ** 2 + 1
    position: Learned | Sinusoidal | None = None
    if config.positions == "learned":
        position = Learned(n_places, config.d_model)
    elif config.positions == "sinusoidal":
        position = Sinusoidal(config.d_model, layout=config.sinusoid_layout)
    return VisionEmbeddings(patches, position=position, norm=norm, dropout=config.embedding_dropout)
