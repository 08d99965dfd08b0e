"""Circuits in the weights: scores and head outputs they predict, and heads that were made to copy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.small import inputs_of, small
from regard.attention import Dot
from regard.lens.activations import ActivationRecord, capture
from regard.lens.head_weights import FactoredMatrix, composition_scores, copying_scores, ov_circuit, qk_circuit
from regard.lens.residual import norm_scale, unscaled_norm
from regard.models import Model


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
    if model.config.norm_place == "post":  # the two norms between the heads
        for norm in (model.encoder.blocks[0].attention_norm, model.encoder.blocks[0].ff_norm):
            ov = FactoredMatrix(ov.left, unscaled_norm(norm, ov.right.double()).float())
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
    with pytest.raises(ValueError, match="do not share one residual stream"):
        qk_circuit(model, 0, 0)


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped, rope": ("llama-1b", {"n_kv_heads": 2}),
    "rope with an attention factor": ("llama-1b", {"rope_scaling": {"kind": "yarn", "factor": 4.0}, "max_len": 96}),
    "half of a head rotated": ("llama-1b", {"rope_fraction": 0.5, "d_head": 8}),
    "norms of queries and keys": ("llama-1b", {"qk_norm": True, "n_kv_heads": 2}),
    "LayerNorms of queries and keys": ("gpt2", {"qk_norm": True}),
    "norms over all heads": ("llama-1b", {"qk_norm": True, "qk_norm_over": "all", "norm_place": "output"}),
    "LayerNorms over all heads": ("gpt2", {"qk_norm": True, "qk_norm_over": "all"}),
    "norms with 1 + w, capped": ("llama-1b", {"norm_place": "both", "norm_offset": 1.0, "score_cap": 5.0}),
    "layer scale": ("vit-tiny", {"layer_scale": 0.5}),
    "post-norm": ("gpt2", {"norm_place": "post"}),
    "parallel": ("gpt2", {"parallel_residual": "one-norm", "attention_sinks": True}),
    "alibi": ("gpt2", {"positions": "alibi"}),
    "sigmoid": ("gpt2", {"mixer": "sigmoid"}),
}


def without_biases(model: Model) -> Model:
    """The model in fp64 with biases of 0 wherever a part has one: a circuit leaves them out."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(".bias"):
                p.zero_()
    return model.double()


def unit_states(record: ActivationRecord, name: str, norm: Any) -> Tensor:
    """States (T, M) of the first prompt, divided by the scale of the norm that reads them."""
    x = record[name][0]
    return x / norm_scale(norm, x)[..., None]


@pytest.mark.parametrize("family", FAMILIES)
def test_circuits_are_what_the_model_computes(family: str) -> None:
    name, fields = FAMILIES[family]
    model = without_biases(small(name, **fields))
    record = capture(model, *(x.double() if x.is_floating_point() else x for x in inputs_of(model.config)))
    stack, kind = ("encoder", "encoder") if model.is_encoder_only else ("decoder", "self")
    block = getattr(model, stack).blocks[1]
    module, norms = block.attention, block.residuals().attention
    x = unit_states(record, f"{stack}.blocks.1.input", norms.before)
    q, k = (record[f"{stack}.blocks.1.attention.input"][0] @ w.T for w in (module.w_q, module.w_k))
    width = (lambda x: len(x.T)) if module.norms_all_heads else lambda x: module.d_head
    q_scales, k_scales = (
        norm_scale(norm, y.unflatten(1, (-1, width(y)))).expand(len(y), n_heads)
        for y, norm, n_heads in ((q, module.q_norm, 4), (k, module.k_norm, module.n_kv_heads))
    )
    call = replace(record.call(layer=1, kind=kind), bias=None)
    for row, col, head in ((6, 2, 3), (4, 4, 0), (1, 5, 1)):
        key_head = head * module.n_kv_heads // 4
        qk = qk_circuit(model, 1, head, kind, distance=row - col if module.rope else 0)
        score = x[row] @ qk.dense() @ x[col] / q_scales[row, head] / k_scales[col, key_head]
        score = score * module.mechanism.factor(module.d_head)
        if model.config.score_cap is not None:
            score = 5.0 * torch.tanh(score / 5.0)
        if model.config.mixer == "sigmoid":
            score = score + module.mechanism.b[head]
        expected = call.tile(slice(row, row + 1), slice(col, col + 1), masked=False)[0, head, 0, 0]
        torch.testing.assert_close(score, expected, atol=1e-6, rtol=1e-6)
    weights = record.attention(layer=1, kind=kind).tile()[0].double()
    moved = sum(weights[head] @ x @ ov_circuit(model, 1, head, kind).dense() for head in range(4))
    before = sum(record.head_results(layer=1, kind=kind)[0])
    moved = moved / norm_scale(norms.output, before)[..., None]
    torch.testing.assert_close(moved, record[f"{stack}.blocks.1.attention.output"][0], atol=1e-5, rtol=1e-5)


