"""Muon: momentum whose update is made orthogonal, for the matrices inside layers (Jordan et al. 2024).

B ← μ B + (1 - μ) G      O = orthogonal((1 - μ) G + μ B)      W ← (1 - lr · decay) W - lr · max(1, rows / columns)^½ · O

Like ``torch.optim.Muon``, with two differences. A parameter may hold several matrices one below the other (q, k and v;
gate and up): each is made orthogonal on its own, joined they would share one spectrum. And matrices of one shape are
made orthogonal together, in one batched product: small ones cost the launch of a kernel more than its arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

# Of a quintic that lifts every singular value in (0, 1] to about 1 in five steps; exactness is given up for slope at 0.
_A, _B, _C = 3.4445, -4.7750, 2.0315
# Numbers made orthogonal at once, 128 MiB in bf16: large matrices fill the machine one by one.
_MOST_AT_ONCE = 1 << 26


class Muon(torch.optim.Optimizer):
    """For 2-D parameters. ``joined`` gives the rows of each matrix in the parameters that hold more than one."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 0.02,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        steps: int = 5,
        joined: Mapping[Tensor, tuple[int, ...]] | None = None,
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if value < 0:
                raise ValueError(f"{name}={value} must not be negative")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum} must lie in [0, 1)")
        if steps < 1:
            raise ValueError(f"steps={steps} must be at least 1")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "steps": steps,
        }
        super().__init__(params, defaults)
        self._joined = {} if joined is None else dict(joined)
        for param in (param for group in self.param_groups for param in group["params"]):
            rows = self._rows(param)
            if param.dim() != 2 or sum(rows) != param.shape[0]:
                raise ValueError(f"joined={rows} does not divide a parameter of shape {tuple(param.shape)}")

    def _rows(self, param: Tensor) -> tuple[int, ...]:
        return self._joined.get(param, (param.shape[0],))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch declares overloads
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if params := [param for param in group["params"] if param.grad is not None]:
                self._step(params, group)
        return loss

    def _step(self, params: list[Tensor], group: dict[str, Any]) -> None:
        updates = self._momentum(params, group["momentum"], group["nesterov"])
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        rows = [self._rows(param) for param in params]
        pieces = [piece for update, sizes in zip(updates, rows, strict=True) for piece in update.split(sizes)]
        directions = iter(orthogonal(pieces, group["steps"]))
        here: list[tuple[Tensor, Tensor]] = []
        for param, sizes in zip(params, rows, strict=True):
            found = [next(directions) for _ in sizes]
            if _sharded(param):
                param.add_(shard(torch.cat(found), param), alpha=-group["lr"])
            else:
                here += zip(param.split(sizes), found, strict=True)
        if here:
            torch._foreach_add_([part for part, _ in here], [direction for _, direction in here], alpha=-group["lr"])

    def _momentum(self, params: list[Tensor], momentum: float, nesterov: bool) -> list[Tensor]:
        """What is to be made orthogonal, whole: a gradient sharded over processes is gathered, for its spectrum is."""
        grads = [param.grad for param in params if param.grad is not None]
        for param in params:
            if "momentum" not in self.state[param]:
                self.state[param]["momentum"] = torch.zeros_like(param)
        buffers = [self.state[param]["momentum"] for param in params]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        updates = torch._foreach_lerp(grads, buffers, momentum) if nesterov else buffers
        return [_whole(update) for update in updates]


def _sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor, without loading torch.distributed to find out."""
    return hasattr(tensor, "full_tensor")


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if _sharded(tensor) else tensor


def shard(whole: Tensor, like: Any) -> Tensor:
    """``whole``, the same on every process, sharded as ``like`` is: each keeps its own part, nothing is sent."""
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * like.device_mesh.ndim
    return DTensor.from_local(whole, like.device_mesh, everywhere, run_check=False).redistribute(
        placements=like.placements
    )


def orthogonal(matrices: list[Tensor], steps: int = 5) -> list[Tensor]:
    """max(1, rows / columns)^½ times the nearest orthogonal matrix U Vᵀ of each U S Vᵀ, roughly: S ends near 1.

    The factor lets a matrix of any shape move its output alike. Matrices of one shape are stacked and go through
    together; results are in order and in their matrix's dtype.
    """
    alike: dict[tuple[Any, ...], list[int]] = {}
    for i, matrix in enumerate(matrices):
        alike.setdefault((matrix.shape, matrix.dtype, matrix.device), []).append(i)
    results: dict[int, Tensor] = {}
    for (shape, dtype, _), all_of_them in alike.items():
        at_once = max(1, _MOST_AT_ONCE // max(1, shape.numel()))
        for start in range(0, len(all_of_them), at_once):
            some = all_of_them[start : start + at_once]
            stacked = newton_schulz(torch.stack([matrices[i] for i in some]), steps).to(dtype)
            if shape[0] > shape[1]:
                stacked = stacked * (shape[0] / shape[1]) ** 0.5
            results.update(zip(some, stacked.unbind(), strict=True))
    return [results[i] for i in range(len(matrices))]


def newton_schulz(x: Tensor, steps: int = 5) -> Tensor:
    """X ← a X + (b X Xᵀ + c (X Xᵀ)²) X, ``steps`` times from X / ‖X‖, for each of a stack (…, rows, columns)."""
    tall = x.shape[-2] > x.shape[-1]
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    x = (x.mT if tall else x).to(product_dtype(x.device, x.dtype), memory_format=torch.contiguous_format)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.mT if tall else x


def product_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """bf16 where its products run in hardware, else as given; the iteration corrects what its rounding disturbs.

    A property of the machine and never a measurement: a run continued on it must go on with the same numbers.
    """
    return torch.bfloat16 if dtype == torch.float32 and _has_bf16(device.type) else dtype


@lru_cache
def _has_bf16(device: str) -> bool:
    if device == "cuda":
        return torch.cuda.get_device_capability() >= (8, 0) or torch.version.hip is not None
    if device == "cpu":  # these two say what the processor can; elsewhere torch works bf16 out in fp32, slowly
        return any(getattr(torch.cpu, name)() for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return False
