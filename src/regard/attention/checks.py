"""Bad input, caught at the door: one sentence that names the argument and both values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .frame import Frame

HEADS = "(batch, heads, length, width)"


def check_heads(q: Tensor, k: Tensor, v: Tensor, same_width: bool = True) -> None:
    """Raise unless q, k and v can attend."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions {HEADS}, got shape {tuple(x.shape)}")
        if not x.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {x.dtype}")
        if 0 in x.shape:
            what = dict(zip(x.shape[::-1], ("width", "length", "heads", "batch"), strict=True))[0]
            raise ValueError(f"{name} has {what} 0 in shape {tuple(x.shape)}; there is nothing to attend with")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"q is {q.dtype} but {name} is {x.dtype}; give them one dtype")
        if x.device != q.device:
            raise ValueError(f"q is on {q.device} but {name} is on {x.device}; put them on one device")
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"q has batch size {q.shape[0]} but {name} has {x.shape[0]}")
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"k has {k.shape[1]} heads but v has {v.shape[1]}")
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"k has length {k.shape[2]} but v has {v.shape[2]}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads, which {k.shape[1]} key heads cannot share evenly")
    if same_width and q.shape[3] != k.shape[3]:
        raise ValueError(f"q has head width {q.shape[3]} but k has {k.shape[3]}")


def check_frame(frame: Frame, q: Tensor, k: Tensor) -> None:
    """Raise unless the frame places exactly these queries and keys."""
    given = (frame.n_batch, frame.n_heads, frame.n_queries, frame.n_keys)
    wanted = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if given != wanted:
        raise ValueError(f"frame is for (batch, heads, queries, keys) = {given}, but q and k have {wanted}")
    if frame.device != q.device:
        raise ValueError(f"q is on {q.device} but frame is on {frame.device}; put them on one device")


def check_parameters(what: str, part: object, q: Tensor) -> None:
    """Raise when a mechanism or bias that is a module stands on another device than q."""
    for x in [*part.parameters(), *part.buffers()] if isinstance(part, nn.Module) else []:
        if x.device != q.device:
            whose = f"{what} {type(part).__name__}"
            raise ValueError(f"q is on {q.device} but {whose} is on {x.device}; put them on one device")


def check_projection(who: str, name: str, x: Tensor, w: Tensor) -> None:
    """Raise unless heads x (B, H, T, D) can be projected by w (H, D, …)."""
    if x.shape[1] != w.shape[0]:
        raise ValueError(f"mechanism {who!r} has n_heads={w.shape[0]}, {name} has {x.shape[1]} heads")
    if x.shape[3] != w.shape[1]:
        raise ValueError(f"mechanism {who!r} is for {name} of head width {w.shape[1]}, got {x.shape[3]}")
    if x.dtype != w.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(f"{name} is {x.dtype} but mechanism {who!r} is {w.dtype}; give them one dtype")


def check_finite(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise when an input holds NaN or infinity, saying where the first one is."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        bad = ~torch.isfinite(x)
        if bad.any():
            first, count = tuple(bad.nonzero()[0].tolist()), int(bad.sum())
            raise ValueError(f"{name} holds {count} values that are not finite, the first, {x[first]}, at {first}")
