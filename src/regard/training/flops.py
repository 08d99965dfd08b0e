"""Arithmetic that training a token takes, and what a GPU could do: their ratio is the utilisation (MFU).

Counted as in PaLM (Chowdhery et al. 2022, appendix B): every weight of a matrix product costs a multiplication and an
addition forward and twice that backward, 6·N a token; attention costs 12·L·T·d, half of it where the future is hidden.
Tables that are only looked up cost nothing, a tied one counts as the output matrix it is; what checkpointing computes a
second time is not counted, nor are norms, activations and biases. The count itself is that of ``models.flops``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..config import ModelConfig
from ..models.flops import n_tokens, training_flops

if TYPE_CHECKING:
    import torch


def flops_per_token(config: ModelConfig, length: int, *, source_length: int | None = None) -> float:
    """Operations, forward and backward, for each token of texts of this length.

    With an encoder and a decoder ``length`` is the target's, ``source_length`` the source's (None: as long, or the
    image's patches), and the tokens counted are those of both sides together.
    """
    if length < 1:
        raise ValueError(f"length={length} must be at least 1")
    return training_flops(config, length, source_length) / n_tokens(config, length, source_length)


# The makers' dense peaks in 10¹² operations a second: half precision with fp32 sums, TF32, fp32. None: it has none.
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
    """Operations a second this device could do at most in matrix products of this type; None where it is not known.

    ``dtype``: torch's, or the word of ``train.precision``.
    """
    import torch

    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return peak_of(torch.cuda.get_device_name(device), str(dtype), tf32=tf32)


def peak_of(name: str, dtype: str, *, tf32: bool = False) -> float | None:
    """The same from the name a GPU gives itself, such as ``NVIDIA H100 80GB HBM3``."""
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
