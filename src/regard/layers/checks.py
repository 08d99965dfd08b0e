"""What the layers refuse, said in one sentence each."""

from __future__ import annotations

import torch
from torch import Tensor


def need_ids(name: str, ids: Tensor, low: int, limit: int, limit_name: str) -> None:
    """Refuse ids that are no integers or lie outside low … limit − 1.

    The values are looked at only where that is possible: not while tracing, capturing or on meta. On a GPU the look
    waits for the device, which is cheap beside the device-side assertion it saves: that one ends the process's CUDA.
    """
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} must be int64 or int32, not {ids.dtype}")
    if not _readable(ids) or ids.numel() == 0:
        return
    smallest, largest = (int(value) for value in ids.aminmax())
    if largest >= limit:
        raise ValueError(f"{name} goes up to {largest}, but {limit_name}={limit} allows at most {limit - 1}")
    if smallest < low:
        raise ValueError(f"{name} goes down to {smallest}, but the smallest allowed is {low}")


def _readable(ids: Tensor) -> bool:
    if torch.compiler.is_compiling():
        return False
    if type(ids) is not Tensor or ids.is_meta:  # a fake tensor or another subclass has no values to read
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(ids):  # inside vmap a value belongs to no single example
        return False
    return not (ids.is_cuda and torch.cuda.is_current_stream_capturing())
