"""Bytes of the cache that decoding keeps, layer by layer: exactly those of ``model.new_cache(batch, max_len)``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...config import ModelConfig
from ...models import parts
from ...models.flops import source_places, stacks_of
from ...models.recurrent.cache import StateCache

Numbers = Literal["fp32", "bf16", "int8"]
SIZES = {"fp32": 4, "bf16": 2, "int8": 1}
_INDEX = 8  # bytes of a position


@dataclass(frozen=True)
class CacheLayer:
    """What one layer keeps."""

    layer: int
    kind: Literal["all", "window", "cross", "state", "memory"]
    tokens: int
    """Places it keeps keys and values of."""
    bytes: int
    place: int
    """Of those, the keys and values of one place, or the state itself."""


def kv_cache(
    config: ModelConfig, batch: int, length: int, source_length: int | None = None, numbers: Numbers = "bf16"
) -> list[CacheLayer]:
    """Each layer's own, then what cross-attention keeps of the source, which is never rounded to int8."""
    if config.architecture == "encoder":
        return []
    size = SIZES[numbers]
    if config.architecture == "recurrent":
        return _recurrent(config, batch, length if source_length is None else source_length, max(2, size))
    stack = stacks_of(config, length, source_length)[-1]
    width = stack.kv_width
    found = []
    for layer in range(stack.n_layers):
        window = parts.window_of(config, layer)
        slots = length if window is None or window >= length else window
        place = 2 * batch * (width * size + (stack.n_kv_heads * 4 if numbers == "int8" else 0))  # and int8's scales
        held = (slots + 1) * (place + _INDEX) + _INDEX  # one place more, never read, takes what is padding
        found.append(CacheLayer(layer, "all" if slots == length else "window", slots, held, place))
    if stack.memory is not None:
        places = source_places(config, length, source_length)
        place = 2 * batch * width * max(2, size)
        found += [CacheLayer(layer, "cross", places, places * place, place) for layer in range(stack.n_layers)]
    return found


def _recurrent(config: ModelConfig, batch: int, source: int, size: int) -> list[CacheLayer]:
    """A state of one size however long the text, the last few of them, and the source as attention looks at it."""
    n_layers = config.n_decoder_layers or config.n_layers
    fed = config.alignment not in ("none", "additive") and config.input_feeding
    n_vectors = n_layers * (2 if config.cell == "lstm" else 1) + int(fed)
    kept = 1 + StateCache.kept
    state = batch * (n_vectors * config.d_model * size + _INDEX)
    found = [CacheLayer(0, "state", 1, kept * state, state)]
    if config.alignment != "none":
        n_tensors = 2 if config.alignment in ("additive", "concat") else 1
        place = n_tensors * batch * config.d_model * size
        found.append(CacheLayer(0, "memory", source, source * place, place))
    return found
