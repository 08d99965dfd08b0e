"""Times that cannot be undercut: operations at a device's best speed, or bytes at its bandwidth, the longer one."""

from __future__ import annotations

from dataclasses import dataclass

from ...config import ModelConfig
from ...models.flops import Flops, stacks_of
from .cache import CacheLayer
from .devices import Device
from .memory import TrainingMemory
from .parameters import Weights
from .pieces import Setting


@dataclass(frozen=True)
class Floor:
    """A time that cannot be undercut on a device: the longer of computing and moving."""

    compute: float
    """Seconds that the operations take at the device's best."""
    bandwidth: float
    """Seconds that the bytes take which have to move."""

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
    number, size = sum(part.number for part in weights), setting.width
    peak = device.peak(setting.precision)
    fused = setting.attention == "fused"
    forward = sum(part.forward_seen if fused else part.forward for part in flops)
    backward = sum(part.backward_seen if fused else part.backward for part in flops)
    found = {"forward pass": Floor(forward / peak, size * number / device.bandwidth)}
    if memory is not None:
        again = forward if setting.checkpointing else 0.0
        # Weights are read forward and backward, gradients written, and all of it goes through the optimiser once.
        states = 2 * memory.optimiser + 2 * memory.ema
        moved = 2 * size * number + 8.0 * number + 8.0 * number + states + 2 * sum(memory.by_part.values())
        found["training step"] = Floor((forward + backward + again) / peak, moved / device.bandwidth)
    if cache:
        found["one token of each text"] = _token(config, device, setting, weights, flops, cache)
    return found


def _token(
    config: ModelConfig,
    device: Device,
    setting: Setting,
    weights: list[Weights],
    flops: list[Flops],
    cache: list[CacheLayer],
) -> Floor:
    """The last token of a text as long as ``length``: all weights of the decoder and the whole cache are read."""
    own = [part for part in flops if part.part in ("decoder", "head")]
    operations = sum(part.forward for part in own if part.kind != "cross projections") / setting.length
    if config.architecture == "encoder-decoder":  # q and the output; keys of the source are there
        stack = stacks_of(config, setting.length, setting.source_length)[-1]
        operations += stack.n_layers * 4.0 * setting.batch * config.d_model * stack.q_width
    read = sum(part.number for part in weights if part.part in ("decoder", "head"))
    if config.tie_head and config.head == "lm":
        read += config.output_vocab_size * (config.d_embed or config.d_model)
    moved = setting.width * read + sum(one.bytes for one in cache)
    return Floor(operations / device.peak(setting.precision), moved / device.bandwidth)
