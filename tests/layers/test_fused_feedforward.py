"""The fused feed-forward network is the plain one: output and every gradient, in bf16 and in eight bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.small import small_config
from regard.layers.feedforward import ACTIVATIONS, FeedForward
from regard.layers.fused_feedforward import FusedFeedForward, fuse_feedforwards
from regard.layers.row_operators import KINDS, activated_rows, gradient_rows, slope
from regard.models import build


@pytest.mark.parametrize(("fp8", "most"), [(False, 0.012), (True, 0.1)])
@pytest.mark.parametrize("kind", ["gelu_tanh", "silu"])
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_the_plain_network(kind: str, bias: bool, fp8: bool, most: float) -> None:
    torch.manual_seed(0)
    plain, x = FeedForward(64, 128, kind, bias=bias), torch.randn(3, 5, 64, requires_grad=True)
    fused = FusedFeedForward(plain, fp8)
    assert dict(fused.named_parameters()) == dict(plain.named_parameters())
    exact, found = plain(x), fused(x)
    assert found.dtype == torch.bfloat16
    assert found.shape == exact.shape
    slopes = torch.randn_like(exact)
    wanted = torch.autograd.grad(exact, (x, *plain.parameters()), slopes)
    grads = torch.autograd.grad(found, (x, *plain.parameters()), slopes.bfloat16())
    for mine, theirs in zip((found, *grads), (exact, *wanted), strict=True):
        assert (mine - theirs).norm() < most * theirs.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_the_slopes_are_derivatives(kind: str) -> None:
    x = torch.linspace(-4, 4, 101, dtype=torch.float64, requires_grad=True)
    (wanted,) = torch.autograd.grad(ACTIVATIONS[kind](x).sum(), x)
    torch.testing.assert_close(slope(x.detach(), kind), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_graph_knows_the_shapes_of_the_operators(fp8: bool) -> None:
    hidden = torch.randn(6, 32, dtype=torch.bfloat16)
    factors = torch.ones(6, 1)
    torch.library.opcheck(activated_rows, (hidden, "relu"))
    for inputs in ((hidden, None, hidden, "relu", fp8), (hidden, factors, None, "none", fp8)):
        torch.library.opcheck(gradient_rows, inputs)
    plain = FeedForward(32, 64)
    compiled = torch.compile(FusedFeedForward(plain, fp8), backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 3, 32, requires_grad=True)
    torch.testing.assert_close(compiled(x), FusedFeedForward(plain, fp8)(x))


def test_networks_with_a_gate_dropout_or_frozen_weights_stay_plain() -> None:
    kinds = [build(small_config(name)).decoder.blocks[0].ff for name in ("gpt2", "llama-7b")]
    frozen = FeedForward(32, 64)
    frozen.w_in.weight.requires_grad_(False)
    module = nn.ModuleList([*kinds, FeedForward(32, 64, dropout=0.1), frozen])
    fuse_feedforwards(module, fp8=False)
    assert [type(part) for part in module] == [FusedFeedForward, *[FeedForward] * 3]
