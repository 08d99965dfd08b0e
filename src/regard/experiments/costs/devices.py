"""What a device can do at most: operations a second, bytes a second, memory. The floor under every time."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from ...config.words import UsageError, nearest
from ...training.flops import peak_of

GB = 1e9


@dataclass(frozen=True)
class Device:
    """Ceilings of one device."""

    name: str
    half: float
    """Operations a second in bf16 or fp16 matrix products."""
    single: float
    """The same in fp32; in TF32 where it has that, as training here uses it."""
    bandwidth: float
    """Bytes a second to and from memory."""
    memory: float
    """Bytes."""
    source: str = "the maker's figures"

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
# Reached by a plain 8192³ product and a plain copy (torch 2.11): nearer to what a program can get.
_MEASURED = {"h200": (804e12, 4.27e12)}
CPU = "cpu"
DEVICES = (*_TABLE, CPU)


def device_of(name: str) -> Device:
    """The device of that name; ``cpu`` is this machine, measured for a moment."""
    if name == CPU:
        return _this_cpu()
    if name not in _TABLE:
        raise UsageError(f"there is no device {name!r}{nearest(name, DEVICES)} (all: {', '.join(DEVICES)})")
    gpu, memory, bandwidth = _TABLE[name]
    half, single = peak_of(gpu, "fp16"), peak_of(gpu, "fp32", tf32=True)
    assert half is not None and single is not None
    if name in _MEASURED:
        half, copied = _MEASURED[name]
        return Device(name, half, single, copied, memory * GB, "measured: a large bf16 product, a copy")
    return Device(name, half, single, bandwidth * 1e12, memory * GB)


def _this_cpu() -> Device:
    """The best of a few products and copies on this machine, now."""
    n = 1024
    speeds = []
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.ones(n, n, dtype=dtype), torch.ones(n, n, dtype=dtype)
        speeds.append(2 * n**3 / _best(lambda a=a, b=b: a @ b))
    source = torch.zeros(1 << 25, dtype=torch.uint8)
    copied = 2 * source.numel() / _best(lambda: source.clone())
    single, half = speeds
    return Device(CPU, max(half, single), single, copied, _memory_here(), "measured here, now")


def _best(run: object, turns: int = 4) -> float:
    assert callable(run)
    found = []
    for _ in range(turns):
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    return min(found[1:])


def _memory_here() -> float:
    import os

    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
