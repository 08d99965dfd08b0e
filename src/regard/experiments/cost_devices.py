"""Device speeds from the makers' figures, and lower bounds of times that follow from them; a CPU is measured instead.

A floor is the larger of two times: operations at the device's peak speed, and bytes to be moved at its bandwidth.
Weights and caches are assumed to be in the device's memory. A model small enough to stay in the processor's own cache
moves nothing, and only the time of its operations is a lower bound.
"""

from __future__ import annotations

import csv
import os
import timeit
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.resources import files

import torch
from torch import Tensor

from ..config import ModelConfig
from ..config.mixers import keys_per_query
from ..errors import UsageError
from ..foundation.checks import did_you_mean
from ..models.model_flops import Flops, count, source_places, stacks_of
from ..training.precision import PEAKS, WITHOUT_BF16, peak_of
from .flops_estimate import CacheLayer, ParameterGroup
from .memory_estimate import Precision, Setting, TrainingMemory


@dataclass(frozen=True)
class MeasuredSpeed:
    """Speeds that a program reached on a device; below the maker's figures, so times at them are not lower bounds."""

    half: float
    bandwidth: float
    how: str


@dataclass(frozen=True)
class Device:
    """The speeds of one device."""

    name: str
    half: float  # operations per second in dense bf16 or fp16 matrix products
    single: float  # the same in fp32, or in TF32, which training uses, if the device has it
    bandwidth: float  # bytes per second to and from memory
    memory: float | None  # bytes, a GB being 10⁹; None: unknown
    half_type: Precision = "bf16"  # fp16 on devices without bf16
    single_type: str = "TF32"  # the type that ``single`` is the speed of: TF32 or fp32
    source: str = "the maker's figures, dense"
    ceiling: bool = True  # whether the speeds are upper limits; False for a CPU, whose speeds are measured
    reached: MeasuredSpeed | None = None

    @property
    def wording(self) -> str:
        """How tables describe the times; at measured speeds they are not lower bounds."""
        return "at least" if self.ceiling else "at measured speed"


# gpu is the name in the table of peak speeds in training.precision; memory in GB, bandwidth in TB/s.
with (files(__package__) / "cost_devices.tsv").open(encoding="utf-8") as _lines:
    _TABLE = {row["name"]: row for row in csv.DictReader(_lines, delimiter="\t")}
_MEASURED = {"h200": MeasuredSpeed(804e12, 4.27e12, "one bf16 product of 8192³, one copy (torch 2.11)")}
CPU = "cpu"
COST_DEVICES = (*_TABLE, CPU)


def find_device(name: str) -> Device:
    """The device called ``name``; ``cpu`` is this machine, which is measured briefly."""
    if name == CPU:
        return _measure_cpu()
    if name not in _TABLE:
        known = ", ".join(COST_DEVICES)
        raise UsageError(f"there is no device {name!r}{did_you_mean(name, COST_DEVICES)} (all: {known})")
    row, gpu = _TABLE[name], _TABLE[name]["gpu"]
    half, single = peak_of(gpu, "fp16"), peak_of(gpu, "fp32", tf32=True)
    assert half is not None and single is not None
    half_type: Precision = "fp16" if gpu in WITHOUT_BF16 else "bf16"
    single_type = "fp32" if PEAKS[gpu][1] is None else "TF32"
    bandwidth, memory = float(row["bandwidth"]) * 1e12, float(row["memory"]) * 1e9
    return Device(name, half, single, bandwidth, memory, half_type, single_type, reached=_MEASURED.get(name))


