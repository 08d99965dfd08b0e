"""Linear layers in eight bits: near the products they stand for, the same numbers wherever a row stands."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.small import small_config
from regard.models import build
from regard.training.fused_layers import (
    E4M3,
    Fp8Linear,
    FusedFeedForward,
    HeadsProjection,
    gains_from_fp8,
    scale_rows,
    use_fp8,
)
from regard.training.gradient_pass import WorkingWeights
from regard.training.loss import Objective
from regard.training.precision import Precision


def test_it_is_the_linear_layer_within_what_three_bits_keep() -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(32, 48), torch.randn(3, 7, 32, requires_grad=True)
    eight = Fp8Linear(linear)
    assert eight.weight is linear.weight
    exact, found = linear(x), eight(x)
    assert found.dtype == torch.bfloat16
    assert (found - exact).norm() < 0.05 * exact.norm()
    slope = torch.randn_like(exact)
    wanted = torch.autograd.grad(exact, (x, linear.weight, linear.bias), slope)
    grads = torch.autograd.grad(found, (x, linear.weight, linear.bias), slope.bfloat16())
    for mine, theirs, most in zip(grads, wanted, (0.08, 0.01, 0.01), strict=True):
        assert (mine - theirs).norm() < most * theirs.norm()


def test_rows_of_any_size_use_the_whole_range() -> None:
    x = torch.tensor([[1e-30, -2e-30], [0.0, 0.0], [3e4, 1.0], [1e-3, 5e-4]])
    eight, scale = scale_rows(x)
    assert eight.dtype == E4M3
    assert scale.shape == (4, 1)
    torch.testing.assert_close((eight.float() * scale)[2:], x[2:], rtol=0.13, atol=0.1)
    assert eight.float()[3].abs().max() == torch.finfo(E4M3).max
    assert eight.float().isfinite().all()
    assert scale_rows(x.T)[0].is_contiguous(), "which the matrix units ask for"


def test_the_large_layers_of_a_model_but_neither_its_norms_nor_its_embeddings() -> None:
    model = build(small_config("gpt2", d_model=512, n_heads=2, d_ff=1536, n_layers=1, dropout=0.0))
    working = WorkingWeights(Objective(model), fp8=True).objective.model
    (block,) = working.stacks()[0].blocks
    assert isinstance(block.attention.w_qkv, HeadsProjection)
    assert block.attention.w_qkv.fp8
    assert type(block.attention.w_o) is nn.Linear, "512 × 512 would take longer than in bf16"
    assert isinstance(block.ff, FusedFeedForward)
    assert block.ff.fp8
    assert not any(isinstance(part, HeadsProjection | FusedFeedForward) for part in model.modules()), (
        "the model is unchanged"
    )
    assert working.head is not None
    assert working.head.fp8
    several = nn.Sequential(nn.Linear(1000, 1048), nn.Linear(1024, 1024), nn.Linear(1024, 1008))
    use_fp8(several)
    assert [type(part) for part in several] == [nn.Linear, Fp8Linear, nn.Linear]
    assert not gains_from_fp8(nn.Identity())


def test_a_device_without_it_says_so() -> None:
    with pytest.raises(ValueError, match="precision='fp8' is not supported by this cpu device; it has fp32"):
        Precision("fp8", "cpu")
