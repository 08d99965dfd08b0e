"""The three readings of attention say what attention does: a smoother, a retrieval, a walk on a graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regard.attention import attend, explain, masks
from regard.attention.attention_map import AttentionMap
from regard.attention.biases import T5Bias
from regard.attention.mechanisms import Sigmoid
from regard.attention.readings import flow_to, retrieve, rollout, smoother, stationary, walk

B, H, G, T, D = 2, 4, 2, 13, 6


def heads(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def stochastic(*shape: int, seed: int = 0) -> Tensor:
    return heads(*shape, seed=seed).softmax(-1)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def layers_of(n: int, length: int = T, **options: Any) -> tuple[list[AttentionMap], list[Tensor]]:
    """Maps, and the same weights as matrices."""
    made = [(heads(B, H, length, D, seed=2 * i), heads(B, G, length, D, seed=2 * i + 1)) for i in range(n)]
    return [AttentionMap(q, k, **options) for q, k in made], [explain(q, k, k, **options).weights for q, k in made]


# ---- a kernel smoother


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 2), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.integers(1, 8), st.booleans())
def test_the_exponential_kernel_is_attention(b: int, shared: int, t: int, s: int, d: int, causal: bool) -> None:
    q, k, v = heads(b, 2 * shared, t, d), heads(b, 2, s, d, seed=1), heads(b, 2, s, 3, seed=2)
    mask = masks.causal() if causal else None
    close(smoother(q, k, v, mask=mask), attend(q, k, v, mask=mask, backend="reference").output)
    close(smoother(q, k, v, 1.7, mask=mask), attend(q, k, v, mask=mask, scale=1.7**-2, backend="reference").output)


def test_the_gaussian_kernel_is_attention_when_keys_have_one_length() -> None:
    q, k, v = heads(B, H, T, D), 2.5 * F.normalize(heads(B, G, T, D, seed=1), dim=-1), heads(B, G, T, D, seed=2)
    for bandwidth in (None, 0.6):
        scale = None if bandwidth is None else bandwidth**-2
        expected = attend(q, k, v, scale=scale, backend="reference").output
        close(smoother(q, k, v, bandwidth, kernel="gaussian"), expected)


def test_the_gaussian_kernel_is_the_textbook_formula() -> None:
    q, k, v = heads(1, 1, 5, D), heads(1, 1, 7, D, seed=1), heads(1, 1, 7, 1, seed=2)
    kernel = torch.exp(-torch.cdist(q, k).square() / (2 * 0.8**2))
    close(smoother(q, k, v, 0.8, kernel="gaussian"), kernel @ v / kernel.sum(-1, keepdim=True))
    assert not torch.allclose(smoother(q, k, v, 0.8), smoother(q, k, v, 0.8, kernel="gaussian"))


def test_a_smoother_smooths() -> None:
    """Regression of a sine from noisy points: a narrow kernel returns the points, a wide one their mean."""
    x = torch.linspace(0, 6, 200, dtype=torch.float64).view(1, 1, -1, 1)
    noisy = x.sin() + 0.3 * heads(1, 1, 200, 1)
    fitted = smoother(x, x, noisy, 0.3, kernel="gaussian")
    assert (fitted - x.sin()).square().mean() < 0.2 * (noisy - x.sin()).square().mean()
    close(smoother(x, x, noisy, 1e-3, kernel="gaussian"), noisy)
    close(smoother(x, x, noisy, 1e4, kernel="gaussian"), noisy.mean(2, keepdim=True).expand_as(x), 1e-6)


def test_smoother_with_nothing_to_see_gives_zero() -> None:
    out = smoother(heads(1, 1, 3, D), heads(1, 1, 2, D), heads(1, 1, 2, D), mask=masks.causal(), kernel="gaussian")
    assert (out[:, :, 0] == 0).all()
    assert torch.isfinite(out).all()


# ---- a retrieval


def test_retrieval_ranks_the_keys() -> None:
    q, k = heads(B, H, T, D), heads(B, G, T, D, seed=1)
    weights = explain(q, k, k).weights
    for head in (None, 2):
        row = weights[1, :, 5].mean(0) if head is None else weights[1, head, 5]
        found = retrieve((q, k), 5, 4, batch=1, head=head)
        assert [index for index, _ in found] == row.argsort(descending=True)[:4].tolist()
        assert [weight for _, weight in found] == pytest.approx(sorted(row.tolist(), reverse=True)[:4])
        assert retrieve(AttentionMap(q, k), 5, 4, batch=1, head=head) == found


def test_a_query_finds_the_key_it_was_made_from() -> None:
    k = F.normalize(heads(1, 1, T, D, seed=1), dim=-1)
    for wanted in range(T):
        assert retrieve((40 * k, k), wanted, 1)[0][0] == wanted


def test_retrieval_leaves_out_what_may_not_be_seen() -> None:
    map = AttentionMap(heads(B, H, T, D), heads(B, G, T, D, seed=1), masks.causal())
    assert {index for index, _ in retrieve(map, 2, 10)} == {0, 1, 2}


# ---- a walk


@pytest.mark.parametrize("as_map", [True, False])
def test_a_walk_is_a_power_of_the_matrix(as_map: bool) -> None:
    (map,), (weights,) = layers_of(1, mask=masks.window(4, ahead=2))
    given_as = map if as_map else weights
    for steps in (0, 1, 3):
        power = torch.linalg.matrix_power(weights, steps)
        close(walk(given_as, steps), power)
        close(walk(given_as, steps, 4), power[:, :, 4])
        spread = stochastic(B, H, T, seed=7)
        close(walk(given_as, steps, spread), (spread[:, :, None] @ power)[:, :, 0])
        close(walk(given_as, steps, spread[0, 0]).sum(-1), torch.ones(B, H, dtype=torch.float64))


@pytest.mark.parametrize("as_map", [True, False])
def test_a_token_that_sees_nothing_keeps_its_walker(as_map: bool) -> None:
    allowed = torch.rand(T, T, generator=torch.Generator().manual_seed(0)) < 0.5
    allowed[3] = False
    (map,), (weights,) = layers_of(1, mask=masks.from_dense(allowed))
    assert (weights[:, :, 3] == 0).all()
    after = walk(map if as_map else weights, 5)
    close(after.sum(-1), torch.ones(B, H, T, dtype=torch.float64))
    assert (after[:, :, 3, 3] == 1).all()


@pytest.mark.parametrize("as_map", [True, False])
def test_stationary_is_left_alone_by_a_step(as_map: bool) -> None:
    (map,), (weights,) = layers_of(1)
    found = stationary(map if as_map else weights, tolerance=1e-13)
    close(found[:, :, None] @ weights, found[:, :, None], 1e-11)
    close(found.sum(-1), torch.ones(B, H, dtype=torch.float64))
    eigenvalues, vectors = torch.linalg.eig(weights[0, 0].T)
    leading = vectors[:, eigenvalues.abs().argmax()].real
    close(found[0, 0], leading / leading.sum(), 1e-8)


def test_stationary_of_a_graph_that_swings_and_of_one_that_only_looks_back() -> None:
    swing = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    close(stationary(swing), torch.tensor([0.5, 0.5], dtype=torch.float64))
    (map,), _ = layers_of(1, mask=masks.causal())
    start = F.one_hot(torch.tensor(0), T).double().expand(B, H, T)
    close(stationary(map, tolerance=1e-12), start, 1e-9)
    with pytest.raises(RuntimeError, match=r"stationary still changes by .* after max_steps=2"):
        stationary(map, max_steps=2)


# ---- rollout


def test_rollout_by_hand() -> None:
    """Two layers, two tokens, two heads whose mean is [[1, 0], [1/2, 1/2]] and then [[0, 1], [1, 0]]."""
    first = torch.tensor([[[[1.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]]])
    second = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).expand(1, 2, 2, 2)
    # Â₁ = [[1, 0], [1/4, 3/4]], Â₂ = [[1/2, 1/2], [1/2, 1/2]]
    assert rollout([first, second]).tolist() == [[[0.625, 0.375], [0.625, 0.375]]]
    assert rollout([first, second], residual=0.0).tolist() == [[[0.5, 0.5], [1.0, 0.0]]]
    assert rollout([first, second], residual=1.0).tolist() == [[[1.0, 0.0], [0.0, 1.0]]]


@pytest.mark.parametrize("residual", [0.0, 0.3, 0.5])
def test_rollout_of_maps_and_of_matrices(residual: float) -> None:
    maps, matrices = layers_of(3, mask=masks.causal())
    expected = torch.eye(T, dtype=torch.float64).expand(B, T, T)
    for weights in matrices:
        mixed = residual * torch.eye(T, dtype=torch.float64) + (1 - residual) * weights.mean(1)
        expected = mixed @ expected
    for layers in (maps, matrices, [maps[0], *matrices[1:]]):
        close(rollout(layers, residual), expected)
        close(rollout(layers, residual).sum(-1), torch.ones(B, T, dtype=torch.float64))
        rows = torch.tensor([T - 1, 0, 5])
        close(flow_to(layers, rows, residual), expected[:, rows])
        close(flow_to(layers, -1, residual), expected[:, -1:])
        close(flow_to(layers, slice(2, 6), residual), expected[:, 2:6])


def test_rows_of_a_rollout_sum_to_one_where_tokens_see_nothing() -> None:
    maps, matrices = layers_of(2, mask=~masks.causal())  # the last token sees nothing
    assert (matrices[0][:, :, -1] == 0).all()
    for layers in (maps, matrices):
        close(rollout(layers).sum(-1), torch.ones(B, T, dtype=torch.float64))
        close(flow_to(layers, [T - 1, 0]), rollout(layers)[:, [T - 1, 0]])
        assert (rollout(layers)[:, -1, -1] == 1).all()


@pytest.mark.parametrize("options", [{"sinks": torch.arange(H).double()}, {"mechanism": Sigmoid(H, T).double()}])
def test_rows_of_a_rollout_sum_to_one_with_sinks_and_sigmoids(options: dict[str, Any]) -> None:
    """(A + I) / 2 with rows divided by their sums; a random walk has no such division and says so."""
    maps, matrices = layers_of(2, mask=masks.causal(), **options)
    expected = torch.eye(T, dtype=torch.float64).expand(B, T, T)
    for weights in matrices:
        mixed = torch.eye(T, dtype=torch.float64) + weights.mean(1).detach()
        expected = mixed / mixed.sum(-1, keepdim=True) @ expected
    close(rollout(maps), expected)
    close(flow_to(maps, [0, T - 1]), expected[:, [0, T - 1]])
    for read in (lambda: walk(maps[0], 1), lambda: stationary(maps[0])):
        with pytest.raises(ValueError, match="rows of weights must sum to 1"):
            read()


class Largest(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return out


def test_flow_at_length_never_holds_a_matrix() -> None:
    torch.manual_seed(0)
    length, bias = 8192, T5Bias(1)
    layers = [
        AttentionMap(torch.randn(1, 1, length, 4), torch.randn(1, 1, length, 4), masks.window(200), bias)
        for _ in range(3)
    ]
    with Largest() as largest:
        flow = flow_to(layers, [length - 1, 100])
    assert largest.elements <= length * length / 16
    close(flow.sum(-1), torch.ones(1, 2), 1e-4)
    reached = flow[0, 0].nonzero()[:, 0]
    assert int(reached.min()) == length - 1 - 3 * 199  # three windows of 200 back, no further


# ---- bad input


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (lambda x: smoother(x, x, x, kernel="box"), "kernel='box' is not one of exp, gaussian"),
        (lambda x: smoother(x, x, x, 0.0), r"bandwidth=0\.0 must be positive"),
        (lambda x: retrieve((x, x), 0, T + 1), f"retrieve k={T + 1} must lie between 1 and the {T} keys"),
        (lambda x: walk(x.softmax(-1), 1), rf"weights of shape \({B}, {H}, {T}, {D}\) are not square"),
        (lambda x: walk(AttentionMap(x, x[:, :, :3]), 1), "a walk needs T × T"),
        (lambda x: walk(x @ x.mT, 1), "rows of weights must sum to 1, or to 0 if fully masked; one sums to"),
        (lambda x: walk(stochastic(T, T), -1), "walk steps=-1 must not be negative"),
        (lambda x: walk(stochastic(T, T), 1, T), f"start={T} is out of range for size {T}"),
        (
            lambda x: walk(stochastic(T, T), 1, torch.ones(3)),
            rf"start of shape \(3,\) is not a distribution over {T} tokens",
        ),
        (lambda x: rollout([]), "layers is empty"),
        (lambda x: rollout([-stochastic(1, 1, 3, 3)]), r"layers\[0\] may have negative weights"),
        (lambda x: rollout([stochastic(1, 1, 3, 3)], 1.5), r"residual=1\.5 must lie in \[0, 1\]"),
        (
            lambda x: rollout([stochastic(3, 3)]),
            r"layers\[0\] must have 4 dimensions \(B, H, T, T\), got shape \(3, 3\)",
        ),
        (
            lambda x: flow_to([stochastic(1, 1, 3, 3), stochastic(1, 1, 4, 4)], 0),
            r"layers\[1\] has \(batch, length\) = \(1, 4\), but layers\[0\] has \(1, 3\)",
        ),
    ],
)
def test_bad_questions(ask: Callable[[Tensor], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ask(heads(B, H, T, D))


def test_weights_in_half_precision_pass_for_a_graph() -> None:
    weights = stochastic(1, 1, 300, 300).bfloat16()
    assert math.isclose(float(walk(weights, 1, 0).float().sum()), 1, abs_tol=0.02)