def _measure_cpu() -> Device:
    """This machine, by the best of a few matrix products and copies."""
    n = 1024
    matrices = [torch.ones(n, n, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    single, half = (2 * n**3 / _best_time(torch.mm, x, x.clone()) for x in matrices)
    source = torch.zeros(1 << 27, dtype=torch.uint8)  # larger than most caches
    bandwidth = 2 * source.numel() / _best_time(torch.zeros_like(source).copy_, source)
    try:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        memory = float(pages * size) if pages > 0 and size > 0 else None
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf, and other systems may lack these names
        memory = None
    how = "measured here, now, by one product and one copy"
    return Device(CPU, half, single, bandwidth, memory, "bf16", "fp32", how, ceiling=False)


def _best_time(work: Callable[..., object], *arguments: Tensor) -> float:
    """Seconds of the fastest of three runs, after a warm-up."""
    return min(timeit.repeat(lambda: work(*arguments), number=1, repeat=4)[1:])


# ------------------------------------------------------------------------------------- lower bounds of times


@dataclass(frozen=True)
class Floor:
    """Seconds at the device's speeds: a lower bound if those are upper limits."""

    compute: float  # time of the operations at the device's peak speed
    bandwidth: float  # time to move the bytes
    measured: float | None = None  # the larger of the two at measured speeds; None if those are unknown

    @property
    def seconds(self) -> float:
        return max(self.compute, self.bandwidth)

    @property
    def bound(self) -> str:
        return "compute" if self.compute >= self.bandwidth else "memory bandwidth"


def time_floors(
    config: ModelConfig,
    device: Device,
    setting: Setting,
    groups: list[ParameterGroup],
    flops: list[Flops],
    memory: TrainingMemory | None,
    cache: list[CacheLayer],
) -> dict[str, Floor]:
    """Floors for a forward pass, a training step, and decoding the last token of each text."""
    size, fused = setting.width, setting.attention == "fused"
    forward = sum(part.forward_seen if fused else part.forward for part in flops)
    backward = sum(part.backward_seen if fused else part.backward for part in flops)
    lookups = {("embedding", "tokens"), ("embedding", "target tokens"), ("embedding", "positions")}
    n_read = _numbers_read(config, (group for group in groups if (group.part, group.kind) not in lookups))
    floors = {"forward pass": _floor(device, setting, forward, size * n_read)}
    if memory is not None:
        number, passes = sum(group.number for group in groups), setting.accumulate
        recomputed = forward if setting.checkpointing else 0.0
        # Each pass reads the weights forward and backward, and writes and reads the saved tensors. Each step writes and
        # reads the gradients, and reads and writes the weights, the optimiser's state and the moving average.
        moved = passes * (2.0 * size * n_read + 2 * sum(memory.by_part.values()))
        moved += 8.0 * number + 8.0 * number + 2 * memory.optimiser + 2 * memory.ema
        floors["training step"] = _floor(device, setting, passes * (forward + backward + recomputed), moved)
    if cache and config.causal:
        floors["one token of each text"] = _decode_floor(config, device, setting, groups, cache)
    return floors


def _floor(device: Device, setting: Setting, operations: float, moved: float) -> Floor:
    reached = device.reached if setting.precision != "fp32" else None
    measured = None if reached is None else max(operations / reached.half, moved / reached.bandwidth)
    peak = device.single if setting.precision == "fp32" else device.half
    return Floor(operations / peak, moved / device.bandwidth, measured)


def _numbers_read(config: ModelConfig, groups: Iterable[ParameterGroup]) -> float:
    """The weights that every pass reads: not embedding tables, except one that is also the output matrix."""
    number = sum(group.number for group in groups)
    tied = config.tie_head and config.head in ("lm", "masked-lm")
    return number + (config.output_vocab_size * (config.d_embed or config.d_model) if tied else 0)


def _decode_floor(
    config: ModelConfig, device: Device, setting: Setting, groups: list[ParameterGroup], cache: list[CacheLayer]
) -> Floor:
    """The last token of a text reads the decoder's weights, and the cache at the positions that it attends to."""
    n_read = _numbers_read(config, (group for group in groups if group.part in ("decoder", "head")))
    moved = setting.width * (n_read - _source_projection_size(config, setting))
    for layer in cache:
        n = setting.length
        positions: float = layer.tokens
        if layer.kind == "all" and config.sparsity != "none" and n > 1:  # only the positions that the last token sees
            now, before = (t * keys_per_query(config, layer.layer, t, causal=True) for t in (n, n - 1))
            positions = now - before
        moved += layer.place * positions
    return _floor(device, setting, last_token_flops(config, setting), moved)


def last_token_flops(config: ModelConfig, setting: Setting) -> float:
    """Operations of the last token of each text: those of the whole text minus those of a text one token shorter.

    A text of one token is given the cost of a second token, because the first also computes the source's keys.
    """
    length, source = max(2, setting.length), source_tokens(config, setting)

    def operations(n: int) -> float:
        flops = count(config, setting.batch, n, source)
        return sum(part.forward_seen for part in flops if part.part in ("decoder", "head"))

    return operations(length) - operations(length - 1)


def source_tokens(config: ModelConfig, setting: Setting) -> int | None:
    """The number of source positions; None for a model without a source."""
    if config.architecture == "recurrent":
        return setting.length if setting.source_length is None else setting.source_length
    if config.architecture == "encoder-decoder":
        return source_places(config, setting.length, setting.source_length)
    return None


def _source_projection_size(config: ModelConfig, setting: Setting) -> float:
    """The decoder weights that project the source to keys and values, which are read for the first token only."""
    if config.architecture == "recurrent":
        return config.d_model**2 if config.alignment in ("additive", "concat") else 0
    if config.architecture != "encoder-decoder":
        return 0
    stack = stacks_of(config, setting.length, setting.source_length)[-1]
    each = 2 * stack.kv_width * (config.d_model + int(config.qkv_bias))
    return each * (1 if config.share_layers else stack.n_layers)
