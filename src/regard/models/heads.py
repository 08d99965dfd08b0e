"""From hidden states to what a task asks for: token logits, masked-token logits, class logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import attend
from ..attention.masks import Mask
from ..config import ModelConfig
from ..layers import activation_function
from . import components


class TokenHead(nn.Module):
    """Logits over a vocabulary: scale · x Wᵀ + b. A tied head has no W of its own, it is handed the token table."""

    def __init__(self, config: ModelConfig, vocab_size: int, tied: bool) -> None:
        super().__init__()
        width = config.d_model
        self.scale = config.logit_scale
        self.transform = self.norm = None
        if config.head_transform:
            width = config.d_model if config.d_embed is None else config.d_embed
            self.transform = nn.Linear(config.d_model, width)
            self.norm = components.norm(config, width)
            self.activation = activation_function(config.head_activation or config.activation)
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, width))
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if config.head_bias else None
        if self.weight is not None:
            nn.init.normal_(self.weight, std=width**-0.5)

    def hidden(self, x: Tensor) -> Tensor:
        """What the output matrix is applied to (B, T, M); a fused loss takes it from here."""
        if self.transform is not None and self.norm is not None:
            x = self.norm(self.activation(self.transform(x)))
        return x if self.scale == 1.0 else x * self.scale

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """x (B, T, M) → (B, T, V)."""
        return F.linear(self.hidden(x), table if self.weight is None else self.weight, self.bias)


class ClassHead(nn.Module):
    """Class logits (B, classes) from a sequence: pool it, optionally a dense layer, then a linear map."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.pooler = Pooler(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.out = nn.Linear(config.d_model, config.n_classes)

    def forward(self, x: Tensor, mask: Mask | None = None) -> Tensor:
        return self.out(self.dropout(self.pooler(x, mask)))


class Pooler(nn.Module):
    """A sequence (B, T, M) as one vector (B, M): its first token, its mean, or a learned query's attention over it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kind = config.pooling
        self.dense = None if config.pooler == "none" else nn.Linear(config.d_model, config.d_model)
        self.activation = torch.tanh if config.pooler == "tanh" else F.relu
        self.query = nn.Parameter(torch.empty(config.d_model)) if config.pooling == "attention" else None
        if self.query is not None:
            nn.init.normal_(self.query, std=config.d_model**-0.5)

    def forward(self, x: Tensor, mask: Mask | None = None) -> Tensor:
        pooled = x[:, 0] if self.kind == "first" else self._gather(x, mask)
        return pooled if self.dense is None else self.activation(self.dense(pooled))

    def _gather(self, x: Tensor, mask: Mask | None) -> Tensor:
        """The mean is attention with equal scores; padding is kept out of both by the same mask."""
        states = x[:, None]  # (B, 1, T, M): one head
        query = torch.zeros_like(states[:, :, :1]) if self.query is None else self.query.expand_as(states[:, :, :1])
        return attend(query, states, states, mask=mask).output[:, 0, 0]
