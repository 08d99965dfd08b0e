"""Arithmetic that training a token takes, and what a GPU could do: their ratio is the utilisation (MFU).

Counted as in PaLM (Chowdhery et al. 2022, appendix B): every weight of a matrix product costs a multiplication and an
addition forward and twice that backward, 6·N a token; attention costs 12·L·T·d, half of it where the future is hidden.
Tables that are only looked up cost nothing, a tied one counts as the output matrix it is; what checkpointing computes a
second time is not counted, nor are norms, activations and biases.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..config import ModelConfig

if TYPE_CHECKING:
    import torch

TRAIN = 6  # operations for each weight and token: 2 forward, 4 backward
GATED = ("swiglu", "geglu", "geglu_tanh", "reglu")


def flops_per_token(config: ModelConfig, n_parameters: int, length: int, *, source_length: int | None = None) -> float:
    """Operations, forward and backward, for each token of texts of this length.

    With an encoder and a decoder ``length`` is the target's, ``source_length`` the source's (None: as long, or the
    image's patches), and the tokens counted are those of both sides together. ``n_parameters`` serves recurrent models,
    taken as two halves of which every token passes one; of the others every matrix is counted where it is used.
    """
    if length < 1:
        raise ValueError(f"length={length} must be at least 1")
    if config.architecture == "recurrent":
        return _recurrent(config, n_parameters)
    if config.architecture == "decoder":
        return _widening(config) + _stack(config, length, decoder=True) + _token_head(config)
    if config.architecture == "encoder":
        head = _token_head(config) if config.head == "masked-lm" else TRAIN * config.n_classes * config.d_model / length
        return _embedding(config) + _stack(config, length) + (0.0 if config.head == "none" else head)
    source = source_length or (length if config.source != "image" else _n_patches(config))
    encoder = source * (_embedding(config) + _stack(config, source))
    decoder = length * (_widening(config) + _stack(config, length, decoder=True, memory=source) + _token_head(config))
    # Keys and values of the memory are made once for each source token, by every decoder layer.
    n_layers, n_heads = config.n_decoder_layers or config.n_layers, config.n_decoder_heads or config.n_heads
    memory = source * n_layers * TRAIN * 2 * config.d_model * _kv_width(config, n_heads)
    return (encoder + decoder + memory) / (source + length)


def _stack(config: ModelConfig, length: int, *, decoder: bool = False, memory: int | None = None) -> float:
    """One token through all layers of a stack; ``memory``: how many source places a decoder looks at."""
    beside = memory is not None
    n_layers = (config.n_decoder_layers if beside else None) or config.n_layers
    n_heads = (config.n_decoder_heads if beside else None) or config.n_heads
    d_ff = (config.d_decoder_ff if beside else None) or config.d_ff
    width = n_heads * _head_width(config, n_heads)
    weights = config.d_model * d_ff * (3 if config.activation in GATED else 2)
    if config.mixer != "fourier":
        weights += 2 * config.d_model * (width + _kv_width(config, n_heads))
    if memory is not None:
        weights += 2 * config.d_model * width
    hidden = decoder and config.causal
    keys = sum(_keys(config, layer, length, hidden, beside) for layer in range(n_layers)) + n_layers * (memory or 0)
    return n_layers * TRAIN * weights + 2 * TRAIN * keys * width


def _keys(config: ModelConfig, layer: int, length: int, hidden: bool, beside: bool) -> float:
    """Keys a query meets on average in this layer, or as many as what stands in for them costs."""
    if config.mixer == "fourier":
        return 0.0
    if config.mixer == "linear":  # q·(Σ k vᵀ): a D × D state
        return config.head_width
    if config.mixer == "performer":
        return config.mixer_size or 256
    if config.mixer == "linformer":
        return min(config.mixer_size or 256, length)
    if config.shifted_windows is not None and not beside:
        return min(config.shifted_windows**2, length)
    windowed = config.window is not None and (config.window_layers is None or layer in config.window_layers)
    window = min(config.window or length, length) if windowed else length
    if hidden:
        return window - window * (window - 1) / (2 * length)  # the first queries see fewer
    return window if window == length else min(2 * window - 1, length)


def _recurrent(config: ModelConfig, n_parameters: int) -> float:
    width = config.d_embed or config.d_model
    tables = width * (config.vocab_size + (config.target_vocab_size or 0))
    head = 0 if config.head == "none" else config.d_model * config.output_vocab_size
    inside = n_parameters - tables - (0 if config.tie_head else head)
    return TRAIN * (inside + head) / 2


def _head_width(config: ModelConfig, n_heads: int) -> int:
    return config.d_model // n_heads if config.d_head is None else config.d_head


def _kv_width(config: ModelConfig, n_heads: int) -> int:
    return (config.n_kv_heads or n_heads) * _head_width(config, n_heads)


def _token_head(config: ModelConfig) -> float:
    if config.head == "none":
        return 0.0
    width = (config.d_embed or config.d_model) if config.head_transform else config.d_model
    return TRAIN * width * (config.output_vocab_size + (config.d_model if config.head_transform else 0))


def _n_patches(config: ModelConfig) -> int:
    return (config.image_size // config.patch_size) ** 2


def _embedding(config: ModelConfig) -> float:
    """From what an encoder reads to vectors."""
    if config.source == "image":
        return TRAIN * config.n_channels * config.patch_size**2 * config.d_model
    if config.source == "regions":
        return TRAIN * config.d_region * config.d_model
    return _widening(config)


def _widening(config: ModelConfig) -> float:
    """A token's vector is looked up; where the table is narrower than the model, a matrix follows."""
    if config.d_embed is None or config.d_embed == config.d_model:
        return 0.0
    return TRAIN * config.d_embed * config.d_model


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
