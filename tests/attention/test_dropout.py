"""Dropout that tiles: a hash of (seed, b, h, i, j), the same whoever asks for it, and as random as it has to be."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from regard.attention import Frame, MultiHeadAttention, attend, masks
from regard.attention.biases import T5Bias
from regard.attention.reference import draw_seed, dropout_tile

from .helpers import Sizes, inputs

ALL = slice(None)
B, H, T, S = 4, 6, 40, 50
RATES = [0.05, 0.1, 0.5, 0.9]


def keep(rate: float, seed: int = 0, frame: Frame | None = None) -> Tensor:
    frame = Frame.aligned(B, H, T, S) if frame is None else frame
    return dropout_tile(rate, torch.tensor(seed), ALL, ALL, frame)


def within(share: float, wanted: float, n: int, sigmas: float = 5.0) -> bool:
    return abs(share - wanted) < sigmas * (wanted * (1 - wanted) / n) ** 0.5


def test_a_tile_is_a_part_of_the_whole() -> None:
    frame, seed = Frame.aligned(B, H, T, S), torch.tensor(9)
    whole = keep(0.3, 9)
    index = torch.tensor([30, 2, 17])
    for rows, cols in ((slice(3, 20), slice(40, 50)), (slice(39, 40), ALL), (index, slice(7, 8)), (index, index)):
        assert torch.equal(dropout_tile(0.3, seed, rows, cols, frame), whole[:, :, rows][..., cols])
    part = frame.part(range(1, 3), range(2, 6))
    assert torch.equal(dropout_tile(0.3, seed, ALL, ALL, part), whole[1:3, 2:6])
    inner = dropout_tile(0.3, seed, slice(5, 9), slice(8, 30), part)
    assert torch.equal(inner, whole[1:3, 2:6, 5:9, 8:30])


def test_positions_do_not_matter_only_places_do() -> None:
    """A frame may say that a key stands elsewhere; what is dropped depends on where it lies."""
    assert torch.equal(keep(0.4), keep(0.4, frame=Frame.aligned(B, H, T, S, q_start=100, k_start=7)))


@pytest.mark.parametrize("rate", RATES)
def test_keeps_as_many_as_it_should(rate: float) -> None:
    for seed in (0, 1, 123_456_789, 2**31 - 2, -5):
        kept = keep(rate, seed).double()
        assert within(kept.mean().item(), 1 - rate, kept.numel())
        for axis in range(4):  # and in every sequence, head, row and column
            lines = kept.mean([a for a in range(4) if a != axis])
            assert all(within(share, 1 - rate, kept.numel() // kept.shape[axis]) for share in lines.tolist())


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_neighbours_are_independent(rate: float) -> None:
    """The joint counts of a weight and one a step away along any axes: chi-square with 1 degree of freedom."""
    kept = keep(rate, 3)
    for step in itertools.product((0, 1), repeat=4):
        if not any(step):
            continue
        here = kept[tuple(slice(0, n - 1) for n in kept.shape)]
        there = kept[tuple(slice(d, n - 1 + d) for d, n in zip(step, kept.shape, strict=True))]
        assert chi_square(here, there) < 15, f"{step}: one in ten thousand"


def test_seeds_are_independent() -> None:
    a = keep(0.5, 0)
    for seed in (1, 2, 3, 1000):
        assert chi_square(a, keep(0.5, seed)) < 15


def test_rectangles_are_independent() -> None:
    """Row and column are hashed apart and joined: the four corners of a rectangle must not know of each other."""
    kept = keep(0.5, 4)
    parity = kept[:, :, :-1, :-1] ^ kept[:, :, 1:, :-1] ^ kept[:, :, :-1, 1:] ^ kept[:, :, 1:, 1:]
    assert within(parity.double().mean().item(), 0.5, parity.numel())


def chi_square(a: Tensor, b: Tensor) -> float:
    counts = torch.tensor([[(x & y).sum() for y in (b, ~b)] for x in (a, ~a)], dtype=torch.float64)
    expected = counts.sum(1, keepdim=True) * counts.sum(0, keepdim=True) / counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def test_the_seed_comes_from_torchs_generator() -> None:
    torch.manual_seed(3)
    first = draw_seed(torch.device("cpu"))
    assert draw_seed(torch.device("cpu")) != first
    torch.manual_seed(3)
    assert draw_seed(torch.device("cpu")) == first


# ---- in attention


@pytest.mark.parametrize("backend", ["reference", "tiled", "auto"])
def test_a_seed_gives_the_same_on_every_backend(backend: str) -> None:
    """Forward and backward, over several tiles, with mask, bias and shared heads."""
    q, k, v = inputs(Sizes(2, 4, 2, 270, 300, 3), grad=True)
    bias = T5Bias(4).double()
    options = {"mask": masks.causal(), "bias": bias, "dropout": 0.3, "seed": 17}
    results = []
    for name in (backend, "reference"):
        found = attend(q, k, v, backend=name, **options).output
        results.append([found, *torch.autograd.grad(found.square().sum(), (q, k, v, bias.w))])
    for ours, wanted in zip(*results, strict=True):
        torch.testing.assert_close(ours, wanted)


@pytest.mark.parametrize("backend", ["reference", "tiled", "sdpa", "auto"])
def test_the_mean_is_the_attention_without_dropout(backend: str) -> None:
    q, k, v = inputs(Sizes(1, 2, 2, 5, 30, 4))
    torch.manual_seed(0)
    drawn = torch.stack([attend(q, k, v, dropout=0.25, backend=backend).output for _ in range(600)])
    error = (drawn.mean(0) - attend(q, k, v).output) / (drawn.std(0) / 600**0.5)
    assert error.abs().max() < 5
    assert drawn.std(0).min() > 0, "and it does vary"


def test_manual_seed_governs_dropout() -> None:
    q, k, v = inputs(Sizes())
    for backend in ("reference", "tiled", "sdpa"):
        torch.manual_seed(5)
        first, second = (attend(q, k, v, dropout=0.5, backend=backend).output for _ in range(2))
        torch.manual_seed(5)
        assert torch.equal(attend(q, k, v, dropout=0.5, backend=backend).output, first)
        assert not torch.equal(first, second)


def test_weights_are_those_before_dropout() -> None:
    q, k, v = inputs(Sizes())
    dropped = attend(q, k, v, dropout=0.5, seed=1, weights=True)
    assert dropped.weights is not None
    torch.testing.assert_close(dropped.weights.sum(-1), torch.ones_like(dropped.weights[..., 0]))
    assert not torch.allclose(dropped.output, attend(q, k, v).output)


def test_a_module_drops_only_while_training() -> None:
    attention, x = MultiHeadAttention(8, 2, dropout=0.5), torch.randn(1, 5, 8)
    assert not torch.equal(attention(x), attention(x))
    attention.eval()
    assert torch.equal(attention(x), attention(x))


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5])
def test_a_rate_outside_its_range_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match=rf"dropout={rate} must lie in \[0, 1\)"):
        attend(*inputs(Sizes()), dropout=rate)
