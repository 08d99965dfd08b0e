"""Circuits in the weights: scores and head outputs they predict, and heads that were made to copy."""

from __future__ import annotations

import pytest
import torch

from models.small import inputs_of, small
from regard.lens.activations import capture
from regard.lens.head_weights import FactoredMatrix, composition_scores, copying_scores, ov_circuit, qk_circuit


def test_factors_are_the_matrix_and_never_more() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(12, 3).double(), torch.randn(3, 10).double()
    found = FactoredMatrix(a, b)
    u, s, v = found.svd
    torch.testing.assert_close(u * s @ v.T, a @ b)
    torch.testing.assert_close(s, torch.linalg.svdvals(a @ b)[:3])
    assert found.norm == pytest.approx(float((a @ b).norm()))
    square = found @ torch.randn(10, 12).double()
    whole = torch.linalg.eigvals(square.dense())
    assert float(square.eigenvalues().sum().real) == pytest.approx(float(whole.sum().real))
    torch.testing.assert_close(found.T.dense(), (a @ b).T)
    torch.testing.assert_close((found @ found.T).dense(), a @ b @ b.T @ a.T)
    with pytest.raises(ValueError, match="cannot be multiplied"):
        FactoredMatrix(a, a)


def test_a_score_and_what_is_moved_are_those_of_the_model() -> None:
    model = small("llama-1b", n_kv_heads=2).double()  # no biases, RoPE
    record = capture(model, *inputs_of(model.config))
    x = record["decoder.blocks.1.input"][0]
    x = x / (x.square().mean(-1, keepdim=True) + model.config.norm_eps).sqrt()
    row, col, head = 6, 2, 3
    qk = qk_circuit(model, 1, head, distance=row - col)
    score = record.call(layer=1).tile(slice(row, row + 1), slice(col, col + 1), masked=False)[0, head]
    factor = model.config.d_head or model.config.d_model // model.config.n_heads
    torch.testing.assert_close(x[row] @ qk.dense() @ x[col] * factor**-0.5, score[0, 0], atol=1e-6, rtol=1e-6)
    weights = record.attention(layer=1).tile()[0, head].double()
    moved = weights @ x @ ov_circuit(model, 1, head).dense()
    torch.testing.assert_close(moved, record.head_results(layer=1)[0, head], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["transformer-base", "t5-small", "vit-tiny"])
def test_other_architectures_compose_within_a_stack(name: str) -> None:
    model = small(name)
    found = composition_scores(model, "k", "encoder")
    ov, qk = ov_circuit(model, 0, 1, "encoder"), qk_circuit(model, 1, 2, "encoder")
    assert float(found[0, 1, 1, 2]) == pytest.approx((ov @ qk.T).norm / ov.norm / qk.norm, abs=1e-4)
    assert not found[1].any()  # the last layer is read by nobody
    assert not found[0, :, 0].any()
    if model.is_encoder_decoder:
        assert ov_circuit(model, 1, 0, "cross").shape == (24, 24)
        with pytest.raises(ValueError, match="heads compose within one"):
            composition_scores(model, "q", "cross")


def test_weights_in_half_precision_are_read_in_fp32() -> None:
    model = small("llama-1b")
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())  # so that both have the same weights
    expected, singular = composition_scores(model, "q"), qk_circuit(model, 0, 1).svd[1]
    model = model.bfloat16()
    torch.testing.assert_close(composition_scores(model, "q"), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(qk_circuit(model, 0, 1).svd[1], singular, atol=1e-4, rtol=1e-4)


def test_a_head_that_copies_has_1_and_one_that_suppresses_minus_1() -> None:
    model = small("gpt2", norm="none", d_head=24)
    module = model.decoder.blocks[1].attention
    with torch.no_grad():  # what is read is written as it is by head 0, and turned around by head 1
        module.w_v.copy_(torch.eye(24).repeat(4, 1))
        module.w_o.weight.copy_(torch.cat([torch.eye(24), -torch.eye(24), torch.eye(24), torch.eye(24)], 1))
    found = copying_scores(model)
    assert found[1].tolist() == pytest.approx([1.0, -1.0, 1.0, 1.0], abs=1e-4)
    assert found[0].abs().max() < 0.9
    with pytest.raises(ValueError, match="reads and predicts tokens of one vocabulary"):
        copying_scores(small("transformer-base"))


def test_heads_of_stages_have_no_common_stream_to_read_from() -> None:
    model = small("swin-tiny", stages=(1, 1), stage_heads=(2, 4), class_tokens=0, pooling="mean")
    with pytest.raises(ValueError, match="merges its tokens between stages"):
        qk_circuit(model, 0, 0)
