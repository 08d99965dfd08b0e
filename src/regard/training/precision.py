"""The precision of matrix products; weights and optimiser state stay in fp32.

Mixed precision (Micikevicius et al. 2018): bf16 has the range of fp32. fp16 does not, so the loss is scaled up before
the backward pass and the gradients are scaled down after it. fp8 is bf16 with linear layers in eight bits
(``fused_layers``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..config import ModelConfig
from ..foundation.checks import check_positive
from ..models import Model
from ..models.model_flops import n_tokens, training_flops

PrecisionName = Literal["fp32", "bf16", "fp16", "fp8"]
NAMES: tuple[PrecisionName, ...] = get_args(PrecisionName)
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def supported_precisions(device: torch.device | str) -> tuple[PrecisionName, ...]:
    """The precisions that the hardware of a device supports, fp32 first."""
    device = torch.device(device)
    if device.type == "cuda":
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            return ("fp32", "fp16")
        has_fp8 = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)
        return ("fp32", "bf16", "fp16", "fp8") if has_fp8 else ("fp32", "bf16", "fp16")
    if device.type == "mps":
        return ("fp32", "bf16") if torch.backends.mps.is_macos_or_newer(14, 0) else ("fp32",)
    # Without bf16 instructions oneDNN emulates it, slower than fp32.
    with suppress(AttributeError, RuntimeError):  # torch without oneDNN
        if torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return ("fp32", "bf16")
    return ("fp32",)


def has_bf16_matrix_unit() -> bool:
    """Whether this CPU has AMX, which makes bf16 products faster than fp32; AVX-512 alone makes them slower."""
    return bool(torch.cpu._is_amx_tile_supported())


class Precision:
    """One precision on one device: ``with precision.forward(): loss = …``, then ``backward``, ``unscale``, ``step``.

    The last three handle the loss scale of fp16 and are plain calls otherwise, so a loop is the same for all.
    """

    def __init__(self, name: PrecisionName, device: torch.device | str) -> None:
        self.name, self.device = name, torch.device(device)
        if name not in NAMES:
            raise ValueError(f"precision={name!r} is not one of {', '.join(NAMES)}")
        if name == "fp16" and self.device.type != "cuda":
            raise ValueError(
                f"precision='fp16' needs device='cuda', not {self.device.type!r}; bf16 needs no loss scale"
            )
        if name not in supported_precisions(self.device) and (self.device.type != "cpu" or name == "fp8"):
            can = ", ".join(supported_precisions(self.device))
            raise ValueError(f"precision={name!r} is not supported by this {self.device.type} device; it has {can}")
        self._scaler = torch.amp.GradScaler(self.device.type) if name == "fp16" else None

    @property
    def dtype(self) -> torch.dtype:
        """The autocast dtype; fp32 if autocast is off."""
        return _DTYPES.get(self.name, torch.float32)

    def forward(self) -> AbstractContextManager[Any]:
        """A context for the forward pass and the loss, but not for the backward pass."""
        return nullcontext() if self.name == "fp32" else torch.autocast(self.device.type, self.dtype)

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled; a step with gradients that are not finite is then skipped instead of an error."""
        return self._scaler is not None

    def backward(self, loss: Tensor) -> None:
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    def unscale(self, optimisers: Iterable[Optimizer]) -> None:
        """Undo the loss scale in the gradients; call it before clipping."""
        if self._scaler is not None:
            for optimiser in optimisers:
                self._scaler.unscale_(optimiser)

    def step(self, optimisers: Iterable[Optimizer]) -> None:
        """Step each optimiser; a scaler skips those with gradients that are not finite, then adapts its scale."""
        for optimiser in optimisers:
            if self._scaler is None:
                optimiser.step()
            else:
                self._scaler.step(optimiser)
        if self._scaler is not None:
            self._scaler.update()

    def state(self) -> dict[str, Any]:
        """The state of the loss scaler for JSON; empty if there is none."""
        return {} if self._scaler is None else dict(self._scaler.state_dict())

    def load_state(self, state: Mapping[str, Any]) -> None:
        if self._scaler is not None and state:
            self._scaler.load_state_dict(dict(state))

    @contextmanager
    def settings(self) -> Iterator[None]:
        """A context for a whole run: fp32 products on CUDA use TF32 (the range of fp32, a mantissa of 10 bits)."""
        if self.device.type != "cuda":
            yield
            return
        previous = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(previous)

    def __repr__(self) -> str:
        return f"Precision({self.name!r}, {str(self.device)!r})"


def flops_per_token(config: ModelConfig, length: int, *, source_length: int | None = None) -> float:
    """Operations per token, forward and backward, for texts of this length.

    For an encoder-decoder, ``length`` is that of the target and ``source_length`` that of the source (None: the same,
    or the patches of the image); the tokens of both sides are counted.
    """
    check_positive(length=length)
    return training_flops(config, length, source_length) / n_tokens(config, length, source_length)


def model_flops_per_token(model: Model, length: int) -> float:
    """Training operations per token; for a user's own class, 6 per parameter (Kaplan et al. 2020)."""
    return flops_per_token(model.config, length) if model.config.model_class is None else 6.0 * model.n_parameters


# Dense peaks from data sheets in TFLOP/s: half precision with fp32 sums, TF32 (None: not supported), fp32.
PEAKS: dict[str, tuple[float, float | None, float]] = {
    "B200": (2250, 1125, 75),
    "H200": (989.4, 494.7, 66.9),
    "GH200": (989.4, 494.7, 66.9),
    "H100": (989.4, 494.7, 66.9),
    "H100 PCIe": (756, 378, 51),
    "H100 NVL": (835.5, 417.7, 60),
    "A100": (312, 156, 19.5),
    "A800": (312, 156, 19.5),
    "A40": (149.7, 74.8, 37.4),
    "A30": (165, 82, 10.3),
    "A10": (125, 62.5, 31.2),
    "A6000": (154.8, 77.4, 38.7),
    "L40S": (362, 183, 91.6),
    "L40": (181, 90.5, 90.5),
    "L4": (121, 60.5, 30.3),
    "5090": (209.5, 104.8, 104.8),
    "4090": (165.2, 82.6, 82.6),
    "3090": (71.2, 35.6, 35.6),
    "V100": (125, None, 15.7),
    "T4": (65, None, 8.1),
}
WITHOUT_BF16 = ("V100", "T4")


def peak_flops(device: torch.device | str, dtype: torch.dtype | str) -> float | None:
    """The peak operations per second of this device for matrix products in ``dtype``; None if unknown.

    ``dtype`` is a torch dtype or a value of ``train.precision``.
    """
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return peak_of(torch.cuda.get_device_name(device), str(dtype), tf32=tf32)


def peak_of(name: str, dtype: str, *, tf32: bool = False) -> float | None:
    """``peak_flops`` from the name that a GPU reports, such as ``NVIDIA H100 80GB HBM3``."""
    words = set(re.split(r"[^A-Za-z0-9]+", name))
    if words & {"Laptop", "Max", "D"}:  # slower cards under the same number
        return None
    known = [key for key in PEAKS if set(key.split()) <= words]
    if not known:
        return None
    key = max(known, key=len)  # "H100 PCIe" before "H100"
    half, tensor, single = PEAKS[key]
    dtype = dtype.removeprefix("torch.")
    if dtype in ("float32", "fp32"):
        return (tensor if tf32 and tensor is not None else single) * 1e12
    if dtype in ("float16", "fp16") or (dtype in ("bfloat16", "bf16") and key not in WITHOUT_BF16):
        return half * 1e12
    return None
