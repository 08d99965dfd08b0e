"""The choice of the device: what ``auto`` means, errors for devices that are not available, and whether Triton is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..errors import UsageError

if TYPE_CHECKING:
    import torch

HAS_TRITON = find_spec("triton") is not None
TRITON_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # its interpreter runs kernels on a CPU
DEVICES = ("auto", "cpu", "cuda", "mps")
"""The valid names of devices; ``cuda:1`` selects one of several GPUs."""
H200_SHARED_MEMORY = 227 << 10  # bytes; kernels are tuned for it
SMALL_SHARED_MEMORY = 128 << 10  # with less (99 KiB on most GPUs but A100 and H100), wide heads need smaller tiles


def is_available(kind: str) -> bool:
    """Whether this machine and this build of torch have a ``cpu``, ``cuda`` or ``mps`` device."""
    import torch

    return {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}.get(kind, False)


def resolve_device(name: str | torch.device = "auto", option: str = "device") -> torch.device:
    """The device of that name; ``auto`` is CUDA if available, else Apple's GPU, else the CPU.

    ``option`` is the name of the setting in error messages, such as ``train.device``.
    """
    import torch

    name = str(name)
    kind = name.partition(":")[0]
    if kind not in DEVICES:
        raise UsageError(f"{option}={name} is not one of {', '.join(DEVICES)}")
    if kind == "auto":
        return torch.device(next(kind for kind in ("cuda", "mps", "cpu") if is_available(kind)))
    try:
        device = torch.device(name)
    except RuntimeError:  # such as cuda:first
        raise UsageError(f"{option}={name} is not a device, such as {kind} or {kind}:0") from None
    if not is_available(kind) or (kind == "cuda" and (device.index or 0) >= torch.cuda.device_count()):
        raise UsageError(
            f"{option}={name} is not available on this machine or in this build of torch; use {option}=cpu"
        )
    return device


def n_cores() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program of a kernel may use; without a GPU (in tests) those of an H200."""
    import torch

    if device.type != "cuda":
        return H200_SHARED_MEMORY
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", H200_SHARED_MEMORY))


@contextmanager
def without_cudnn_attention(off: bool = True) -> Iterator[None]:
    """A context without the cuDNN backend of torch's attention, unless ``off`` is False.

    cuDNN takes half a second to plan for every new shape, which does not pay off if batches differ in shape.
    """
    import torch

    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(enabled and not off)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)


def widest_float(device: torch.device) -> torch.dtype:
    """float64, or float32 on Apple's GPUs, which do not support float64."""
    import torch

    return torch.float32 if device.type == "mps" else torch.float64


def upload(numbers: Any, like: torch.Tensor) -> torch.Tensor:
    """A tensor of nested lists or of a numpy array, with the device and dtype of ``like``.

    A GPU copies it from pinned memory, for which the host does not wait; of pageable memory it would wait for all the
    work that the GPU has been given.
    """
    import torch

    tensor = torch.tensor(numbers, dtype=like.dtype)
    return tensor.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else tensor.to(like.device)
