"""Ablations and contributions against the same computed by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from models.small import inputs_of, small
from regard.lens import contributions
from regard.lens.ablation import ablate
from regard.lens.activations import capture
from regard.lens.contributions import layer_contributions, token_contributions, value_weighted_attention
from regard.lens.interventions import patch, switch_off
from regard.models import Model


def run(model: Model, *inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(*inputs)


def test_zero_and_mean_at_any_site_and_of_single_heads() -> None:
    model = small("gpt2")
    data, tokens = [[5, 6, 7, 8], [9, 3]], torch.tensor([[4, 5, 6, 9]])
    with switch_off(model, [("self", 1, 2)]):
        expected = run(model, tokens)
    with ablate(model, ("self", 1, 2)):
        torch.testing.assert_close(run(model, tokens), expected)
    site = "decoder.blocks.0.ff.output"
    rows = [capture(model, [row])[site][0] for row in data]
    mean = torch.cat(rows).mean(0)  # over six tokens; padding is not among them
    with patch(model, {site: lambda x: mean.expand_as(x)}, [1, 2]):
        expected = run(model, tokens)
    with ablate(model, site, by="mean", data=data, positions=[1, 2]):
        torch.testing.assert_close(run(model, tokens), expected)
    with ablate(model, ["*.ff.output", ("self", 0, 1)], by="mean", data=data), ablate(model, "decoder.blocks.1.input"):
        assert not torch.allclose(run(model, tokens), expected)
    with pytest.raises(ValueError, match="by='mean' needs data="):
        run_under(model, tokens, by="mean")
    with pytest.raises(ValueError, match="is not one of zero, mean, resample"):
        run_under(model, tokens, by="noise")


def run_under(model: Model, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
    with ablate(model, "decoder.blocks.0.ff.output", **options):
        return run(model, tokens)


def test_resampling_takes_one_text_for_all_sites_of_a_row() -> None:
    model = small("transformer-base")
    source, target = inputs_of(model.config)
    one = capture(model, source[:1], target[:1])
    other = capture(model, source[1:2], target[1:2]).inputs.tensors
    with ablate(model, ["decoder.blocks.1.attention.heads", "decoder"], by="resample", data=one):
        found = run(model, *other)
    with patch(model, {name: one[name] for name in ("decoder.blocks.1.attention.heads", "decoder")}):
        expected = run(model, *other)
    torch.testing.assert_close(found, expected)
    site = "decoder.blocks.0.output"
    with ablate(model, site, by="resample", data=one, positions=[3]):
        found = run(model, *other)
    with patch(model, {site: one[site]}, [3]):
        torch.testing.assert_close(found, run(model, *other))
    several = capture(model, source, target)
    with ablate(model, "encoder.blocks.1.output", by="resample", data=several, seed=3):
        both = [run(model, source, target) for _ in range(2)]
    assert torch.equal(*both)


NAMES = ["gpt2", "llama-1b", "transformer-base", "t5-small", "bert-base-masked", "vit-tiny"]


@pytest.mark.parametrize(
    ("name", "fields"), [*((name, {}) for name in NAMES), ("transformer-base", {"residual": False})]
)
def test_shares_of_tokens_sum_to_one_and_follow_the_mask(name: str, fields: dict[str, Any]) -> None:
    model = small(name, **fields)
    record = capture(model, *inputs_of(model.config))
    found = token_contributions(record, prompt=1)
    whole = found.target if found.source is None else torch.cat((found.source, found.target), 1)
    torch.testing.assert_close(whole.sum(1), torch.ones(len(whole), dtype=torch.float64))
    assert (whole >= 0).all()
    if model.is_decoder_only or found.source is not None:
        assert not found.target.triu(1).any()
    assert found.top(2, 1)[0][2] == pytest.approx(float(whole[2].max()))


def test_a_layer_by_the_papers_formula() -> None:
    model = small("transformer-base").double()
    record = capture(model, *inputs_of(model.config))
    block, layer = model.encoder.blocks[1], "encoder.blocks.1"
    weights = record.attention(layer=1, kind="encoder").tile()[0].double()  # (H, T, T)
    v = record[f"{layer}.attention.v"][0]
    w = block.attention.w_o.weight.unflatten(1, (4, -1))
    moved = torch.einsum("hij,hjd,mhd->ijm", weights, v, w)
    weighted = value_weighted_attention(record, layer=1, kind="encoder", rows=slice(2, 4))
    one = weights[1, 3, 2] * (w[:, 1] @ v[1, 2])
    assert float(weighted[1, 1, 2]) == pytest.approx(float(one.norm().detach()))
    x = record[f"{layer}.input"][0]
    for i in range(len(x)):
        moved[i, i] += x[i]
    total = moved.sum(1, keepdim=True)
    scale = (total.var(-1, unbiased=False, keepdim=True) + model.config.norm_eps).rsqrt()
    parts = (moved - moved.mean(-1, keepdim=True)) * scale * block.attention_norm.weight
    y = parts.sum(1, keepdim=True)
    near = (y.abs().sum(-1) - (y - parts).abs().sum(-1)).clamp(min=0)
    expected = (near / near.sum(-1, keepdim=True)).detach()
    torch.testing.assert_close(layer_contributions(record, layer=1, kind="encoder"), expected, atol=1e-6, rtol=1e-5)


def test_contributions_are_computed_where_the_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors made without a device go to the default one; here that is one whose tensors cannot be computed with."""
    model = small("transformer-base")
    record = capture(model, *inputs_of(model.config, batch=1))
    expected = token_contributions(record)

    def compute_on_cpu(*args: Any, **options: Any) -> torch.Tensor:
        with torch.device("cpu"):
            return layer_contributions(*args, **options)

    monkeypatch.setattr(contributions, "layer_contributions", compute_on_cpu)
    with torch.device("meta"):
        found = token_contributions(record)
    assert found.source is not None
    assert expected.source is not None
    assert torch.equal(found.target, expected.target)
    assert torch.equal(found.source, expected.source)
    before = token_contributions(record, layers=0)  # before the first layer each state is its own token's
    assert torch.equal(before.target, torch.eye(len(before.target), dtype=torch.float64))


