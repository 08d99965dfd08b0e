"""Norms: equal to torch's and transformers', with statistics in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from regard.layers import NORM_KINDS, LayerNorm, RMSNorm, make_norm

X = torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(0)) * 3 + 1


def randomise(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.normal_(parameter, mean=0.7)


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_is_torchs(bias: bool) -> None:
    theirs, ours = nn.LayerNorm(24, eps=1e-3, bias=bias), LayerNorm(24, 1e-3, bias)
    randomise(theirs)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours(X), theirs(X))


def test_rms_norm_is_llamas_and_t5s() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    for cls in (LlamaRMSNorm, T5LayerNorm):
        theirs, ours = cls(24, eps=1e-3), RMSNorm(24, 1e-3)
        randomise(theirs)
        ours.load_state_dict(theirs.state_dict())
        torch.testing.assert_close(ours(X), theirs(X), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offset_is_gemmas(dtype: torch.dtype) -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    theirs, ours = GemmaRMSNorm(24, eps=1e-3).to(dtype), RMSNorm(24, 1e-3, offset=1.0).to(dtype)
    assert torch.equal(ours(X.to(dtype)), theirs(X.to(dtype)))  # untrained: both multiply by one
    nn.init.normal_(theirs.weight, std=1e-3)  # one plus this is one in bf16, so the sum must be wider
    ours.load_state_dict(theirs.state_dict())
    out, expected = ours(X.to(dtype)), theirs(X.to(dtype))
    if dtype == torch.float32:
        torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)
    else:
        assert (out != expected).float().mean() < 0.01


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_fp32_statistics(kind: str, dtype: torch.dtype) -> None:
    """Squares of 300 overflow fp16 and sums of many drown in bf16; the result may only be rounded, not wrong."""
    norm = make_norm(kind, 4096)
    x = (torch.randn(2, 4096) * 300).to(dtype)
    expected = norm(x.double().float())
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(norm.to(dtype)(x).float(), expected, atol=eps, rtol=eps)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("autocast", [True, False])
def test_half_precision_activations_may_meet_fp32_weights(kind: str, autocast: bool) -> None:
    norm = make_norm(kind, 24)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = norm(X.bfloat16())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), norm(X.bfloat16().float()), atol=2**-7, rtol=2**-7)


def test_untrained_norms_normalise() -> None:
    out = make_norm("layer", 24)(X)
    torch.testing.assert_close(out.mean(-1), torch.zeros(3, 5), atol=1e-5, rtol=0)
    torch.testing.assert_close(out.var(-1, correction=0), torch.ones(3, 5), atol=1e-4, rtol=0)
    for offset in (0.0, 1.0):
        out = make_norm("rms", 24, offset=offset)(X)
        torch.testing.assert_close(out.square().mean(-1), torch.ones(3, 5), atol=1e-4, rtol=0)
    assert make_norm("none", 24)(X) is X


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_gradients(kind: str) -> None:
    norm = make_norm(kind, 5, offset=0.5).double()
    randomise(norm)
    assert torch.autograd.gradcheck(norm, (X[0, :2, :5].double().requires_grad_(),))


def test_make_norm_passes_its_arguments_on() -> None:
    layer, rms = make_norm("layer", 4, 1e-3, bias=False), make_norm("rms", 4, 1e-2, offset=1.0)
    assert isinstance(layer, LayerNorm)
    assert (layer.eps, layer.bias) == (1e-3, None)
    assert isinstance(rms, RMSNorm)
    assert (rms.eps, rms.offset) == (1e-2, 1.0)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"norm='rmsnorm' is not known; did you mean 'rms'\? known: layer, rms, none"):
        make_norm("rmsnorm", 4)
    with pytest.raises(ValueError, match="d=0 must be at least 1"):
        make_norm("layer", 0)
    assert set(NORM_KINDS) == {"layer", "rms", "none"}
