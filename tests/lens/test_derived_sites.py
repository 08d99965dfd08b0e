"""Sites that a record computes when they are read: what heads write, the norms' scales and the logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from models.small import inputs_of, small
from regard.layers import LayerNorm, RMSNorm
from regard.lens.ablation import ablate
from regard.lens.activations import ActivationRecord, capture
from regard.lens.interventions import patch, watch
from regard.models import Model
from regard.models.sites import HookSite

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "decoder": ("gpt2", {}),
    "grouped": ("llama-1b", {"n_kv_heads": 2}),
    "post-norm encoder-decoder": ("transformer-base", {}),
    "pre-norm encoder-decoder": ("t5-small", {}),
    "classifier": ("sentiment", {}),
    "tagger": ("bert-base", {"head": "tag", "n_classes": 5}),
    "vit": ("vit-tiny", {}),
    "stages": ("swin-tiny", {"stages": (1, 1), "stage_heads": (2, 4), "class_tokens": 0, "pooling": "mean"}),
    "parallel": ("gpt2", {"parallel_residual": "two-norms"}),
    "shared layers": ("gpt2", {"share_layers": True}),
}


@pytest.fixture(params=FAMILIES, ids=str)
def model(request: pytest.FixtureRequest) -> Model:
    name, fields = FAMILIES[request.param]
    return small(name, **fields)


def captured(model: Model, **options: Any) -> ActivationRecord:
    return capture(model, *inputs_of(model.config), **options)


def derived(model: Model, point: str) -> list[HookSite]:
    return [site for site in model.sites().values() if site.is_derived and site.point == point]


def test_what_heads_write_sums_to_the_output(model: Model) -> None:
    record = captured(model)
    sites = derived(model, "results")
    assert len(sites) == len(model.attention_sites())
    for site in sites:
        attention: Any = site.owner
        written = record[site.name].sum(1) + (0 if attention.w_o.bias is None else attention.w_o.bias)
        output = record[site.name.replace("results", "output")]
        torch.testing.assert_close(written, output, atol=1e-5, rtol=1e-5)


def test_scales_make_of_a_norm_s_input_its_output(model: Model) -> None:
    seen: dict[Any, list[tuple[Tensor, Tensor]]] = {}
    for module in model.modules():
        if isinstance(module, LayerNorm | RMSNorm):
            module.register_forward_hook(lambda m, inputs, y: seen.setdefault(m, []).append((inputs[0], y)))
    with torch.no_grad():
        record = captured(model)
        model(*record.inputs.tensors)
    sites = derived(model, "scale")
    assert len(sites) >= 4
    for site in sites:
        norm: Any = site.owner
        n_calls = sum(other.owner is norm for other in sites)
        x, y = seen[norm][-n_calls:][site.call]
        centred = x - x.mean(-1, keepdim=True) if isinstance(norm, LayerNorm) else x
        gain = norm.weight if isinstance(norm, LayerNorm) else norm.weight + norm.offset
        shift = 0 if getattr(norm, "bias", None) is None else norm.bias
        torch.testing.assert_close(centred / record[site.name] * gain + shift, y, atol=1e-5, rtol=1e-5)


def test_logits_are_those_of_the_model(model: Model) -> None:
    record = captured(model)
    with torch.no_grad():
        logits = model(*record.inputs.tensors)
    torch.testing.assert_close(record["logits"], logits, atol=1e-6, rtol=1e-6)
    assert torch.equal(record["logits"], record.logits)


def test_a_derived_site_is_selected_and_not_stored(model: Model) -> None:
    whole = captured(model)
    for site in (derived(model, "results")[-1], derived(model, "scale")[0], derived(model, "logits")[0]):
        some = captured(model, sites=site.name)
        assert set(some) == {site.name, *site.sources}
        assert [x for x in some._activations.values() if isinstance(x, Tensor)] == [some[name] for name in site.sources]
        torch.testing.assert_close(some[site.name], whole[site.name])
        at_some = captured(model, sites=site.name, positions=[2, -1])[site.name]
        expected = whole[site.name] if site.shape == "(B, C)" else whole[site.name][..., [2, -1], :]
        torch.testing.assert_close(at_some, expected, atol=1e-6, rtol=1e-5)


def test_one_token_of_a_derived_site() -> None:
    model = small("gpt2")
    whole, some = captured(model), captured(model, positions=[4, 2])
    for name in ("decoder.blocks.1.attention.results", "decoder.blocks.1.ff.scale", "decoder.scale", "logits"):
        expected = whole[name][1][..., 2, :].double()
        torch.testing.assert_close(whole.at(name, 1, 2), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(some.at(name, 1, 2), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"logits \(B, C\) belong to a whole prompt"):
        captured(small("vit-tiny")).at("logits", 0, 1)


def test_derived_sites_follow_edits_and_gradients() -> None:
    model = small("gpt2")
    name = "decoder.blocks.0.attention.results"
    plain = captured(model)
    with patch(model, {"decoder.blocks.0.attention.heads": lambda x: 2 * x}):
        torch.testing.assert_close(captured(model)[name], 2 * plain[name])
    record = captured(model, grad=True)
    gradients = record.gradients(record["logits"][:, -1, 7])
    assert name not in gradients
    (found,) = torch.autograd.grad(record[name].sum(), record["decoder.blocks.0.input"], retain_graph=True)
    assert found.abs().max() > 0
    expected = record.gradients(lambda logits: logits[:, -1, 7])
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(gradients[site], expected[site]) for site in expected)


def test_derived_sites_are_not_those_of_other_weights() -> None:
    model = small("gpt2")
    record = captured(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    for name in ("decoder.blocks.0.attention.results", "logits"):
        with pytest.raises(ValueError, match="the weights have changed since; capture again"):
            record[name]


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("decoder.blocks.1.attention.results", "decoder.blocks.1.attention.heads"),
        ("decoder.blocks.1.ff.scale", "decoder.blocks.1.after_attention"),
        ("decoder.scale", "decoder.blocks.1.output"),
        ("logits", "decoder.blocks.1.output"),
    ],
)
def test_a_derived_site_is_not_replaced(name: str, instead: str) -> None:
    model = small("gpt2")
    says = f"{name} cannot be replaced: it is computed from {instead} when a record is read; patch {instead} instead"
    for change in (patch(model, {name: torch.zeros_like}), ablate(model, name), watch(model, [name])):
        with pytest.raises(ValueError, match=says), change:
            pass


def test_a_pattern_ablates_what_is_not_derived() -> None:
    model = small("gpt2")
    tokens = inputs_of(model.config)[0]
    with torch.no_grad(), ablate(model, "decoder.blocks.1.attention.*"):
        by_pattern = model(tokens)
    with torch.no_grad(), ablate(model, "decoder.blocks.1.attention.output"):
        torch.testing.assert_close(by_pattern, model(tokens))
    with pytest.raises(ValueError, match=r"attention.results cannot be replaced"), ablate(model, "*.results"):
        pass
