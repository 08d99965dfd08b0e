"""Two towers, one for images and one for texts, whose vectors are compared (CLIP, SigLIP); zero-shot classification."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from ..layers import TokenEmbedding
from . import components
from .base_model import Model, mask_from_padding
from .block import Stack
from .components import Pooler, source_embeddings
from .transformer import embedding_positions

_INITIAL_SCALE = {"softmax": 1 / 0.07, "sigmoid": 10.0}
_INITIAL_BIAS = -10.0  # most pairs of a batch are negative (Zhai et al. 2023, §3.2)


class TwoTower(Model):
    """Images and texts as unit vectors in one space, close if they match (Radford et al. 2021).

    ``encoder`` is the image tower, ``decoder`` the text tower, causal (CLIP) or not (SigLIP).
    pixels (N, C, height, width), tokens (B, T) → logits (N, B) = exp(log_scale) · images · textsᵀ + bias
    """

    head = None
    token: TokenEmbedding

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        text = config.text_tower
        self.token = components.token_table(text, config.vocab_size)
        self.embeddings = source_embeddings(config)
        self.target_embeddings = components.embeddings(text, text.max_len)
        self.encoder: Stack = Stack(config, causal=False)
        self.decoder: Stack = Stack(text, causal=text.architecture == "decoder" and text.causal)
        self.pooler, self.text_pooler = Pooler(config), Pooler(text)
        project_both = config.d_shared is not None
        width = config.d_model if config.d_shared is None else config.d_shared
        self.image_projection = nn.Linear(config.d_model, width, bias=False) if project_both else None
        self.text_projection = nn.Linear(text.d_model, width, bias=not project_both)
        self.log_scale = nn.Parameter(torch.empty(1))
        self.bias = nn.Parameter(torch.empty(1)) if config.contrast == "sigmoid" else None
        self._initialise()
        nn.init.constant_(self.log_scale, math.log(_INITIAL_SCALE[config.contrast]))
        if self.bias is not None:
            nn.init.constant_(self.bias, _INITIAL_BIAS)

    def image_states(self, pixels: Tensor) -> Tensor:
        """The image tower's last states (B, patches, M)."""
        return self.encoder(self.embeddings(pixels))

    def text_states(self, tokens: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """The text tower's last states (B, T, M)."""
        x = self.target_embeddings(self.token(tokens), embedding_positions(self.config.text_tower, tokens))
        return self.decoder(x, mask=mask_from_padding(padding_mask))

    def embed_images(self, pixels: Tensor) -> Tensor:
        """Unit vectors (B, D)."""
        x = self.pooler(self.image_states(pixels))
        return F.normalize(x if self.image_projection is None else self.image_projection(x), dim=-1)

    def embed_texts(self, tokens: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Unit vectors (B, D); ``padding_mask`` (B, T) is True at real tokens."""
        states = self.text_states(tokens, padding_mask)
        pooled = self.text_pooler(states, mask_from_padding(padding_mask), tokens)
        return F.normalize(self.text_projection(pooled), dim=-1)

    def compare(self, images: Tensor, texts: Tensor) -> Tensor:
        """Logits (N, B) of vectors (N, D) and (B, D)."""
        logits = self.log_scale.exp() * (images @ texts.T)
        return logits if self.bias is None else logits + self.bias

    def hidden(self, pixels: Tensor, tokens: Tensor | None = None, *, padding_mask: Tensor | None = None) -> Tensor:
        """The last states of the text tower (B, T, M); without a text, of the image tower (B, patches, M)."""
        return self.image_states(pixels) if tokens is None else self.text_states(tokens, padding_mask)

    def forward(self, pixels: Tensor, tokens: Tensor, *, padding_mask: Tensor | None = None) -> Tensor:
        return self.compare(self.embed_images(pixels), self.embed_texts(tokens, padding_mask))


class ZeroShotClassifier(Model):
    """An image classifier built from class names: an image's logits compare it with the text of each class.

    pixels (B, C, height, width) → logits (B, classes)
    """

    is_encoder_only = True
    head = None
    classes: Tensor

    def __init__(self, model: TwoTower, classes: Tensor) -> None:
        """``classes``: one unit vector per class (classes, D)."""
        fields: dict[str, Any] = {"text_model": None, "d_shared": None, "contrast": "softmax"}
        fields |= {"architecture": "encoder", "head": "classify", "n_classes": len(classes)}
        super().__init__(model.config.with_(**fields))
        self.encoder, self.embeddings = model.encoder, model.embeddings  # before two_tower: sites get these names
        self.two_tower = model
        self.register_buffer("classes", classes, persistent=False)

    def hidden(self, pixels: Tensor) -> Tensor:
        """The last states of the image tower (B, patches, M)."""
        return self.two_tower.image_states(pixels)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.two_tower.compare(self.two_tower.embed_images(pixels), self.classes)


@torch.no_grad()
def mean_of_templates(vectors: Sequence[Tensor]) -> Tensor:
    """One vector per class (classes, D): the normalised mean over prompt templates (Radford et al. 2021, §3.1.4)."""
    return F.normalize(torch.stack(list(vectors)).mean(0), dim=-1)
