"""Absolute position embeddings, sinusoidal and learned, and a range check for positions and token ids."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..foundation.checks import check_not_negative, check_positive, unknown_name

LAYOUTS = ("interleaved", "halves", "fairseq")


class Sinusoidal(nn.Module):
    """Fixed sines and cosines (Vaswani et al. 2017, §3.5), computed for the given positions.

    PE(pos, 2i) = sin(pos / 10000^(2i / d_model)),   PE(pos, 2i+1) = cos(pos / 10000^(2i / d_model))

    Layout "interleaved" is the paper's order; "halves" has all sines first, then all cosines (Marian); "fairseq" is
    "halves" with exponents i / (M/2 − 1), so that the last frequency is 1/10000 (M2M-100). ``offset`` is added to the
    positions. With ``max_len``, larger positions are an error. A negative position (padding) gives zeros.
    positions (T,) or (B, T) → (T, M) or (B, T, M)
    """

    def __init__(self, d_model: int, max_len: int | None = None, layout: str = "interleaved", offset: int = 0) -> None:
        super().__init__()
        check_positive(d_model=d_model, max_len=1 if max_len is None else max_len)
        if layout not in LAYOUTS:
            raise unknown_name("layout", layout, LAYOUTS)
        self.d_model, self.max_len, self.layout, self.offset = d_model, max_len, layout, offset

    def forward(self, positions: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        if self.max_len is not None:
            check_ids("positions", positions, -1, self.max_len, "max_len")
        # With float64 the result is exact to fp32 at any position; mps has no float64.
        exact = torch.float32 if positions.device.type == "mps" else torch.float64
        pair = torch.arange((self.d_model + 1) // 2, dtype=exact, device=positions.device)
        exponents = 2.0 * pair / self.d_model
        if self.layout == "fairseq":
            exponents = pair / max(1, self.d_model // 2 - 1)
        theta = (positions + self.offset).to(exact).unsqueeze(-1) * 10000.0**-exponents  # (…, T, M/2)
        if self.layout == "interleaved":
            table = torch.stack((theta.sin(), theta.cos()), dim=-1).flatten(-2)[..., : self.d_model]
        else:
            table = torch.cat((theta.sin(), theta.cos()[..., : self.d_model // 2]), dim=-1)
        table = table.masked_fill(positions.unsqueeze(-1) < 0, 0.0)
        return table.to(dtype or torch.get_default_dtype())

    def extra_repr(self) -> str:
        return f"{self.d_model}, max_len={self.max_len}, layout={self.layout!r}"


class Learned(nn.Embedding):
    """One learned vector per position (Gehring et al. 2017): PE(pos) = weight[pos + offset].

    weight is (max_len + offset, M); its first ``offset`` rows are unused (2 in BART and OPT).
    positions (T,) or (B, T), −1 ≤ position < max_len, −1 giving zeros → (T, M) or (B, T, M)
    """

    def __init__(self, max_len: int, d_model: int, offset: int = 0) -> None:
        check_positive(max_len=max_len, d_model=d_model)
        check_not_negative(offset=offset)
        super().__init__(max_len + offset, d_model)
        self.max_len, self.d_model, self.offset = max_len, d_model, offset

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, positions: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        check_ids("positions", positions, -1, self.max_len, "max_len")
        rows = F.embedding(positions.clamp(min=0) + self.offset, self.weight)
        rows = rows.masked_fill(positions.unsqueeze(-1) < 0, 0.0)  # also keeps padding out of the gradient
        return rows if dtype is None else rows.to(dtype)

    def extra_repr(self) -> str:
        return f"{self.max_len}, {self.d_model}, offset={self.offset}"


def check_ids(name: str, ids: Tensor, low: int, limit: int, limit_name: str) -> None:
    """Raise unless ids are integers from low to limit − 1; values that cannot be read (tracing, capture) are skipped.

    On a GPU the check synchronises, but without it a device-side assertion would make the CUDA context unusable.
    """
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} must be int64 or int32, not {ids.dtype}")
    if torch.compiler.is_compiling() or type(ids) is not Tensor or ids.is_meta:  # fake tensors have no values
        return
    inside_vmap = torch._C._functorch.is_functorch_wrapped_tensor(ids)
    if inside_vmap or ids.numel() == 0 or (ids.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    smallest, largest = (int(value) for value in ids.aminmax())
    if largest >= limit:
        raise ValueError(f"{name} go up to {largest}, but {limit_name}={limit} allows at most {limit - 1}")
    if smallest < low:
        raise ValueError(f"{name} go down to {smallest}, but the smallest allowed is {low}")
