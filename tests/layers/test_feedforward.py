"""The feed-forward network: equal to the ones in transformers, gate and up joined in one matrix."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from regard.layers import ACTIVATIONS, FEEDFORWARD_KINDS, GATED, OTHER_NAMES, FeedForward, activation_function

X = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1))


def copy_linear(ours: nn.Linear, *theirs: nn.Linear) -> None:
    with torch.no_grad():
        ours.weight.copy_(torch.cat([linear.weight for linear in theirs]))
        if ours.bias is not None:
            ours.bias.copy_(torch.cat([linear.bias for linear in theirs]))


@pytest.mark.parametrize("name", [*ACTIVATIONS, *OTHER_NAMES])
def test_activations_are_transformers(name: str) -> None:
    from transformers.activations import ACT2FN

    ours = OTHER_NAMES.get(name, name)
    theirs = {"gelu_tanh": "gelu_pytorch_tanh", "relu_squared": "relu2"}.get(name, name)
    x = torch.linspace(-9, 9, 1001)
    torch.testing.assert_close(activation_function(ours)(x), ACT2FN[theirs](x), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("kind", "act"), [("swiglu", "silu"), ("geglu", "gelu"), ("reglu", "relu")])
def test_gated_is_llamas(kind: str, act: str, bias: bool) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    config = LlamaConfig(hidden_size=12, intermediate_size=20, num_attention_heads=2, hidden_act=act, mlp_bias=bias)
    theirs, ours = LlamaMLP(config), FeedForward(12, 20, kind, bias=bias)
    copy_linear(ours.w_in, theirs.gate_proj, theirs.up_proj)
    copy_linear(ours.w_out, theirs.down_proj)
    torch.testing.assert_close(ours(X), theirs(X), atol=1e-6, rtol=0)
    assert torch.equal(ours.w_gate, theirs.gate_proj.weight)
    assert torch.equal(ours.w_up, theirs.up_proj.weight)


def test_gated_and_plain_are_t5s() -> None:
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5DenseActDense, T5DenseGatedActDense

    config = T5Config(d_model=12, d_ff=20, feed_forward_proj="gated-gelu")
    theirs, ours = T5DenseGatedActDense(config).eval(), FeedForward(12, 20, "geglu_tanh", bias=False)
    copy_linear(ours.w_in, theirs.wi_0, theirs.wi_1)
    copy_linear(ours.w_out, theirs.wo)
    torch.testing.assert_close(ours(X), theirs(X), atol=1e-6, rtol=0)

    plain_theirs = T5DenseActDense(T5Config(d_model=12, d_ff=20, feed_forward_proj="relu")).eval()
    plain = FeedForward(12, 20, "relu", bias=False)
    copy_linear(plain.w_in, plain_theirs.wi)
    copy_linear(plain.w_out, plain_theirs.wo)
    torch.testing.assert_close(plain(X), plain_theirs(X), atol=1e-6, rtol=0)


def test_plain_is_gpt2s() -> None:
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    theirs, ours = GPT2MLP(20, GPT2Config(n_embd=12)).eval(), FeedForward(12, 20, "gelu_tanh")
    nn.init.normal_(theirs.c_fc.bias)
    nn.init.normal_(theirs.c_proj.bias)
    with torch.no_grad():
        for linear, conv in ((ours.w_in, theirs.c_fc), (ours.w_out, theirs.c_proj)):
            linear.weight.copy_(conv.weight.T)
            linear.bias.copy_(conv.bias)
    torch.testing.assert_close(ours(X), theirs(X), atol=1e-6, rtol=0)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", FEEDFORWARD_KINDS)
def test_sizes(kind: str, bias: bool) -> None:
    rows = 40 if kind in GATED else 20
    count = sum(p.numel() for p in FeedForward(12, 20, kind, bias=bias).parameters())
    assert count == rows * 12 + 20 * 12 + (rows + 12) * bias


@pytest.mark.parametrize("kind", FEEDFORWARD_KINDS)
def test_positions_do_not_mix(kind: str) -> None:
    ffn = FeedForward(12, 20, kind)
    torch.testing.assert_close(ffn(X)[:, 3], ffn(X[:, 3]), atol=1e-6, rtol=0)


def test_dropout_follows_the_activation() -> None:
    ffn = FeedForward(12, 20, "relu", dropout=0.5, bias=False)
    with torch.no_grad():  # an identity on the way out shows the hidden vector itself
        ffn.w_in.weight.fill_(1.0)
    ffn.w_out = nn.Identity()  # type: ignore[assignment]
    hidden = ffn(torch.ones(200, 12))
    assert set(hidden.unique().tolist()) == {0.0, 24.0}  # 12 ones, kept ones doubled
    assert set(ffn.eval()(torch.ones(200, 12)).unique().tolist()) == {12.0}


def test_views_share_storage_and_train() -> None:
    ffn = FeedForward(12, 20, "swiglu")
    assert ffn.w_up.untyped_storage().data_ptr() == ffn.w_in.weight.untyped_storage().data_ptr()
    ffn(X).sum().backward()
    assert ffn.w_in.weight.grad is not None
    assert (ffn.w_in.weight.grad.abs().sum(-1) > 0).all()
    with pytest.raises(ValueError, match="activation='relu' has no gate"):
        _ = FeedForward(12, 20, "relu").w_gate


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("gelu_new", "gelu_tanh"), ("swish", "silu"), ("swigl", "swiglu"), ("rellu", "relu"), ("gelutanh", "gelu_tanh")],
)
def test_unknown_names_offer_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=rf"activation='{name}' is not known; did you mean '{nearest}'\?"):
        FeedForward(12, 20, name)


def test_bad_sizes_are_named() -> None:
    with pytest.raises(ValueError, match="d_ff=0 must be at least 1"):
        FeedForward(12, 0, "relu")


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("length", [2047, 2048, 2500])
def test_a_long_text_in_pieces_is_the_same(activation: str, length: int) -> None:
    layer, x = FeedForward(8, 16, activation), torch.randn(1, length, 8)
    whole = layer(x).detach()  # with gradients nothing is cut
    with torch.no_grad():
        torch.testing.assert_close(layer(x), whole)
