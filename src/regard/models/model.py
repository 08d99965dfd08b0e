"""What every model has: its config, its parameters' first values, caches to decode with, a way to disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import masks
from ..attention.cache import CrossCache, GrowingCache, ModelCache, RingCache, StaticCache
from ..attention.cache.static_cache import CacheDtype
from ..attention.masks import Mask
from ..config import ModelConfig
from . import parts
from .stack import Stack


class Model(nn.Module):
    """Base of all models. ``processor`` is what turns text or images into its inputs, where there is one."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.processor: Any = None
        self.provenance: Any = None  # where it was loaded from, and whether a manifest vouched for it

    def _finish(self) -> None:
        """Called by each model when its parts stand: first values."""
        if self.config.init_std is not None:
            initialise(self, self.config)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def n_parameters(self) -> int:
        """Numbers that are trained; tied ones count once."""
        return sum(p.numel() for p in self.parameters())

    def stacks(self) -> list[Stack]:
        return [module for module in self.modules() if isinstance(module, Stack)]

    def use_checkpointing(self, on: bool = True) -> None:
        """Trade time for memory: keep only the layers' inputs and compute each layer again in the backward pass."""
        for stack in self.stacks():
            stack.checkpointing = on

    def new_cache(
        self, batch: int | None = None, max_len: int | None = None, cache_dtype: CacheDtype = "model"
    ) -> ModelCache:
        """An empty cache for decoding: growing, or preallocated where batch and max_len are given.

        A preallocated one may round what it keeps of a text to bf16 or int8; what an encoder gave it stays as it is.
        """
        config = self.config
        beside_encoder = config.architecture == "encoder-decoder"
        n_layers = config.n_decoder_layers or config.n_layers if beside_encoder else config.n_layers
        n_heads = config.n_decoder_heads or config.n_heads if beside_encoder else config.n_heads
        cross = [CrossCache() for _ in range(n_layers)] if beside_encoder else []
        if (batch is None) != (max_len is None):
            raise ValueError(f"batch={batch} and max_len={max_len}: give both to preallocate, neither to grow")
        if batch is None or max_len is None:
            if cache_dtype != "model":
                raise ValueError(f"cache_dtype={cache_dtype!r} is for a preallocated cache; give batch and max_len")
            return ModelCache([GrowingCache() for _ in range(n_layers)], cross)
        n_kv_heads, d_head = config.n_kv_heads or n_heads, config.d_head or config.d_model // n_heads
        dtype = next(self.parameters()).dtype
        layers = [
            StaticCache(batch, n_kv_heads, max_len, d_head, dtype, self.device, cache_dtype)
            if size is None or size >= max_len
            else RingCache(batch, n_kv_heads, size, d_head, dtype, self.device, cache_dtype=cache_dtype)
            for size in (parts.window_of(config, layer) for layer in range(n_layers))
        ]
        return ModelCache(layers, cross)

    def save(self, path: str | Path) -> Path:
        """Write a directory that ``regard.load`` and, where the architecture has a twin there, transformers opens."""
        from .. import io

        return io.save(self, path)


def padding_mask(keep: Tensor | None) -> Mask | None:
    """Which tokens are real, (B, T) booleans, as a mask."""
    return None if keep is None else masks.valid_keys(keep.bool())


def initialise(model: nn.Module, config: ModelConfig) -> None:
    """Normal weights of spread ``init_std``; what adds to the residual is smaller in deep pre-norm stacks (GPT-2)."""
    std = config.init_std
    assert std is not None
    for name, p in model.named_parameters():
        if p.dim() < 2:
            continue
        adds_to_residual = config.norm_place == "pre" and name.endswith(("w_o.weight", "w_out.weight"))
        nn.init.normal_(p, std=std / (2 * config.n_layers) ** 0.5 if adds_to_residual else std)
