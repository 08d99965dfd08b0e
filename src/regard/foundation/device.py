"""Which device computes: the one place that decides what ``auto`` means and refuses what the machine does not have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..errors import UsageError

if TYPE_CHECKING:
    import torch

DEVICES = ("auto", "cpu", "cuda", "mps")
"""What people may type; ``cuda:1`` names one of several."""


def is_available(kind: str) -> bool:
    """Whether this machine, with this torch, has a ``cpu``, ``cuda`` or ``mps`` device."""
    import torch

    return {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}.get(kind, False)


def resolve_device(name: str | torch.device = "auto", option: str = "device") -> torch.device:
    """The device a person asked for; ``auto`` is CUDA, else Apple's GPU, else the processor.

    ``option`` is how they asked (``train.device``, ``--device``), for the error.
    """
    import torch

    name = str(name)
    kind = name.partition(":")[0]
    if kind not in DEVICES:
        raise UsageError(f"{option}={name} is none of {', '.join(DEVICES)}")
    if kind == "auto":
        return torch.device(next(kind for kind in ("cuda", "mps", "cpu") if is_available(kind)))
    if not is_available(kind):
        raise UsageError(f"{option}={name}: this machine, or this torch, has none; use {option}=cpu")
    return torch.device(name)


@contextmanager
def without_cudnn_attention(off: bool = True) -> Iterator[None]:
    """Inside, torch's attention leaves out cuDNN, which plans for every new shape, half a second each: no help where
    batches differ in shape."""
    import torch

    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(before and not off)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def widest_float(device: torch.device) -> torch.dtype:
    """float64, or float32 on Apple's GPUs, which have nothing wider."""
    import torch

    return torch.float32 if device.type == "mps" else torch.float64
