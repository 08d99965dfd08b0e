"""What every model with an encoder and a decoder has in common: read the source, then say the target."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor

from ..attention.cache import ModelCache
from .heads import TokenHead
from .model import Model


class SourceToTarget(Model):
    """Base of the encoder-decoders: a subclass says how to ``encode`` and how to ``decode``."""

    head: TokenHead | None

    @property
    @abstractmethod
    def output_table(self) -> Tensor:
        """The target's token table, which a tied head uses too."""

    @abstractmethod
    def encode(self, source: Tensor, *, keep: Tensor | None = None, positions: Tensor | None = None) -> Any:
        """What the decoder looks at."""

    @abstractmethod
    def decode(
        self,
        target: Tensor,
        memory: Any,
        *,
        keep: Tensor | None = None,
        positions: Tensor | None = None,
        cache: ModelCache | None = None,
    ) -> Tensor:
        """The decoder's states (B, T, M) for target tokens."""

    def hidden(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_keep: Tensor | None = None,
        target_keep: Tensor | None = None,
        source_positions: Tensor | None = None,
        target_positions: Tensor | None = None,
        cache: ModelCache | None = None,
    ) -> Tensor:
        """The decoder's states (B, T, M), before the head."""
        memory = self.encode(source, keep=source_keep, positions=source_positions)
        return self.decode(target, memory, keep=target_keep, positions=target_positions, cache=cache)

    def forward(self, source: Tensor, target: Tensor, **options: Any) -> Tensor:
        """source and target → next-token logits (B, T, V); ``options`` are those of ``hidden``."""
        x = self.hidden(source, target, **options)
        return x if self.head is None else self.head(x, self.output_table)
