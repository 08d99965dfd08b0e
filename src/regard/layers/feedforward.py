"""Feed-forward networks, plain and gated, and their activation functions."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..foundation.checks import check_positive, unknown_name


def quick_gelu(x: Tensor) -> Tensor:
    """x · σ(1.702 x), the sigmoid approximation of GELU (Hendrycks & Gimpel 2016, §2)."""
    return x * torch.sigmoid(1.702 * x)


def gelu_tanh(x: Tensor) -> Tensor:
    """x/2 · (1 + tanh u) = x · σ(2u), u = √(2/π) (x + 0.044715 x³) (Hendrycks & Gimpel 2016, §2).

    The second form is used when compiling for a GPU, where tanh would dominate the time.
    """
    if torch.compiler.is_compiling() and x.is_cuda:
        wide = x.float()
        return (wide * torch.sigmoid(1.5957691216057308 * (wide + 0.044715 * wide**3))).to(x.dtype)
    return F.gelu(x, approximate="tanh")


def relu2(x: Tensor) -> Tensor:
    """max(0, x)² (So et al. 2021, Primer)."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "silu": F.silu,
    "quick_gelu": quick_gelu,
    "relu2": relu2,
}
GATED: dict[str, str] = {
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "reglu": "relu",
    "quick_geglu": "quick_gelu",
}
FEEDFORWARD_KINDS = (*ACTIVATIONS, *GATED)
# Names of the same functions in other libraries.
OTHER_NAMES: dict[str, str] = dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh")
OTHER_NAMES |= {"gelu_python": "gelu", "swish": "silu", "relu_squared": "relu2"}


def activation_function(name: str) -> Callable[[Tensor], Tensor]:
    """The element-wise function of an activation; for a gated one ("swiglu"), the function of the gate (silu)."""
    inner = GATED.get(name, name)
    if inner not in ACTIVATIONS:
        raise unknown_name("activation", name, FEEDFORWARD_KINDS, OTHER_NAMES.get(name))
    return ACTIVATIONS[inner]


def apply_gate(f: Callable[[Tensor], Tensor], hidden: Tensor, limit: float | None = None) -> Tensor:
    """f(gate) ⊙ up for hidden = [gate; up], (…, 2 d_ff) → (…, d_ff).

    With a limit c: f(min(gate, c)) ⊙ (1 + clamp(up, -c, c)) (gpt-oss, 2025).
    """
    gate, up = hidden.chunk(2, dim=-1)
    return f(gate) * up if limit is None else f(gate.clamp(max=limit)) * (up.clamp(-limit, limit) + 1)


class FeedForward(nn.Module):
    """Two linear maps with an activation f between them, applied at every position (Vaswani et al. 2017, eq. 2).

    plain   FFN(x) = f(x W_in + b_in) W_out + b_out
    gated   FFN(x) = (f(x W_gate) ⊙ (x W_up)) W_out       (Shazeer 2020: SwiGLU, GeGLU, ReGLU)

    A gated w_in holds d_ff rows for the gate, then d_ff rows for the up-projection; ``gate_limit`` is the limit of
    ``apply_gate``. Dropout follows the activation (T5, BART). With ``fp32_output``, fp16 activations are multiplied by
    W_out in fp32 and returned in fp32, because T5's outputs exceed the range of fp16.
    (…, M) → (…, M)
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        activation: str = "relu",
        dropout: float = 0.0,
        bias: bool = True,
        fp32_output: bool = False,
        gate_limit: float | None = None,
    ) -> None:
        super().__init__()
        check_positive(d_model=d_model, d_ff=d_ff)
        self.d_model, self.d_ff, self.activation = d_model, d_ff, activation
        self.gated, self.has_bias, self.fp32_output = activation in GATED, bias, fp32_output
        self.f, self.gate_limit = activation_function(activation), gate_limit
        self.w_in = nn.Linear(d_model, 2 * d_ff if self.gated else d_ff, bias=bias)
        self.w_out = nn.Linear(d_ff, d_model, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if not should_chunk(x):
            return self._compute(x)
        # In chunks, because the hidden layer of a long sequence would be the largest tensor of the forward pass.
        out = torch.empty_like(x, dtype=torch.float32 if self._widens(x) else x.dtype)
        for start in range(0, x.shape[1], CHUNK_TOKENS):
            out[:, start : start + CHUNK_TOKENS] = self._compute(x[:, start : start + CHUNK_TOKENS])
        return out

    def _compute(self, x: Tensor) -> Tensor:
        return self.project(self.neurons(x))

    def neurons(self, x: Tensor) -> Tensor:
        """The hidden layer after activation and gate.   (…, M) → (…, d_ff)"""
        return self.dropout(self.activate(self.w_in(x)))

    def activate(self, hidden: Tensor) -> Tensor:
        """Apply the activation, and the gate if there is one.   (…, d_ff) or gated (…, 2 d_ff) → (…, d_ff)"""
        return apply_gate(self.f, hidden, self.gate_limit) if self.gated else self.f(hidden)

    def project(self, hidden: Tensor) -> Tensor:
        """The output projection of the neurons.   (…, d_ff) → (…, M)"""
        if not self._widens(hidden):
            return self.w_out(hidden)
        product = F.linear(hidden.float(), self.w_out.weight.float())
        return product + self.w_out.bias.float() if self.has_bias else product

    def _widens(self, x: Tensor) -> bool:
        """Whether the output projection is computed in fp32."""
        return self.fp32_output and x.dtype == torch.float16 and isinstance(self.w_out, nn.Linear)

    @property
    def w_gate(self) -> Tensor:
        """The rows of w_in for the gate, a view (d_ff, M)."""
        return self._half(0)

    @property
    def w_up(self) -> Tensor:
        """The rows of w_in for the up-projection, a view (d_ff, M)."""
        return self._half(1)

    def _half(self, index: int) -> Tensor:
        if not self.gated:
            raise ValueError(f"activation={self.activation!r} has no gate; its only input projection is w_in")
        return self.w_in.weight[index * self.d_ff : (index + 1) * self.d_ff]

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


CHUNK_TOKENS = 512  # enough for matrix products to run at full speed


def should_chunk(x: Tensor) -> bool:
    """Whether to process x (B, T, M) in chunks of tokens to save memory: long inputs on a CPU without gradients."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or x.dim() != 3 or x.device.type != "cpu":
        return False
    return x.shape[1] >= 4 * CHUNK_TOKENS