class Doubled(Dot):
    """A dot product whose queries, values and sums are changed in a class of one's own."""

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, frame: Any) -> Any:
        return super().prepare(q * q, k, v.cumsum(2), mask, frame)


class Gated(Dot):
    """One map per head, whose weighted sums pass a nonlinear function before W_o."""

    def combine(self, sums: Tensor) -> Tensor:
        return sums.tanh()


@pytest.mark.parametrize("mixer", ["additive", "linear", "performer"])
def test_scores_that_are_no_dot_products_have_no_qk(mixer: str) -> None:
    model = small("gpt2", mixer=mixer)
    for ask in (lambda: qk_circuit(model, 0, 0), lambda: composition_scores(model, "q")):
        with pytest.raises(ValueError, match=f"mechanism '{mixer}' does not score by q · k as projected"):
            ask()
    assert composition_scores(model, "v")[0, :, 1].min() > 0  # these mechanisms do move values by W_v W_o


def test_a_mechanism_of_its_own_has_no_circuit_it_would_contradict() -> None:
    model = small("bert-base-masked", mixer="linformer")
    with pytest.raises(ValueError, match="changes the values, so a head has no OV matrix"):
        ov_circuit(model, 0, 0)
    model = small("gpt2", mixer="differential")
    assert qk_circuit(model, 0, 1).shape == (24, 24)  # that of a single map
    with pytest.raises(ValueError, match="changes the heads' sums before W_o"):
        ov_circuit(model, 0, 0)
    model = small("bert-base-masked", window=3, global_tokens=2, global_projections=True)
    with pytest.raises(ValueError, match="other weights for global tokens"):
        qk_circuit(model, 0, 0)
    with pytest.raises(ValueError, match="without residual connections"):
        composition_scores(small("gpt2", residual=False), "q")
    model = small("gpt2")
    model.decoder.blocks[1].attention.mechanism = Doubled()
    record = capture(model, *inputs_of(model.config))
    for ask in (lambda: qk_circuit(model, 1, 0), lambda: record.why(layer=1, head=0, row=3, col=1)):
        with pytest.raises(ValueError, match=r"dot product|does not score by q · k"):
            ask()
    with pytest.raises(ValueError, match="changes the values"):
        ov_circuit(model, 1, 0)


def test_heads_that_are_changed_before_they_are_written_count_as_one_part() -> None:
    model = small("gpt2")
    for block in model.decoder.blocks:
        block.attention.mechanism = Gated()
    record = capture(model, *inputs_of(model.config))
    found = record.logit_attribution(3)
    assert found.total == pytest.approx(found.logit, abs=1e-4)
    assert "self" not in found.parts
    for ask in (lambda: record.head_results(layer=0), lambda: ov_circuit(model, 0, 0)):
        with pytest.raises(ValueError, match="mechanism 'gated' changes the heads' sums before W_o"):
            ask()


def test_norms_between_two_heads_belong_to_what_is_composed_and_copied() -> None:
    model = small("gpt2", norm_place="post", n_layers=3).double()
    gains = [
        torch.diag(norm.weight) for block in model.decoder.blocks for norm in (block.attention_norm, block.ff_norm)
    ]
    centre = torch.eye(24).double() - 1 / 24

    def passed(x: Tensor, norms: list[Tensor]) -> Tensor:
        for gain in norms:
            x = x @ centre @ gain
        return x

    qk = qk_circuit(model, 2, 1).dense()
    carried = passed(ov_circuit(model, 0, 2).dense(), gains[:4])  # to the input of layer 2
    expected = (carried @ qk.T).norm() / carried.norm() / qk.norm()
    assert float(composition_scores(model, "k")[0, 2, 2, 1]) == pytest.approx(expected.item(), abs=1e-5)
    table = model.token.weight
    read = passed(table, gains[:2])  # what layer 1 reads of each token
    logits = passed(read @ ov_circuit(model, 1, 3).dense(), gains[2:]) @ table.T
    values = torch.linalg.eigvals(logits)
    found = copying_scores(model)[1, 3]
    assert float(found) == pytest.approx((values.real.sum() / values.abs().sum()).item(), abs=1e-4)
