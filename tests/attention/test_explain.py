"""``explain``: every step of the formula by name, and the reason for √d_k as a measurement."""

from __future__ import annotations

import math

import pytest
import torch

from regard.attention import Additive, Concat, Dot, General, Linear, Performer, Steps, attend, explain, masks
from regard.attention.biases import Alibi

from .helpers import Sizes, inputs

NAMES = ("scores", "scaled", "biased", "masked", "weights", "output")


def test_the_steps_have_names_and_shapes() -> None:
    sizes = Sizes(2, 4, 2, 5, 7, 3)
    steps = explain(*inputs(sizes), mask=masks.causal())
    assert isinstance(steps, Steps)
    assert steps._fields == NAMES
    assert all(x.shape == (2, 4, 5, 7) for x in steps[:-1])
    assert steps.output.shape == (2, 4, 5, 3)


def test_each_step_follows_from_the_one_before() -> None:
    q, k, v = inputs(Sizes(2, 4, 4, 5, 7, 3))
    mask, bias = masks.causal(), Alibi(4).double()
    steps = explain(q, k, v, mask=mask, bias=bias)
    allowed = mask.dense(5, 7)
    torch.testing.assert_close(steps.scores, q @ k.transpose(-1, -2))
    torch.testing.assert_close(steps.scaled, steps.scores / math.sqrt(3))
    distance = torch.arange(7) - (torch.arange(5)[:, None] + 2)
    torch.testing.assert_close(steps.biased, steps.scaled - bias.slopes.view(1, 4, 1, 1) * distance.abs())
    assert torch.equal(steps.masked, steps.biased.masked_fill(~allowed, -math.inf))
    torch.testing.assert_close(steps.weights, torch.softmax(steps.masked, -1))
    torch.testing.assert_close(steps.output, steps.weights @ v)
    torch.testing.assert_close(steps.output, attend(q, k, v, mask=mask, bias=bias).output)


def test_steps_that_do_nothing_change_nothing() -> None:
    steps = explain(*inputs(Sizes()), scale=1.0)
    assert all(torch.equal(steps.scores, x) for x in (steps.scaled, steps.biased, steps.masked))


@pytest.mark.parametrize(
    "mechanism", [Dot(0.3), General(4, 3), Additive(4, 3), Concat(4, 3), Linear(), Performer(3)], ids=lambda m: m.name
)
def test_every_mechanism_explains_itself(mechanism: object) -> None:
    q, k, v = inputs(Sizes(), dtype=torch.float32)
    with torch.no_grad():
        steps = explain(q, k, v, mask=masks.causal(), mechanism=mechanism)
        wanted = attend(q, k, v, mask=masks.causal(), mechanism=mechanism, weights=True, backend="reference")
    torch.testing.assert_close(steps.output, wanted.output)
    torch.testing.assert_close(steps.weights, wanted.weights)
    hidden = 0.0 if mechanism.normaliser == "linear" else -math.inf
    assert (steps.masked[:, :, 0, 1:] == hidden).all()


def test_a_row_without_keys_is_explained_as_zero() -> None:
    steps = explain(*inputs(Sizes()), mask=masks.padding(torch.tensor([0, 5])))
    assert (steps.weights[0] == 0).all()
    assert (steps.output[0] == 0).all()


@pytest.mark.parametrize("d_head", [4, 64, 512])
def test_why_the_scores_are_divided_by_the_root_of_the_width(d_head: int) -> None:
    """Vaswani et al. 2017, footnote 4: Var(q·k) = d_k for unit-variance q and k; after scaling it is 1."""
    torch.manual_seed(0)
    n_pairs = 4000
    q, k = torch.randn(2, n_pairs, 1, 1, d_head)  # one query and one key for each of the batch: independent scores
    steps = explain(q, k, k)
    sigma = math.sqrt((2 + 6 / d_head) / n_pairs)  # of a measured variance, relative; q·k has kurtosis 3 + 6 / d_k
    assert steps.scores.var().item() == pytest.approx(d_head, rel=4 * sigma)
    assert steps.scaled.var().item() == pytest.approx(1, rel=4 * sigma)
    assert abs(steps.scores.mean().item()) < 4 * math.sqrt(d_head / n_pairs)


def test_without_the_root_the_softmax_is_a_maximum() -> None:
    """What the scaling prevents: one key gets nearly everything, and the gradient is gone."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 50, 20, 512)
    unscaled, scaled = explain(q, k, k, scale=1.0).weights, explain(q, k, k).weights
    assert unscaled.amax(-1).mean() > 0.9
    assert scaled.amax(-1).mean() < 0.3
