"""Captured activations against module hooks, the model's own output, single prompts and autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from models.small import inputs_of, small, source_of
from regard.layers import LayerNorm
from regard.lens.activations import ActivationRecord, capture
from regard.lens.interventions import patch
from regard.lens.residual import norm_before
from regard.models import Model

FAMILIES = {
    **{"decoder": "gpt2", "grouped": "llama-1b", "translator": "transformer-base", "t5": "t5-small"},
    **{"encoder": "bert-base-masked", "classifier": "sentiment", "vit": "vit-tiny", "captioner": "captioner"},
}


@pytest.fixture(params=FAMILIES, ids=str)
def model(request: pytest.FixtureRequest) -> Model:
    return small(FAMILIES[request.param], **({"n_kv_heads": 2} if request.param == "grouped" else {}))


def captured(model: Model, seed: int = 2, **options: Any) -> ActivationRecord:
    _, *target = inputs_of(model.config)
    return capture(model, source_of(model.config, seed=seed), *target, **options)


def output(model: Model, record: ActivationRecord) -> Tensor:
    with torch.no_grad():
        return model(*record.inputs.tensors, **record.inputs.masks)


def test_every_site_is_captured_in_the_shape_it_is_listed_with(model: Model) -> None:
    record = captured(model)
    assert list(record) == list(model.sites())
    config, source = model.config, record["encoder" if hasattr(model, "encoder") else "decoder"]
    for name, site in model.sites().items():
        stack = name.split(".")[0] if name != "logits" else "encoder" if model.is_encoder_only else "decoder"
        rows, keys = record[stack].shape[1], source if "cross" in name else record[stack]
        heads = config.n_heads if stack == "encoder" else config.n_decoder_heads or config.n_heads
        width = config.d_head or config.d_model // heads
        sizes = {"B": 3, "T": rows, "S": keys.shape[1], "M": config.d_model, "H": heads, "D": width}
        sizes |= {"G": config.n_kv_heads or heads, "F": config.d_ff, "1": 1}
        sizes |= {"V": config.output_vocab_size, "C": config.n_classes}
        assert record[name].shape == tuple(sizes[letter] for letter in site.shape.strip("()").split(", ")), name


def test_activations_are_those_that_module_hooks_see(model: Model) -> None:
    stack, record = "encoder" if hasattr(model, "encoder") else "decoder", captured(model)
    block, seen = getattr(model, stack).blocks[1], {}
    for name, module in (("attention", block.attention), ("ff", block.ff), ("w_o", block.attention.w_o)):
        module.register_forward_pre_hook(lambda module, inputs, name=name: seen.update({name: inputs[0]}))
    output(model, record)
    layer = f"{stack}.blocks.1"
    torch.testing.assert_close(record[f"{layer}.attention.input"], seen["attention"])
    torch.testing.assert_close(record[f"{layer}.ff.input"], seen["ff"])
    torch.testing.assert_close(record[f"{layer}.attention.heads"].transpose(1, 2).flatten(2), seen["w_o"])


def test_a_run_patched_with_itself_at_any_site_is_itself(model: Model) -> None:
    record = captured(model)
    before = output(model, record)
    for name in (name for name, site in model.sites().items() if not site.is_derived):
        with patch(model, {name: record[name]}):
            assert torch.equal(output(model, record), before), name
        with patch(model, {name: lambda x: x + 1}):
            is_shift = "attention.k" in name and model.config.positions != "t5"  # one number for all keys: softmax
            assert is_shift or not torch.equal(output(model, record), before), name


def test_prompts_of_unequal_length_are_as_each_alone() -> None:
    model = small("gpt2")
    rows = [[5, 6, 7, 8, 9], [5, 6], [9, 3, 4]]
    together = capture(model, rows)
    assert together.lengths == [5, 2, 3]
    for index, row in enumerate(rows):
        alone = capture(model, [row])
        for name in ("decoder.blocks.1.ff.neurons", "decoder.blocks.1.output"):
            torch.testing.assert_close(together[name][index, : len(row)], alone[name][0])
        torch.testing.assert_close(together.logits[index, len(row) - 1], alone.logits[0, -1])


def test_a_site_prints_its_name_and_shape() -> None:
    sites = small("gpt2").sites()
    assert repr(sites["decoder.blocks.0.ff.neurons"]) == "HookSite('decoder.blocks.0.ff.neurons', '(B, T, F)')"
    assert repr(sites["logits"]).endswith(", derived)")


def test_sites_and_positions_are_chosen() -> None:
    model = small("gpt2")
    whole = captured(model)
    some = captured(model, sites=["*.ff.neurons", "decoder.blocks.1"], positions=[2, -1])
    assert list(some) == ["decoder.blocks.0.ff.neurons", "decoder.blocks.1.ff.neurons", "decoder.blocks.1.output"]
    for name in some:
        assert torch.equal(some[name], whole[name][:, [2, -1]])
    with pytest.raises(KeyError, match="was not captured"):
        some["decoder.blocks.0"]
    with pytest.raises(ValueError, match=r"'decoder.blocks.0.mlp' matches none of model.sites\(\)"):
        captured(model, sites="decoder.blocks.0.mlp")


def test_the_fast_path_and_the_compiled_one_give_what_the_formula_does(model: Model) -> None:
    expected = captured(_with_backend(model, "reference"))
    compiled: Any = torch.compile(model, backend="eager")
    for record in (captured(model), captured(compiled)):
        for name in expected:
            torch.testing.assert_close(record[name], expected[name], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(record.logits, expected.logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("point", ["ff.neurons", "ff.input", "attention.input"])
def test_what_is_computed_when_it_is_read_is_what_it_was(point: str) -> None:
    model = small("gpt2")
    name = f"decoder.blocks.1.{point}"
    record, kept = captured(model), captured(model, sites=name)
    assert torch.equal(record[name], kept[name])
    torch.testing.assert_close(record.at(name, 1, 3), kept.at(name, 1, 3), atol=1e-6, rtol=1e-6)
    with patch(model, {name: lambda x: 2 * x}):
        assert torch.equal(captured(model)[name], 2 * kept[name])
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    with pytest.raises(ValueError, match="the weights have changed since"):
        record[name]
    assert kept[name].shape[:2] == record["decoder.blocks.0.ff.output"].shape[:2]


@pytest.mark.slow
def test_a_model_that_inductor_compiled_is_captured_as_the_formula_says() -> None:
    model = small("gpt2", n_layers=1)
    reference = _with_backend(model, "reference")
    compiled: Any = torch.compile(model, backend="inductor")
    tokens = source_of(model.config)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        before = compiled(tokens)
        assert torch._dynamo.utils.counters["inductor"], "nothing was compiled"
        torch.testing.assert_close(before, reference(tokens), atol=1e-5, rtol=1e-5)
    metric = lambda logits: logits.logsumexp(-1).sum()  # noqa: E731
    found, expected = (capture(each, tokens, grad=True) for each in (compiled, reference))
    gradients, wanted = found.gradients(metric), expected.gradients(metric)
    assert list(found) == list(expected) == list(model.sites())
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=1e-5)
    assert list(gradients) == list(wanted) == [name for name, site in model.sites().items() if not site.is_derived]
    for name in wanted:
        torch.testing.assert_close(gradients[name], wanted[name], atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        assert torch.equal(compiled(tokens), before), "a capture leaves what is compiled as it was"


def test_gradients_are_those_of_the_reference_and_the_parameters_keep_theirs(model: Model) -> None:
    record = captured(model, grad=True)
    plain = captured(_with_backend(model, "reference"), grad=True)
    metric = lambda logits: logits.logsumexp(-1).sum()  # noqa: E731
    found, expected = record.gradients(metric), plain.gradients(metric)
    assert list(found) == list(expected)
    assert len(found) > 20
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=1e-4)
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(ValueError, match="capture with grad=True"):
        captured(model).gradients(metric)


def test_gradients_are_those_that_autograd_leaves_at_modules_of_the_reference(model: Model) -> None:
    """Fused here; there module hooks and ``backward``, without anything of the lens."""
    record = captured(model, grad=True)
    metric = lambda logits: logits.logsumexp(-1).sum()  # noqa: E731
    found, reference, outputs = record.gradients(metric), _with_backend(model, "reference"), {}

    def keep(name: str, x: Tensor) -> None:
        x.retain_grad()
        outputs[name] = x

    for stack in (name for name in ("encoder", "decoder") if hasattr(reference, name)):
        for layer, block in enumerate(getattr(reference, stack).blocks):
            for part in ("attention", "ff", "cross_attention"):
                if (module := getattr(block, part, None)) is not None:
                    name = f"{stack}.blocks.{layer}.{part}.output"
                    module.register_forward_hook(lambda module, inputs, x, name=name: keep(name, x))
    metric(reference(*record.inputs.tensors, **record.inputs.masks)).backward()
    assert len(outputs) >= 4
    for name, x in outputs.items():
        torch.testing.assert_close(found[name], x.grad, atol=1e-5, rtol=1e-4)


def _with_backend(model: Model, backend: str) -> Model:
    twin = regard.build(model.config.with_(attention_backend=backend)).eval()
    twin.load_state_dict(model.state_dict())
    return twin


@pytest.mark.parametrize(
    "fields", [{}, {"norm_place": "post"}, {"parallel_residual": "one-norm"}], ids=["pre", "post", "one norm for both"]
)
def test_a_step_along_the_gradient_changes_the_metric_by_its_square(fields: dict[str, Any]) -> None:
    model = small("gpt2", **fields).double()
    record = captured(model, grad=True)
    metric = lambda logits: logits[:, -1, 7]  # noqa: E731
    for name, gradient in record.gradients(metric).items():
        with patch(model, {name: lambda x, gradient=gradient: x + 1e-6 * gradient}):
            moved = metric(output(model, record)) - metric(record.logits.detach())
        torch.testing.assert_close(moved.sum(), 1e-6 * gradient.square().sum(), rtol=1e-3, atol=1e-12)


def test_gradients_at_some_positions_are_those_of_the_whole() -> None:
    model = small("gpt2").double()
    metric = lambda logits: logits[:, -1, 7]  # noqa: E731
    whole, some = (captured(model, grad=True, positions=at).gradients(metric) for at in (None, [2, -1]))
    assert list(some) == list(whole)
    for name, gradient in some.items():
        torch.testing.assert_close(gradient, whole[name][..., [2, -1], :])


@pytest.mark.parametrize("prompts", [[], [[]], [[5, 6], []], torch.zeros(0, 3, dtype=torch.long)])
def test_an_empty_prompt_is_refused(prompts: Any) -> None:
    with pytest.raises(ValueError, match="a prompt is empty"):
        capture(small("gpt2"), prompts)


def test_weights_are_those_of_a_look() -> None:
    model = small("transformer-base")
    source, target = inputs_of(model.config)
    record = capture(model, source[:1], target[:1])
    look = regard.look(model, source[0].tolist(), record.inputs.tensors[1][0].tolist())
    for kind in look.kinds:
        weights = record.attention(layer=1, kind=kind).tile()[0, 2]
        torch.testing.assert_close(weights, look.weights(layer=1, head=2, kind=kind), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama-1b", "t5-small", "vit-tiny"])
def test_a_norm_s_scale_makes_its_output(name: str) -> None:
    model = small(name)
    record = captured(model)
    for site in (site for site in model.sites() if site.endswith(("attention.input", "ff.input"))):
        norm, before = norm_before(model, site)
        x = record[before]
        centred = x - x.mean(-1, keepdim=True) if isinstance(norm, LayerNorm) else x
        shift = norm.bias if isinstance(norm, LayerNorm) and norm.bias is not None else 0.0
        normed = centred / record.norm_scale(site)[..., None] * norm.weight + shift
        torch.testing.assert_close(normed, record[site], atol=1e-5, rtol=1e-5)
    assert record.norm_scale("final_states").shape == record.final_states.shape[:2]
    with pytest.raises(ValueError, match="is not the output of a norm"):
        record.norm_scale("decoder.blocks.0.ff.output")


def test_without_a_target_a_translator_writes_its_own() -> None:
    model = small("transformer-base")
    source, _ = inputs_of(model.config)
    record = capture(model, [source[0].tolist(), source[1].tolist()[:3]])
    assert record.inputs.source_lengths == [source.shape[1], 3]
    assert len(record.lengths) == 2 == len(record.logits)


@pytest.mark.parametrize("layer", [2, -3])
def test_a_layer_that_is_not_there_is_named(layer: int) -> None:
    record = captured(small("gpt2"))
    for read in (record.attention, record.call, record.head_results):
        with pytest.raises(ValueError, match=f"layer={layer}: the self attention has 2 layers, 0 to 1"):
            read(layer=layer)
    assert torch.equal(record.attention(layer=-1).tile(), record.attention(layer=1).tile())
