"""The gradients as the formulas say, against autograd, in float64 to 1e-10."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.attention import Additive, Dot, attend, gradients, masks
from regard.attention.biases import XLRelative
from regard.attention.gradients import Gradients, attention_gradients
from regard.training.loss import linear_cross_entropy

from .helpers import Sizes, inputs

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def by_autograd(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, scale: float, d_output: Tensor) -> Gradients:
    """The same five, with every step kept as a node of the graph."""
    scores = (q @ k.transpose(-1, -2) * scale).requires_grad_()
    seen = scores if hidden is None else scores.masked_fill(hidden, -math.inf)
    weights = torch.softmax(seen, -1)
    weights.retain_grad()
    scores.retain_grad()
    (weights @ v).backward(d_output)
    return Gradients(v.grad, weights.grad, scores.grad, q.grad, k.grad)


@pytest.mark.parametrize("name", Gradients._fields)
@pytest.mark.parametrize(  # torch's softmax is NaN where a query sees nothing: test_invariants has causal (7, 3)
    ("causal", "n_queries", "n_keys"),
    [(False, 6, 6), (False, 3, 7), (False, 7, 3), (False, 1, 1), (True, 6, 6), (True, 3, 7), (True, 1, 1)],
)
def test_each_formula_equals_autograd(name: str, causal: bool, n_queries: int, n_keys: int) -> None:
    q, k, v = inputs(Sizes(2, 3, 3, n_queries, n_keys, 5), grad=True)
    hidden = ~masks.causal().dense(n_queries, n_keys) if causal else None
    d_output = torch.randn(2, 3, n_queries, 5, dtype=torch.float64)
    wanted = by_autograd(q, k, v, hidden, 0.4, d_output)
    with torch.no_grad():
        weights = attend(q, k, v, mask=masks.causal() if causal else None, scale=0.4, weights=True).weights
        assert weights is not None
        found = attention_gradients(q, k, v, weights, d_output, 0.4)
    torch.testing.assert_close(getattr(found, name), getattr(wanted, name), **EXACT)


def test_the_softmax_jacobian_is_the_one_of_the_books() -> None:
    """dS = (diag(a) - a aᵀ) dA, row by row."""
    weights = torch.softmax(torch.randn(4, 6, dtype=torch.float64), -1)
    d_weights = torch.randn(4, 6, dtype=torch.float64)
    wanted = torch.stack([(torch.diag(a) - torch.outer(a, a)) @ d for a, d in zip(weights, d_weights, strict=True)])
    torch.testing.assert_close(gradients.d_scores(weights, d_weights), wanted, **EXACT)


def test_the_row_sum_is_known_before_the_first_tile() -> None:
    """rowsum(A ∘ dA) = rowsum(O ∘ dO): what lets the backward pass go tile by tile."""
    weights = torch.softmax(torch.randn(2, 4, 6, dtype=torch.float64), -1)
    v, d_output = torch.randn(2, 6, 3, dtype=torch.float64), torch.randn(2, 4, 3, dtype=torch.float64)
    d_weights = gradients.d_weights(d_output, v)
    from_output = gradients.row_dot(weights @ v, d_output)
    torch.testing.assert_close(from_output, (weights * d_weights).sum(-1, keepdim=True), **EXACT)
    torch.testing.assert_close(
        gradients.d_scores(weights, d_weights, from_output), gradients.d_scores(weights, d_weights), **EXACT
    )


@pytest.mark.parametrize("backend", ["tiled", "reference", "sdpa"])
def test_backends_use_the_same_gradients(backend: str) -> None:
    q, k, v = inputs(Sizes(2, 3, 3, 40, 40, 5), grad=True)
    found = attend(q, k, v, mask=masks.causal(), scale=0.4, backend=backend)
    d_output = torch.randn_like(found.output)
    ours = torch.autograd.grad(found.output, (q, k, v), d_output)
    with torch.no_grad():
        weights = attend(q, k, v, mask=masks.causal(), scale=0.4, weights=True).weights
        assert weights is not None
        wanted = attention_gradients(q, k, v, weights, d_output, 0.4)
    for found_one, wanted_one in zip(ours, (wanted.d_q, wanted.d_k, wanted.d_v), strict=True):
        torch.testing.assert_close(found_one, wanted_one, **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tiled_gradients_in_half_precision_are_as_good_as_the_reference(dtype: torch.dtype) -> None:
    """Against fp32 on the same rounded inputs, the error may be at most twice that of plain half precision."""
    half = inputs(Sizes(1, 2, 2, 300, 300, 16), dtype=dtype, grad=True)
    exact = [x.detach().float().requires_grad_() for x in half]
    upstream = torch.randn(1, 2, 300, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = torch.autograd.grad(attend(*exact, backend="reference").output, exact, upstream.float())

    def errors(backend: str) -> list[float]:
        found = torch.autograd.grad(attend(*half, backend=backend).output, half, upstream)
        return [(a.float() - b).abs().max().item() for a, b in zip(found, wanted, strict=True)]

    for ours, plain in zip(errors("tiled"), errors("reference"), strict=True):
        assert ours <= 2 * plain


SECOND: dict[str, Any] = {
    "plain": dict,
    "causal": lambda: {"mask": masks.causal()},
    "additive": lambda: {"mechanism": Additive(4, 3).double()},
    "transformer-xl": lambda: {"bias": XLRelative(4, 3).double(), "mask": masks.causal()},
    "dropout": lambda: {"dropout": 0.4, "seed": 7},
}


@pytest.mark.parametrize("case", SECOND)
@pytest.mark.parametrize("n_kv_heads", [4, 2])
def test_second_derivatives_through_tiles_are_those_of_the_formula(case: str, n_kv_heads: int) -> None:
    """A gradient penalty: the squared gradients of a sum, whose own incoming gradient depends on nothing."""
    torch.manual_seed(0)
    options, found = SECOND[case](), {}
    parts = [p for part in options.values() if isinstance(part, nn.Module) for p in part.parameters()]
    for part in parts:
        nn.init.normal_(part)
    for backend in ("reference", "tiled"):
        leaves = [*inputs(Sizes(g=n_kv_heads), grad=True), *parts]
        output = attend(*leaves[:3], **options, backend=backend).output
        grads = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
        first, second = torch.autograd.grad(output.sum(), leaves, create_graph=True), [g.square().sum() for g in grads]
        penalty = sum(g.square().sum() for g in first) + sum(second)
        found[backend] = [*first, *torch.autograd.grad(penalty, leaves)]
    for a, b in zip(found["tiled"], found["reference"], strict=True):
        torch.testing.assert_close(a, b, **EXACT)
    assert all(g.abs().max() > 0 for g in found["tiled"])


def test_second_derivatives_that_nobody_computes_are_refused() -> None:
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 6, requires_grad=True) for n in (5, 9))
    loss = linear_cross_entropy(hidden, weight, torch.arange(5), chunk=2)
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="the cross-entropy of a large vocabulary has first derivatives only"):
        grad.square().sum().backward()


def test_a_normaliser_that_is_not_known_is_refused() -> None:
    class Sparsemax(Dot):
        normaliser = "sparsemax"

    with pytest.raises(ValueError, match="'sparsemax' has normaliser='sparsemax', which is not 'softmax' or 'linear'"):
        attend(*inputs(Sizes()), mechanism=Sparsemax())
