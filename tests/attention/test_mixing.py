"""Linformer's summaries and FNet's Fourier mixing, and how far an approximation is from exact attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard.attention import Dot, Frame, attend, masks
from regard.attention.token_mixing import Fourier, Linformer, approximation_error, fourier_mix

BACKENDS = ("reference", "tiled", "sdpa")


def heads(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def linformer(length: int, rank: int, n_heads: int | None = None, seed: int = 0) -> Linformer:
    made = Linformer(length, rank, n_heads).double()
    with torch.no_grad():
        for n, weight in enumerate((made.e, made.f)):
            weight.copy_(heads(*weight.shape, seed=seed + n) / math.sqrt(length))
    return made


def fixed(e: Tensor) -> Linformer:
    """A Linformer whose E and F are both this matrix (rank, length)."""
    made = Linformer(e.shape[1], e.shape[0]).to(e.dtype)
    with torch.no_grad():
        made.e.copy_(e)
        made.f.copy_(e)
    return made


# ------------------------------------------------------------------------- Linformer: the equation


@settings(max_examples=40, deadline=None)
@given(
    b=st.integers(1, 2),
    g=st.integers(1, 2),
    shared=st.integers(1, 2),
    t=st.integers(1, 9),
    s=st.integers(1, 12),
    rank=st.integers(1, 12),
    own=st.booleans(),
    backend=st.sampled_from(BACKENDS),
)
def test_is_softmax_over_summaries(
    b: int, g: int, shared: int, t: int, s: int, rank: int, own: bool, backend: str
) -> None:
    mechanism = linformer(12, rank, g if own else None)
    q, k, v = heads(b, g * shared, t, 4), heads(b, g, s, 4, seed=1), heads(b, g, s, 4, seed=2)
    found = attend(q, k, v, mechanism=mechanism, backend=backend).output
    e, f = (w[..., :s].expand(b, g, rank, s) for w in (mechanism.e, mechanism.f))
    keys, values = ((w @ x).repeat_interleave(shared, 1) for w, x in ((e, k), (f, v)))
    torch.testing.assert_close(found, torch.softmax(q @ keys.transpose(-1, -2) / 2, -1) @ values)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_changes_nothing_and_equals_the_shorter_sequence(backend: str) -> None:
    mechanism = linformer(9, 4)
    q, k, v = heads(2, 2, 5, 4), heads(2, 2, 9, 4, seed=1), heads(2, 2, 9, 4, seed=2)
    how = {"mask": masks.padding(torch.tensor([9, 6])), "mechanism": mechanism, "backend": backend}
    before = attend(q, k, v, **how).output
    k[1, :, 6:], v[1, :, 6:] = 1e6, float("nan")
    torch.testing.assert_close(attend(q, k, v, **how).output, before)
    alone = attend(q[1:], k[1:, :, :6], v[1:, :, :6], mechanism=mechanism, backend=backend).output
    torch.testing.assert_close(before[1:], alone)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_keys_the_output_is_zero_and_gradients_are_finite(backend: str) -> None:
    q, k, v = (heads(2, 2, 5, 4, seed=n).requires_grad_() for n in range(3))
    mechanism = linformer(5, 3)
    output = attend(q, k, v, mask=masks.padding(torch.tensor([0, 5])), mechanism=mechanism, backend=backend).output
    output.square().sum().backward()
    assert (output[0] == 0).all()
    assert all((x.grad[0] == 0).all() and x.grad.isfinite().all() for x in (q, k, v))
    assert mechanism.e.grad.isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_gradcheck_inputs_and_projections(backend: str) -> None:
    q, k, v = (heads(2, 2 - (n > 0), 4, 2, seed=n).requires_grad_() for n in range(3))
    mechanism = linformer(5, 3, n_heads=1)

    def run(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        mask = masks.padding(torch.tensor([4, 2]))
        return attend(q, k, v, mask=mask, mechanism=mechanism, backend=backend).output

    assert torch.autograd.gradcheck(run, (q, k, v, mechanism.e, mechanism.f))


def test_its_map_is_queries_by_summaries() -> None:
    q, k, v = (heads(1, 2, 7, 4, seed=n) for n in range(3))
    weights = attend(q, k, v, mechanism=linformer(7, 3), weights=True).weights
    assert weights.shape == (1, 2, 7, 3)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 7).double())


def test_columns_belong_to_positions_not_to_indices() -> None:
    """The same keys, in slots out of order with an empty one between, or standing further on in the sequence."""
    mechanism = linformer(8, 3)
    q, k, v = (heads(1, 2, 4, 4, seed=n) for n in range(3))
    wanted = attend(q, k, v, mechanism=mechanism).output
    order = torch.tensor([2, 0, 3, 1])
    slots = [torch.cat([x[:, :, order], torch.full_like(x[:, :, :1], 9)], 2) for x in (k, v)]
    k_pos = torch.cat([order, torch.tensor([-1])])
    for pos in (k_pos, k_pos[None]):
        frame = Frame(1, 2, torch.arange(4), pos)
        torch.testing.assert_close(attend(q, *slots, mechanism=mechanism, frame=frame).output, wanted)
    further = attend(q, k, v, mechanism=mechanism, frame=Frame.aligned(1, 2, 4, 4, q_start=4, k_start=4)).output
    later = fixed(torch.cat([mechanism.e[:, 4:], mechanism.e[:, 4:]], 1).detach())
    with torch.no_grad():
        later.f.copy_(torch.cat([mechanism.f[:, 4:], mechanism.f[:, 4:]], 1))
    torch.testing.assert_close(further, attend(q, k, v, mechanism=later).output)


def test_traces_without_a_break() -> None:
    mechanism = Linformer(16, 4)
    x = [heads(1, 2, 16, 8, seed=n, dtype=torch.float32) for n in range(3)]
    compiled = torch.compile(lambda *x: attend(*x, mechanism=mechanism).output, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*x), attend(*x, mechanism=mechanism).output)


# ------------------------------------------------------------------------- Linformer: the error


def averages(length: int, rank: int) -> Tensor:
    """(rank, length): each row the mean over its own stretch of the sequence."""
    return torch.eye(rank, dtype=torch.float64).repeat_interleave(length // rank, dim=1) * (rank / length)


def slow_heads(seed: int, n_waves: int = 4, length: int = 64) -> Tensor:
    """Heads of low rank along the sequence: mixtures of a constant and three slow waves."""
    place = (torch.arange(length, dtype=torch.float64) + 0.5) / length
    waves = torch.cos(math.pi * torch.arange(n_waves)[None] * place[:, None])  # (T, waves)
    return waves @ heads(1, 2, n_waves, 16, seed=seed)


@pytest.mark.parametrize("mask", [None, masks.padding(torch.tensor([12]))], ids=["plain", "padding"])
def test_exact_when_nothing_is_summed_up(mask: masks.Mask | None) -> None:
    q, k, v = (heads(1, 2, 12, 4, seed=n) for n in range(3))
    assert approximation_error(fixed(torch.eye(12).double()), q, k, v, mask) < 1e-14


def test_exact_for_keys_that_repeat_within_a_stretch() -> None:
    q, k, v = heads(1, 2, 24, 4), *(heads(1, 2, 6, 4, seed=n).repeat_interleave(4, 2) for n in (1, 2))
    assert approximation_error(fixed(averages(24, 6)), q, k, v) < 1e-14
    assert approximation_error(fixed(averages(24, 3)), q, k, v) > 0.1


def test_error_is_bounded_for_keys_of_low_rank_and_falls_with_the_rank() -> None:
    q, k, v = (slow_heads(seed) for seed in range(3))
    errors = [approximation_error(fixed(averages(64, rank)), q, k, v) for rank in (4, 8, 16, 32, 64)]
    assert all(b < a / 2 for a, b in pairwise(errors)), errors
    assert errors[1] < 0.1, errors
    assert errors[2] < 0.03, errors


def test_the_error_is_the_square_of_what_changes_within_a_stretch() -> None:
    """To first order in ε, softmax of an average is the average of softmaxes."""
    q, k, v = heads(1, 2, 24, 4), *(heads(1, 2, 6, 4, seed=n).repeat_interleave(4, 2) for n in (1, 2))
    mechanism = fixed(averages(24, 6))
    for noise in (1e-4, 1e-3, 1e-2, 1e-1):
        k_noisy, v_noisy = k + noise * heads(*k.shape, seed=5), v + noise * heads(*v.shape, seed=6)
        assert 0.1 * noise**2 < approximation_error(mechanism, q, k_noisy, v_noisy) < noise**2


def test_untrained_it_approximates_nothing() -> None:
    q, k, v = (slow_heads(seed) for seed in range(3))
    assert approximation_error(linformer(64, 16), q, k, v) > 0.5


# ------------------------------------------------------------------------- approximation_error itself


def test_error_is_relative_to_exact_attention_of_the_same_scale() -> None:
    q, k, v = (heads(1, 2, 8, 4, seed=n) for n in range(3))
    assert approximation_error(Dot(), q, k, v) == 0
    assert approximation_error(Dot(0.9), q, k, v, masks.causal()) == 0
    half = Linformer(8, 8, scale=0.5).double()
    with torch.no_grad():
        half.e.copy_(torch.eye(8))
        half.f.copy_(1.25 * torch.eye(8))
    assert approximation_error(half, q, k, v) == pytest.approx(0.25)
    assert not torch.is_tensor(approximation_error(half, q.requires_grad_(), k, v))


# ------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda q: attend(q, q, q, mask=masks.causal(), mechanism=linformer(4, 2)), r"can only be padding, got Causal"),
        (
            lambda q: attend(
                q, q, q, mask=masks.padding(torch.tensor([3])) & masks.causal(), mechanism=linformer(4, 2)
            ),
            "got And",
        ),
        (lambda q: attend(q, q, q, mask=torch.ones(3, 3).bool(), mechanism=linformer(4, 2)), "got Dense"),
        (lambda q: attend(q, q, q, mechanism=linformer(2, 2)), "Linformer has length=2, but the keys need 3"),
        (
            lambda q: attend(q, q, q, mechanism=linformer(4, 2), frame=Frame.aligned(1, 2, 3, 3, k_start=2)),
            "Linformer has length=4, but the keys need 5",
        ),
        (
            lambda q: attend(
                q, q, q, mechanism=linformer(4, 2), frame=Frame(1, 2, torch.arange(3), torch.arange(3) + 2)
            ),
            "Linformer has length=4, but the keys need 5",
        ),
        (lambda q: attend(q, q, q, mechanism=linformer(4, 2, n_heads=3)), "n_heads=3, but k has 2 heads"),
        (lambda q: attend(q, q[..., :2], q, mechanism=linformer(4, 2)), "q has head width 4 but k has 2"),
        (lambda q: Linformer(4, 5), "rank=5 must lie between 1 and length=4"),
        (lambda q: Linformer(4, 0), "rank=0 must lie between 1 and length=4"),
        (lambda q: fourier_mix(q), "3 non-empty dimensions"),
        (lambda q: fourier_mix(q[0, :, :0]), r"non-empty dimensions .*, got shape \(2, 0, 4\)"),
    ],
)
def test_bad_input_gets_one_sentence(act: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        act(heads(1, 2, 3, 4))


def test_fourier_wants_real_numbers() -> None:
    with pytest.raises(TypeError, match=r"floating point, got torch\.int64"):
        fourier_mix(torch.ones(1, 2, 3, dtype=torch.int64))


# ------------------------------------------------------------------------- Fourier mixing


@settings(max_examples=30, deadline=None)
@given(b=st.integers(1, 2), t=st.integers(1, 13), m=st.integers(1, 12))
def test_fourier_mixing_is_the_sum_in_the_paper(b: int, t: int, m: int) -> None:
    """Re Σ x e^{-i(a + b)} = Σ x (cos a cos b - sin a sin b), as two pairs of matrices."""
    x = heads(b, t, m)

    def angles(n: int) -> Tensor:
        steps = torch.arange(n, dtype=torch.float64)
        return 2 * math.pi * torch.outer(steps, steps) / n

    over_t, over_m = angles(t), angles(m)
    wanted = over_t.cos() @ x @ over_m.cos() - over_t.sin() @ x @ over_m.sin()
    torch.testing.assert_close(fourier_mix(x), wanted)


def test_fourier_mixing_reaches_every_token_and_has_nothing_to_train() -> None:
    x = torch.zeros(1, 8, 6, dtype=torch.float64)
    x[0, 3, 2] = 1
    layer = Fourier()
    assert not list(layer.parameters())
    assert (layer(x).abs().amax(-1) > 0).all()


def test_fourier_gradcheck_and_half_precision() -> None:
    assert torch.autograd.gradcheck(fourier_mix, (heads(2, 5, 4).requires_grad_(),))
    x = heads(1, 256, 128).bfloat16()
    mixed = fourier_mix(x)
    assert mixed.dtype == torch.bfloat16
    exact = fourier_mix(x.double())
    assert (mixed.double() - exact).norm() / exact.norm() < 0.003
