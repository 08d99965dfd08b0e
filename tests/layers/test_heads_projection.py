"""The fused projection to heads is the linear layer and its views: heads and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from regard.attention import MultiHeadAttention
from regard.layers.heads_projection import HeadsProjection, fuse_projections
from regard.layers.row_operators import joined_rows


@pytest.mark.parametrize(("fp8", "most"), [(False, 0.012), (True, 0.08)])
@pytest.mark.parametrize(("counts", "bias"), [((4, 4, 4), True), ((4, 2, 2), False), ((3, 3), True)])
def test_it_is_the_linear_layer_and_its_views(counts: tuple[int, ...], bias: bool, fp8: bool, most: float) -> None:
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
    fuse_projections(attention, fp8=False)
    assert isinstance(attention.w_qkv, HeadsProjection)
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), plain)
    compiled(x.requires_grad_()).sum().backward()
    assert isinstance(x.grad, Tensor)


def test_a_frozen_projection_stays_a_linear_layer() -> None:
    attention = MultiHeadAttention(32, 4, cross=True)
    attention.w_kv.weight.requires_grad_(False)
    fuse_projections(attention, fp8=True)
    assert type(attention.w_kv) is nn.Linear


@pytest.mark.parametrize("fp8", [False, True])
def test_a_graph_knows_the_shapes_of_the_operator(fp8: bool) -> None:
    torch.library.opcheck(joined_rows, ([torch.randn(6, n).bfloat16() for n in (32, 16, 16)], fp8))
