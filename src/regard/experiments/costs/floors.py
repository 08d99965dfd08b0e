"""Floors under times: operations at a device's best speed, or bytes that must move at its bandwidth, the longer one.

Weights and caches are taken to lie in the device's memory: what is so small that it stays in the processor's own cache
does not move, and only its operations are a floor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...config import ModelConfig
from ...config.mixers import keys_per_query
from ...models.flops import Flops, count, source_places, stacks_of
from .cache import CacheLayer
from .devices import Device
from .memory import TrainingMemory
from .parameters import Weights
from .pieces import Setting


@dataclass(frozen=True)
class Floor:
    """The longer of computing and moving at the device's figures: a floor where those are its ceilings."""

    compute: float
    """Seconds that the operations take at the device's best."""
    bandwidth: float
    """Seconds that the bytes take which have to move."""
    measured: float | None = None
    """The longer of both at the speeds that were measured; None where none were for this precision."""

    @property
    def seconds(self) -> float:
        return max(self.compute, self.bandwidth)

    @property
    def bound(self) -> str:
        return "compute" if self.compute >= self.bandwidth else "memory bandwidth"


def floors_of(
    config: ModelConfig,
    device: Device,
    setting: Setting,
    weights: list[Weights],
    flops: list[Flops],
    memory: TrainingMemory | None,
    cache: list[CacheLayer],
) -> dict[str, Floor]:
    size = setting.width
    fused = setting.attention == "fused"
    forward = sum(part.forward_seen if fused else part.forward for part in flops)
    backward = sum(part.backward_seen if fused else part.backward for part in flops)
    looked_up = {("embedding", "tokens"), ("embedding", "target tokens"), ("embedding", "positions")}
    read = _multiplied(config, (part for part in weights if (part.part, part.kind) not in looked_up))
    found = {"forward pass": _floor(device, setting, forward, size * read)}
    if memory is not None:
        number, passes = sum(part.number for part in weights), setting.accumulate
        again = forward if setting.checkpointing else 0.0
        # Weights are read forward and backward, and what is kept is written and read; then, once a step, gradients are
        # written and read, and weights, the optimiser's state and the moving average read and written.
        moved = passes * (2.0 * size * read + 2 * sum(memory.by_part.values()))
        moved += 8.0 * number + 8.0 * number + 2 * memory.optimiser + 2 * memory.ema
        found["training step"] = _floor(device, setting, passes * (forward + backward + again), moved)
    if cache and config.causal:
        found["one token of each text"] = _token(config, device, setting, weights, cache)
    return found


def _floor(device: Device, setting: Setting, operations: float, moved: float) -> Floor:
    reached = device.reached if setting.precision != "fp32" else None
    measured = None if reached is None else max(operations / reached.half, moved / reached.bandwidth)
    return Floor(operations / device.peak(setting.precision), moved / device.bandwidth, measured)


def _multiplied(config: ModelConfig, some: Iterable[Weights]) -> float:
    """Numbers that every pass reads. A table is only looked up, but one tied to the output matrix is read as that."""
    number = sum(part.number for part in some)
    tied = config.tie_head and config.head in ("lm", "masked-lm")
    return number + (config.output_vocab_size * (config.d_embed or config.d_model) if tied else 0)


def _token(
    config: ModelConfig, device: Device, setting: Setting, weights: list[Weights], cache: list[CacheLayer]
) -> Floor:
    """The last token of a text as long as ``length``: the decoder's weights are read, and the places it may look at."""
    read = _multiplied(config, (part for part in weights if part.part in ("decoder", "head")))
    moved = setting.width * (read - _source_only(config, setting))
    moved += sum(one.place * _places_read(config, setting, one) for one in cache)
    return _floor(device, setting, last_token(config, setting), moved)


def last_token(config: ModelConfig, setting: Setting) -> float:
    """Operations of the last token of each text: those of the whole text less those of a text one token shorter.

    Of a text of one token the second stands in: the first has the source's keys computed, too.
    """
    length = max(2, setting.length)
    source = _source(config, setting)

    def until(n: int) -> float:
        parts = count(config, setting.batch, n, source)
        return sum(part.forward_seen for part in parts if part.part in ("decoder", "head"))

    return until(length) - until(length - 1)


def _places_read(config: ModelConfig, setting: Setting, one: CacheLayer) -> float:
    """All that are kept, or as many as the pattern of a sparse model lets the last token see."""
    if one.kind != "all" or config.sparsity == "none" or setting.length == 1:
        return one.tokens
    met, before = (n * keys_per_query(config, one.layer, n, causal=True) for n in (setting.length, setting.length - 1))
    return met - before


def _source(config: ModelConfig, setting: Setting) -> int | None:
    if config.architecture == "recurrent":
        return setting.length if setting.source_length is None else setting.source_length
    if config.architecture == "encoder-decoder":
        return source_places(config, setting.length, setting.source_length)
    return None


def _source_only(config: ModelConfig, setting: Setting) -> float:
    """Weights of the decoder that make keys and values of a source: done with before the first token."""
    if config.architecture == "recurrent":
        return config.d_model**2 if config.alignment in ("additive", "concat") else 0
    if config.architecture != "encoder-decoder":
        return 0
    stack = stacks_of(config, setting.length, setting.source_length)[-1]
    each = 2 * stack.kv_width * (config.d_model + int(config.qkv_bias))
    return each * (1 if config.share_layers else stack.n_layers)
