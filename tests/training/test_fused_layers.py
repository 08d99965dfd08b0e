"""Fused layers are the plain ones: output and every gradient, in bf16 and in eight bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from models.small import small_config
from regard.attention import MultiHeadAttention
from regard.layers.feedforward import ACTIVATIONS, FeedForward
from regard.models import build
from regard.training.fused_layers import (
    KINDS,
    FusedFeedForward,
    HeadsProjection,
    activated_rows,
    fuse_layers,
    gradient_rows,
    joined_rows,
    slope,
    use_fp8,
)


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


@pytest.mark.parametrize(("fp8", "most"), [(False, 0.05), (True, 0.15)])
@pytest.mark.parametrize("missing", ["w_in", "w_out"])
def test_one_of_the_biases_may_be_missing(missing: str, fp8: bool, most: float) -> None:
    torch.manual_seed(0)
    plain, x = FeedForward(64, 128), torch.randn(3, 5, 64)
    getattr(plain, missing).bias = None
    exact, found = plain(x), FusedFeedForward(plain, fp8)(x)
    wanted = torch.autograd.grad(exact.sum(), list(plain.parameters()))
    grads = torch.autograd.grad(found.sum(), list(plain.parameters()))
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
    torch.library.opcheck(joined_rows, ([torch.randn(6, n).bfloat16() for n in (32, 16, 16)], fp8))
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
    fuse_layers(module, fp8=False)
    assert [type(part) for part in module] == [FusedFeedForward, *[FeedForward] * 3]


@pytest.mark.parametrize(("fp8", "most"), [(False, 0.012), (True, 0.08)])
@pytest.mark.parametrize(("counts", "bias"), [((4, 4, 4), True), ((4, 2, 2), False), ((3, 3), True)])
def test_a_projection_to_heads_is_the_linear_layer_and_its_views(
    counts: tuple[int, ...], bias: bool, fp8: bool, most: float
) -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(32, 16 * sum(counts), bias=bias), torch.randn(2, 5, 32, requires_grad=True)
    projection = HeadsProjection(linear, fp8)
    assert dict(projection.named_parameters()) == dict(linear.named_parameters())
    wanted = [part.transpose(1, 2) for part in linear(x).unflatten(-1, (-1, 16)).split(counts, 2)]
    found = projection.heads(x, counts, 16)
    assert [part.shape for part in found] == [part.shape for part in wanted]
    slopes = [torch.randn_like(part) for part in wanted]
    inputs = (x, *linear.parameters())
    exact = torch.autograd.grad(wanted, inputs, slopes)
    grads = torch.autograd.grad(found, inputs, [slope.bfloat16() for slope in slopes])
    for mine, theirs in zip((*found, *grads), (*wanted, *exact), strict=True):
        assert (mine - theirs).norm() < most * theirs.norm()


def test_attention_with_it_is_one_graph() -> None:
    torch.manual_seed(0)
    attention, x = MultiHeadAttention(32, 4, n_kv_heads=2).bfloat16(), torch.randn(2, 7, 32).bfloat16()
    plain = attention(x)
    fuse_layers(nn.Sequential(attention), fp8=False)
    assert isinstance(attention.w_qkv, HeadsProjection)
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), plain)
    compiled(x.requires_grad_()).sum().backward()
    assert isinstance(x.grad, Tensor)


def test_a_frozen_projection_stays_a_linear_layer() -> None:
    attention = MultiHeadAttention(32, 4, cross=True)
    attention.w_kv.weight.requires_grad_(False)
    fuse_layers(nn.Sequential(attention), fp8=True)
    assert type(attention.w_kv) is nn.Linear


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("place", ["", "w_in", "w_out", "dropout"])
def test_layers_with_hooks_stay_plain(place: str, fp8: bool) -> None:
    ff, attention = FeedForward(512, 1536).bfloat16(), MultiHeadAttention(512, 8).bfloat16()
    calls: list[nn.Module] = []
    for layer in (ff.get_submodule(place), attention.w_qkv):
        layer.register_forward_hook(lambda layer, *_: calls.append(layer))
    module = nn.Sequential(ff, attention)
    fuse_layers(module, fp8)
    if fp8:
        use_fp8(module)
    module(torch.randn(1, 2, 512).bfloat16())
    assert calls == [ff.get_submodule(place), attention.w_qkv]
