"""What a device can do at most, by its maker's figures: the floor under every time. A CPU is measured instead."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

from ...errors import UsageError
from ...foundation.suggestions import did_you_mean
from ...training.precision import PEAKS, WITHOUT_BF16, peak_of

GB = 1e9


@dataclass(frozen=True)
class Reached:
    """What a program was seen to reach on such a device: less than the maker's figures, and no floor."""

    half: float
    bandwidth: float
    how: str


@dataclass(frozen=True)
class Device:
    """The speeds of one device."""

    name: str
    half: float
    """Operations a second in bf16 or fp16 matrix products, nothing left out as zeros (dense)."""
    single: float
    """The same in fp32; in TF32 where it has that, as training here uses it."""
    bandwidth: float
    """Bytes a second to and from memory."""
    memory: float | None
    """Bytes, a maker's GB as 10⁹ of them; None: not known."""
    half_type: str = "bf16"
    """fp16 on devices that came before bf16."""
    single_type: str = "TF32"
    """What ``single`` is the speed of: TF32 or fp32."""
    source: str = "the maker's figures, dense"
    ceiling: bool = True
    """Whether no program can be faster; a speed measured by one program can be beaten by another."""
    reached: Reached | None = None
    """What was measured beside the maker's figures."""

    def peak(self, precision: str) -> float:
        return self.single if precision == "fp32" else self.half


# The name a GPU gives itself (operations: the table of training.flops), memory in GB, bandwidth in TB/s.
_TABLE: dict[str, tuple[str, float, float]] = {
    "b200": ("B200", 180, 8.0),
    "h200": ("H200", 141, 4.8),
    "h100": ("H100", 80, 3.35),
    "h100-pcie": ("H100 PCIe", 80, 2.0),
    "a100": ("A100", 80, 2.039),
    "a100-40gb": ("A100", 40, 1.555),
    "a6000": ("A6000", 48, 0.768),
    "a10": ("A10", 24, 0.6),
    "l40s": ("L40S", 48, 0.864),
    "l4": ("L4", 24, 0.3),
    "rtx5090": ("5090", 32, 1.792),
    "rtx4090": ("4090", 24, 1.008),
    "rtx3090": ("3090", 24, 0.936),
    "v100": ("V100", 32, 0.9),
    "t4": ("T4", 16, 0.32),
}
_REACHED = {"h200": Reached(804e12, 4.27e12, "one bf16 product of 8192³, one copy (torch 2.11)")}
CPU = "cpu"
DEVICES = (*_TABLE, CPU)


def device_of(name: str) -> Device:
    """The device of that name; ``cpu`` is this machine, measured for a moment."""
    if name == CPU:
        return _this_cpu()
    if name not in _TABLE:
        raise UsageError(f"there is no device {name!r}{did_you_mean(name, DEVICES)} (all: {', '.join(DEVICES)})")
    gpu, memory, bandwidth = _TABLE[name]
    half, single = peak_of(gpu, "fp16"), peak_of(gpu, "fp32", tf32=True)
    assert half is not None and single is not None
    return Device(
        name,
        half,
        single,
        bandwidth * 1e12,
        memory * GB,
        half_type="fp16" if gpu in WITHOUT_BF16 else "bf16",
        single_type="fp32" if PEAKS[gpu][1] is None else "TF32",
        reached=_REACHED.get(name),
    )


def _this_cpu() -> Device:
    """The best of a few products and copies on this machine, now."""
    n = 1024
    speeds = []
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.ones(n, n, dtype=dtype), torch.ones(n, n, dtype=dtype)
        speeds.append(2 * n**3 / _best(lambda a=a, b=b: a @ b))
    source = torch.zeros(1 << 27, dtype=torch.uint8)  # larger than most caches
    target = torch.zeros_like(source)
    copied = 2 * source.numel() / _best(lambda: target.copy_(source))
    single, half = speeds
    return Device(
        CPU,
        half,
        single,
        copied,
        _memory_here(),
        single_type="fp32",
        source="measured here, now, by one product and one copy",
        ceiling=False,
    )


def _best(run: object, turns: int = 4) -> float:
    assert callable(run)
    found = []
    for _ in range(turns):
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    return min(found[1:])


def _memory_here() -> float | None:
    """Not every system says: Windows has no sysconf, others not these names."""
    try:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
    return float(pages * size) if pages > 0 and size > 0 else None
