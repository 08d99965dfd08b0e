"""Normalisation of each vector by its own statistics, which are always taken in fp32 or better."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..foundation.checks import check_positive
from ..foundation.suggestions import unknown_name

NORM_KINDS = ("layer", "rms", "none")


class LayerNorm(nn.Module):
    """Layer normalisation (Ba et al. 2016): y = (x − mean x) / √(var x + eps) · weight + bias.   (…, d) → (…, d)"""

    def __init__(self, d: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        check_positive(d=d)
        self.d = d
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(d))
        self.bias = nn.Parameter(torch.empty(d)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.d,), self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.d}, eps={self.eps}, bias={self.bias is not None}"


class RMSNorm(nn.Module):
    """Root-mean-square normalisation (Zhang & Sennrich 2019; LLaMA, T5): no mean, no bias.   (…, d) → (…, d)

    y = x / √(mean x² + eps) · (weight + offset);   Gemma stores weight around 0 and has offset 1.
    """

    def __init__(self, d: int, eps: float = 1e-6, offset: float = 0.0) -> None:
        super().__init__()
        check_positive(d=d)
        self.d = d
        self.eps = eps
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(d))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        if self.offset == 0.0 and x.dtype == self.weight.dtype:
            return F.rms_norm(x, (self.d,), self.weight, self.eps)
        # weight + offset rounded to bf16 would lose the small weights that the offset is there to allow; and the fused
        # kernel wants one dtype, which half-precision activations and fp32 weights (autocast) do not have.
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), (self.d,), self.weight.to(wide) + self.offset, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.d}, eps={self.eps}, offset={self.offset}"


def make_norm(kind: str, d: int, eps: float = 1e-5, *, bias: bool = True, offset: float = 0.0) -> nn.Module:
    """The norm called "layer" (bias applies), "rms" (offset applies) or "none", which passes x through."""
    if kind == "layer":
        return LayerNorm(d, eps, bias)
    if kind == "rms":
        return RMSNorm(d, eps, offset)
    if kind == "none":
        return nn.Identity()
    raise unknown_name("norm", kind, NORM_KINDS)


def quick_gelu(x: Tensor) -> Tensor:
    """x · σ(1.702 x), the sigmoid approximation of GELU (Hendrycks & Gimpel 2016, §2)."""
    return x * torch.sigmoid(1.702 * x)


def relu2(x: Tensor) -> Tensor:
    """max(0, x)² (So et al. 2021, Primer)."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "quick_gelu": quick_gelu,
    "relu2": relu2,
}
GATED: dict[str, str] = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}
FEEDFORWARD_KINDS = (*ACTIVATIONS, *GATED)
# What the same functions are called elsewhere; used to point at our name, and by whoever reads foreign configs.
OTHER_NAMES: dict[str, str] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python": "gelu",
    "swish": "silu",
    "relu_squared": "relu2",
}


def activation_function(name: str) -> Callable[[Tensor], Tensor]:
    """The element-wise function of that name; a gated name ("swiglu") gives the function on its gate (silu)."""
    inner = GATED.get(name, name)
    if inner not in ACTIVATIONS:
        raise unknown_name("activation", name, FEEDFORWARD_KINDS, OTHER_NAMES.get(name))
    return ACTIVATIONS[inner]


class FeedForward(nn.Module):
    """Two linear maps with an activation f between, the same at every position (Vaswani et al. 2017, eq. 2).

    plain   FFN(x) = f(x W_in + b_in) W_out + b_out
    gated   FFN(x) = (f(x W_gate) ⊙ (x W_up)) W_out       (Shazeer 2020: SwiGLU, GeGLU, ReGLU)

    A gated w_in holds the gate's d_ff rows, then the up-projection's. Dropout follows the activation (T5, BART).
    (…, M) → (…, M)
    """

    def __init__(
        self, d_model: int, d_ff: int, activation: str = "relu", dropout: float = 0.0, bias: bool = True
    ) -> None:
        super().__init__()
        check_positive(d_model=d_model, d_ff=d_ff)
        self.d_model = d_model
        self.d_ff = d_ff
        self.activation = activation
        self.gated = activation in GATED
        self.f = activation_function(activation)
        self.w_in = nn.Linear(d_model, 2 * d_ff if self.gated else d_ff, bias=bias)
        self.w_out = nn.Linear(d_ff, d_model, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if not should_chunk(x):
            return self._compute(x)
        out = torch.empty_like(x)  # a text's hidden layer would be the largest thing of a forward pass
        for start in range(0, x.shape[1], CHUNK_TOKENS):
            out[:, start : start + CHUNK_TOKENS] = self._compute(x[:, start : start + CHUNK_TOKENS])
        return out

    def _compute(self, x: Tensor) -> Tensor:
        hidden = self.w_in(x)  # (…, d_ff), or gate and up side by side (…, 2 d_ff)
        if self.gated:
            gate, up = hidden.chunk(2, dim=-1)
            hidden = self.f(gate) * up
        else:
            hidden = self.f(hidden)
        out: Tensor = self.w_out(self.dropout(hidden))
        return out

    @property
    def w_gate(self) -> Tensor:
        """The gate's rows of w_in, a view (d_ff, M)."""
        return self._half(0)

    @property
    def w_up(self) -> Tensor:
        """The up-projection's rows of w_in, a view (d_ff, M)."""
        return self._half(1)

    def _half(self, which: int) -> Tensor:
        if not self.gated:
            raise ValueError(f"activation={self.activation!r} has no gate; its one input map is w_in")
        return self.w_in.weight[which * self.d_ff : (which + 1) * self.d_ff]

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


CHUNK_TOKENS = 512
"""Tokens of a piece: enough for a matrix product to run at full speed."""


def should_chunk(x: Tensor) -> bool:
    """Whether x (B, T, M) is better cut: on a CPU, where no gradient will ask for what was computed on the way."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or x.dim() != 3 or x.device.type != "cpu":
        return False
    return x.shape[1] >= 4 * CHUNK_TOKENS
