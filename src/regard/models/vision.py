"""What an encoder reads: text vectors, an image as patches, or given region features."""

from __future__ import annotations

from torch import Tensor, nn

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


def vision_inputs(config: ModelConfig, source: Tensor) -> tuple[Tensor, ...]:
    """What the embeddings of an image or its regions take: boxes come as the last d_box numbers of each region."""
    if config.source == "regions" and config.d_box:
        width = config.d_region + config.d_box
        if source.shape[-1] != width:
            raise ValueError(f"regions have width {source.shape[-1]}, but d_region + d_box = {width}")
        return source.split((config.d_region, config.d_box), dim=-1)
    size = tuple(source.shape[-2:])
    if config.shifted_windows is not None and size != (config.image_size, config.image_size):
        raise ValueError(
            f"shifted_windows={config.shifted_windows} fit image_size={config.image_size}, not images of {size}"
        )
    return (source,)
