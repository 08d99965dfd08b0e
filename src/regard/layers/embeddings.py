"""Token embeddings, and the sum of token, segment and position embeddings that is the input of a stack."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..foundation.checks import check_positive
from .positions import Learned, Sinusoidal, check_ids


class TokenEmbedding(nn.Embedding):
    """One vector per token, times ``scale`` (√d_model in Vaswani et al. 2017, §3.4).   ids (B, T) → (B, T, M)

    Padding ids are embedded like any others; attention masks exclude them.
    """

    def __init__(self, vocab_size: int, d_model: int, scale: float = 1.0) -> None:
        check_positive(vocab_size=vocab_size, d_model=d_model)
        super().__init__(vocab_size, d_model)
        self.vocab_size, self.d_model, self.scale = vocab_size, d_model, float(scale)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)

    def forward(self, ids: Tensor) -> Tensor:
        if ids.dim() != 2:
            raise ValueError(f"token ids must be (batch, length), got shape {tuple(ids.shape)}")
        check_ids("token ids", ids, 0, self.vocab_size, "vocab_size")
        vectors = F.embedding(ids, self.weight)
        return vectors if self.scale == 1.0 else vectors * self.scale

    def extra_repr(self) -> str:
        return f"{self.vocab_size}, {self.d_model}, scale={self.scale}"


class Embeddings(nn.Module):
    """projection(dropout(norm(token[ids] + segment[segments] + position[positions]))), where every part is optional.

    token       None if the model owns the table (shared by source, target and output) and passes vectors as ids
    segment     table for sentence A / B (BERT); all tokens are in segment 0 by default
    position    Sinusoidal or Learned; None if attention encodes the positions (RoPE, ALiBi, T5)
    projection  from a narrower table to d_model (ALBERT, Lan et al. 2020, §3.1)
    ids (B, T), positions (T,) or (B, T), by default 0 … T−1, segments (B, T) → (B, T, M)
    """

    def __init__(
        self,
        token: TokenEmbedding | None,
        *,
        segment: TokenEmbedding | None = None,
        position: Sinusoidal | Learned | None = None,
        norm: nn.Module | None = None,
        projection: nn.Linear | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        for name, part in (("segment", segment), ("position", position)):
            if token is not None and part is not None and part.d_model != token.d_model:
                raise ValueError(f"{name} has d_model={part.d_model}, but token has d_model={token.d_model}")
        if token is not None and projection is not None and projection.in_features != token.d_model:
            width = projection.in_features
            raise ValueError(f"projection expects width {width}, but token has d_model={token.d_model}")
        self.token, self.segment, self.position = token, segment, position
        self.norm, self.projection = norm, projection
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor, positions: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        x: Tensor = ids if self.token is None else self.token(ids)  # (B, T, M)
        if self.segment is not None:
            x = x + (self.segment.weight[0] * self.segment.scale if segments is None else self.segment(segments))
        elif segments is not None:
            raise ValueError("segments were given, but these embeddings have no segment table")
        if self.position is not None:
            length, max_len = x.shape[1], self.position.max_len
            if positions is None and max_len is not None and length > max_len:
                raise ValueError(f"the sequence has length {length}, but positions end at max_len={max_len}")
            positions = torch.arange(length, device=x.device) if positions is None else positions
            x = x + self.position(positions, x.dtype)
        if self.norm is not None:
            x = self.norm(x)
        x = self.dropout(x)
        return x if self.projection is None else self.projection(x)
