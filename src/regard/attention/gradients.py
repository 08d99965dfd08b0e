"""The analytic gradients of attention. O = A V, A = softmax(S), S = scale · Q Kᵀ.

    dV = Aᵀ dO      dA = dO Vᵀ      dS = A ∘ (dA - rowsum(A ∘ dA))      dQ = scale · dS K      dK = scale · dSᵀ Q

``tiled`` applies them tile by tile, with rowsum(A ∘ dA) = rowsum(dO ∘ O) (Dao et al. 2022, appendix B.2).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Gradients(NamedTuple):
    d_v: Tensor
    d_weights: Tensor  # dA
    d_scores: Tensor  # dS
    d_q: Tensor
    d_k: Tensor


def d_values(weights: Tensor, d_output: Tensor) -> Tensor:
    """dV = Aᵀ dO."""
    return weights.transpose(-1, -2) @ d_output


def d_weights(d_output: Tensor, v: Tensor) -> Tensor:
    """dA = dO Vᵀ."""
    return d_output @ v.transpose(-1, -2)


def row_dot(output: Tensor, d_output: Tensor) -> Tensor:
    """rowsum(A ∘ dA), as rowsum(O ∘ dO)."""
    return (output * d_output).sum(-1, keepdim=True)


def d_scores(weights: Tensor, d_weights: Tensor, row_dot: Tensor | None = None) -> Tensor:
    """dS = A ∘ (dA - rowsum(A ∘ dA)): the softmax's Jacobian diag(a) - a aᵀ applied to each row."""
    if row_dot is None:
        row_dot = (weights * d_weights).sum(-1, keepdim=True)
    return (d_weights - row_dot) * weights


def d_sigmoid(weights: Tensor, d_weights: Tensor) -> Tensor:
    """dS = A ∘ (1 - A) ∘ dA, where each weight is a sigmoid of its own score."""
    return d_weights * weights * (1 - weights)


def d_sinks(sinks: Tensor, lse: Tensor, row_dot: Tensor) -> Tensor:
    """-Σ a_sink rowsum(A ∘ dA) for the sinks (H,): a sink has weight a_sink = exp(sink - lse) and value 0."""
    share = (sinks.to(lse.dtype)[:, None] - lse).exp()  # (B, H, T)
    return -(share * row_dot[..., 0]).sum((0, 2))


def d_queries(d_scores: Tensor, k: Tensor, scale: float) -> Tensor:
    """dQ = scale · dS K."""
    return d_scores @ k * scale


def d_keys(d_scores: Tensor, q: Tensor, scale: float) -> Tensor:
    """dK = scale · dSᵀ Q."""
    return d_scores.transpose(-1, -2) @ q * scale


def attention_gradients(q: Tensor, k: Tensor, v: Tensor, weights: Tensor, d_output: Tensor, scale: float) -> Gradients:
    """All five gradients of scaled dot-product attention with weights A."""
    d_a = d_weights(d_output, v)
    d_s = d_scores(weights, d_a)
    return Gradients(d_values(weights, d_output), d_a, d_s, d_queries(d_s, k, scale), d_keys(d_s, q, scale))