def test_a_layer_scale_is_part_of_what_moves() -> None:
    scale = 1e-3
    model = small("gpt2", layer_scale=1.0).double()
    plain = small("gpt2").double()
    for scaled, block in zip(model.decoder.blocks, plain.decoder.blocks, strict=True):
        with torch.no_grad():
            scaled.attention_scale.weight.fill_(scale)
            scaled.ff_scale.weight.fill_(1.0)
            block.load_state_dict({name: x for name, x in scaled.state_dict().items() if "_scale" not in name})
            block.attention.w_o.weight.mul_(scale)
            block.attention.w_o.bias.mul_(scale)
    for name in ("token", "embeddings"):
        getattr(plain, name).load_state_dict(getattr(model, name).state_dict())
    found, expected = (token_contributions(capture(each, *inputs_of(each.config))) for each in (model, plain))
    torch.testing.assert_close(found.target, expected.target)


def test_contributions_that_are_not_defined_are_refused() -> None:
    stages = small("swin-tiny", stages=(1, 1), stage_heads=(2, 4), class_tokens=0, pooling="mean")
    record = capture(stages, *inputs_of(stages.config))
    with pytest.raises(ValueError, match="kind='encoder' is not one of the kinds of attention"):
        token_contributions(record)
    with pytest.raises(ValueError, match="do not share one residual stream"):
        layer_contributions(record, layer=0)
    fourier = small("bert-base-masked", mixer="fourier")
    with pytest.raises(ValueError, match="no attention weights in any of its layers"):
        token_contributions(capture(fourier, *inputs_of(fourier.config)))
