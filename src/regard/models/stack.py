"""A stack of layers: an encoder or a decoder without its embeddings."""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..attention import masks
from ..attention.biases import Bias
from ..attention.cache import ModelCache
from ..attention.edits import apply_edits_to_states
from ..attention.masks import Mask
from ..config import ModelConfig
from . import parts
from .block import Block, Memory, Surroundings


class Stack(nn.Module):
    """n layers and, after pre-norm layers, one last norm. ``causal`` hides the future, ``cross`` looks at a memory."""

    def __init__(
        self, config: ModelConfig, *, n_layers: int, n_heads: int, d_ff: int, causal: bool, cross: bool
    ) -> None:
        super().__init__()
        self.n_layers, self.causal = n_layers, causal
        self.checkpointing = False  # recompute each layer in the backward pass; set from outside
        rope = parts.rope(config, n_heads)
        self.blocks = nn.ModuleList(
            Block(config, n_heads, d_ff, cross=cross, mask=parts.layer_mask(config, layer, causal, cross), rope=rope)
            for layer in range(1 if config.share_layers else n_layers)
        )
        self.position_bias: Bias | None = parts.shared_bias(config, n_heads, bidirectional=not causal)
        self.norm = parts.norm(config) if config.norm_place == "pre" else None

    def forward(
        self,
        x: Tensor,
        *,
        mask: Mask | None = None,
        positions: Tensor | None = None,
        memory: Memory | None = None,
        cache: ModelCache | None = None,
    ) -> Tensor:
        """x (B, T, M) → (B, T, M). ``mask`` says what is padding; the stack itself knows whether it is causal."""
        if self.causal:
            mask = masks.causal() if mask is None else masks.causal() & mask
        around = Surroundings(mask, positions, self.position_bias, memory)
        x = apply_edits_to_states(self, x)
        for layer in range(self.n_layers):
            block = self.blocks[layer % len(self.blocks)]
            own = None if cache is None else cache.layers[layer]
            cross = cache.cross[layer] if cache is not None and cache.cross else None
            if self.checkpointing and self.training:
                x = checkpoint(block, x, around, own, cross, use_reentrant=False)
            else:
                x = block(x, around, own, cross)
        return x if self.norm is None else self.norm(x)
