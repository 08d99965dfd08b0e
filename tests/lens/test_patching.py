"""Sweeps against patches made one by one, and their estimates against the sweeps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from generation.spoken import classifier
from models.small import inputs_of, small, source_of
from regard.lens import patch_runner
from regard.lens.activations import capture
from regard.lens.interventions import no_causal_mask, patch
from regard.lens.patch_runner import PatchRunner
from regard.lens.patching import Over, attribution_patching, logit_difference, patching_sweep
from regard.lens.residual_graph import edge_scores
from regard.models import Model

FAMILIES = {"decoder": "gpt2", "grouped": "llama-1b", "translator": "transformer-base", "classifier": "sentiment"}


def prompts(model: Model, seed: int, n: int = 1) -> Tensor:
    return source_of(model.config, batch=n, seed=seed)


def test_a_sweep_is_every_patch_made_alone() -> None:
    for name in ("gpt2", "sentiment", "vit-tiny"):
        model = small(name)
        metric = logit_difference(model, 1, 2)
        clean, corrupted = prompts(model, 2), prompts(model, 9)
        stack = "decoder" if name == "gpt2" else "encoder"
        record = capture(model, clean)
        with torch.no_grad():
            ends = metric(model(clean)), metric(model(corrupted))

            def effect(change: dict[Any, Any], positions: Any = None, ends: Any = ends, model: Model = model) -> float:
                with patch(model, change, positions):
                    return float((metric(model(corrupted)) - ends[1]) / (ends[0] - ends[1]))  # noqa: B023

            by_token = patching_sweep(model, clean, corrupted, metric, batch=5)
            by_head = patching_sweep(model, clean, corrupted, metric, over="heads")
            by_neuron = patching_sweep(model, clean, corrupted, metric, over="neurons")
            for layer in range(2):
                site = f"{stack}.blocks.{layer}"
                for position in range(3):
                    found = effect({f"{site}.input": record[f"{site}.input"]}, [position])
                    assert float(by_token.effects[layer, position]) == pytest.approx(found, abs=1e-4)
                kind = "self" if name == "gpt2" else "encoder"
                found = effect({(kind, layer, 3): record[f"{site}.attention.heads"][:, 3]})
                assert float(by_head.effects[layer, 3]) == pytest.approx(found, abs=1e-4)
                new = record[f"{site}.ff.neurons"]
                found = effect({f"{site}.ff.neurons": lambda x, new=new: torch.cat((new[..., :1], x[..., 1:]), -1)})
                assert float(by_neuron.effects[layer, 0]) == pytest.approx(found, abs=1e-4)
        assert by_token.axes == ("layer", "position")
        assert by_head.axes == ("layer", "head")
        assert by_neuron.effects.shape == (2, model.config.d_ff)


def test_a_metric_may_be_one_number() -> None:
    model = small("gpt2")
    both = prompts(model, 2), prompts(model, 9)
    expected = patching_sweep(model, *both, logit_difference(model, 1, 2), over="heads")
    found = patching_sweep(model, *both, lambda logits: (logits[:, -1, 1] - logits[:, -1, 2]).mean(), over="heads")
    torch.testing.assert_close(found.effects, expected.effects)


def test_patching_the_whole_input_brings_all_of_it_back() -> None:
    model = small("gpt2")
    clean, corrupted = prompts(model, 2, 3), prompts(model, 9, 3)
    found = patching_sweep(model, clean, corrupted, logit_difference(model, 4, 5), by_position=False)
    torch.testing.assert_close(found.effects, torch.ones(2), atol=1e-4, rtol=1e-4)
    assert found.axes == ("layer",)


def test_an_encoder_decoder_is_patched_on_either_side() -> None:
    model = small("transformer-base")
    clean, target = inputs_of(model.config, batch=1)
    corrupted, metric = prompts(model, 9), logit_difference(model, 4, 5)
    options: dict[str, Any] = {"target": (target, target), "by_position": False}
    encoder = patching_sweep(model, clean, corrupted, metric, kind="encoder", **options)
    torch.testing.assert_close(encoder.effects, torch.ones(2), atol=1e-4, rtol=1e-4)
    cross = patching_sweep(model, clean, corrupted, metric, over="cross_attention", **options)
    heads = patching_sweep(model, clean, corrupted, metric, over="heads", kind="cross", **options)
    assert cross.effects.shape == (2,)
    assert heads.effects.shape == (2, 4)
    assert float(cross.effects[0].abs()) > 1e-3


LONG = {
    "kind": "longrope",
    "short_factor": (1.0,) * 3,
    "long_factor": (8.0,) * 3,
    "original_max_len": 8,
}  # one token less


@pytest.mark.parametrize(
    "fields", [{}, {"positions": "alibi"}, {"window": 3}, {"share_layers": True}, {"rope_scaling": LONG}], ids=str
)
def test_what_a_patch_leaves_alone_is_not_run_again(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("llama-1b", n_kv_heads=2, n_layers=3, **fields)
    clean, corrupted = prompts(model, 2), prompts(model, 9)
    metric = logit_difference(model, 4, 5)
    whole = lambda logits: metric(logits)  # noqa: E731 — one that does not say which logits it reads
    for over in ("residual", "ff", "heads", "q", "k", "v"):
        options: dict[str, Any] = {"over": over, "by_position": True}
        with monkeypatch.context() as patched:
            patched.setattr(PatchRunner, "groups", lambda self, patches, batch: [[n] for n in range(len(patches))])
            patched.setattr(PatchRunner, "run", _run_all)
            expected = patching_sweep(model, clean, corrupted, whole, **options)
        assert float(expected.effects.abs().max()) > 1e-3
        for few_tokens in (0, 32, 256):  # patches that run together: of one token, of some, of all
            monkeypatch.setattr(patch_runner, "_FEW_TOKENS", few_tokens)
            for way in (metric, whole):
                found = patching_sweep(model, clean, corrupted, way, **options)
                torch.testing.assert_close(found.effects, expected.effects, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("edit", ["input", "positions", "mask"])
def test_a_sweep_under_edits_is_every_patch_made_under_them(edit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that start at a layer or token would apply an edit twice, at other tokens, or miss what it changes."""
    monkeypatch.setattr(patch_runner, "_FEW_TOKENS", 0)
    model = small("llama-1b", n_layers=3)
    clean, corrupted, metric = prompts(model, 2), prompts(model, 9), logit_difference(model, 4, 5)

    def make_edit() -> AbstractContextManager[None]:
        if edit == "mask":
            return no_causal_mask(model)
        if edit == "positions":
            return patch(model, {"decoder.blocks.1.ff.output": torch.zeros_like}, [1])
        return patch(model, {"decoder": lambda x: 2 * x})

    with make_edit():
        found = patching_sweep(model, clean, corrupted, metric)
        record = capture(model, clean)
    with make_edit(), torch.no_grad():
        ends = metric(model(clean)), metric(model(corrupted))
        for layer in range(3):
            site = f"decoder.blocks.{layer}.input"
            for position in range(clean.shape[1]):
                with patch(model, {site: record[site]}, [position]):
                    expected = float((metric(model(corrupted)) - ends[1]) / (ends[0] - ends[1]))
                assert float(found.effects[layer, position]) == pytest.approx(expected, abs=1e-4)


def _run_all(self: PatchRunner, patches: Any, metric: Any) -> Tensor:
    return metric(self.model(*self.inputs.tensors))


def test_a_sweep_runs_each_patch_from_its_layer_and_token_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_runner, "_FEW_TOKENS", 0)
    model = small("llama-1b", n_layers=3)
    clean, corrupted = prompts(model, 2), prompts(model, 9)
    seen = [0, 0, 0]

    def count(layer: int, inputs: tuple[Any, ...]) -> None:
        seen[layer] += inputs[0].shape[:2].numel()

    for layer, block in enumerate(model.decoder.blocks):
        block.register_forward_hook(lambda module, inputs, output, layer=layer: count(layer, inputs))
    patching_sweep(model, clean, corrupted, logit_difference(model, 4, 5))
    n = clean.numel()
    every = n * (n + 1) // 2  # one patch for each token, from that token on
    # Both texts as a whole; then of the last layer, for the patches below it, only the token that the metric reads.
    assert seen == [2 * n + every, 2 * n + 2 * every, 2 * n + 2 * n + every]
    seen = [0, 0, 0]
    patching_sweep(model, clean, corrupted, logit_difference(model, 4, 5, position=3))
    assert seen == [2 * n + every, 2 * n + 2 * every, 2 * n + 3 * every]


OVER: tuple[Over, ...] = ("residual", "attention", "ff", "neurons", "heads", "q", "k", "v")


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("by_position", [False, True])
def test_near_prompts_have_the_effects_that_are_estimated(over: Over, by_position: bool) -> None:
    model = small("llama-1b").double()
    clean, corrupted = prompts(model, 2), prompts(model, 9)
    with torch.no_grad():  # embeddings that hardly differ: the first order is then all there is
        table = model.token.weight
        table.copy_(table[:1] + 1e-3 * (table - table[:1]))
    metric = logit_difference(model, 4, 5)
    options: dict[str, Any] = {"over": over, "by_position": by_position}
    exact = patching_sweep(model, clean, corrupted, metric, **options)
    for qk_fix in (True, False):
        found = attribution_patching(model, clean, corrupted, metric, qk_fix=qk_fix, **options)
        assert found.effects.shape == exact.effects.shape
        assert found.axes == exact.axes
        torch.testing.assert_close(found.effects, exact.effects, atol=2e-2, rtol=2e-2)


def test_behind_a_saturated_softmax_only_the_refitted_attention_sees_the_effect() -> None:
    model = small("gpt2", n_layers=1, norm="none").double()
    with torch.no_grad():  # scores so large that a row looks at one key alone, and nothing but sums after attention
        model.decoder.blocks[0].attention.w_qkv.weight[:48] *= 100
        model.decoder.blocks[0].ff.w_out.weight.zero_()
    clean, corrupted = prompts(model, 2), prompts(model, 9)
    metric = logit_difference(model, 4, 5)
    exact = patching_sweep(model, clean, corrupted, metric, over="q").effects
    plain = attribution_patching(model, clean, corrupted, metric, over="q", qk_fix=False).effects
    fixed = attribution_patching(model, clean, corrupted, metric, over="q").effects
    torch.testing.assert_close(fixed, exact)
    assert exact.abs().max() > 100 * plain.abs().max()


def test_classes_are_named() -> None:
    model = classifier()
    assert model.processor.labels == ("cats", "dogs", "plays")
    assert logit_difference(model, "dogs", "plays") == logit_difference(model, 1, 2)
    with pytest.raises(ValueError, match="'birds' is not one of the classes: cats, dogs, plays"):
        logit_difference(model, "birds", "cats")
    with pytest.raises(ValueError, match="99 is not one of the 3 outputs of this model"):
        logit_difference(model, 99, 1)


@pytest.mark.parametrize("estimate", [patching_sweep, attribution_patching])
def test_a_metric_that_differs_by_rounding_only_is_refused(estimate: Callable[..., Any]) -> None:
    """Without positions an encoder does not see the order of two words, but sums them up in another order."""
    model = small("bert-base", positions="none", head="classify", n_classes=3)
    first, others = torch.tensor([2]), torch.arange(4, 11)
    clean, corrupted = (torch.cat((first, words))[None] for words in (others, others.flip(0)))
    metric = logit_difference(model, 1, 2)
    with torch.no_grad():
        ends = [float(metric(model(x)).mean()) for x in (clean, corrupted)]
    assert ends[0] != ends[1]
    assert ends[0] == pytest.approx(ends[1], rel=1e-5)
    with pytest.raises(ValueError, match="the metric of pair 0 is the same on both prompts"):
        estimate(model, clean, corrupted, metric)


def test_wrong_pairs_are_refused_in_a_sentence() -> None:
    model = small("gpt2")
    metric = logit_difference(model, 4, 5)
    with pytest.raises(ValueError, match="pair 0 has 3 tokens clean and 2 corrupted"):
        patching_sweep(model, [[4, 5, 6]], [[4, 5]], metric)
    with pytest.raises(ValueError, match="there are 1 clean prompts and 2 corrupted ones"):
        patching_sweep(model, [[4, 5, 6]], [[4, 5, 6], [4, 5, 7]], metric)
    with pytest.raises(ValueError, match="the metric of pair 0 is the same on both prompts"):
        patching_sweep(model, [[4, 5, 6]], [[4, 5, 6]], metric)
    with pytest.raises(ValueError, match="there are 1 metrics for 2 pairs of prompts"):
        patching_sweep(model, [[4, 5, 6], [4, 5, 7]], [[4, 7, 6], [7, 5, 7]], [metric])
    with pytest.raises(ValueError, match="needs a stack of layers on one residual stream"):
        patching_sweep(model, [[4, 5, 6]], [[4, 5, 7]], metric, kind="encoder")
    with pytest.raises(ValueError, match="this model has no head"):
        patching_sweep(small("bert-base"), [[4, 5]], [[4, 6]], metric)
    with pytest.raises(ValueError, match="by_position=False"):
        patching_sweep(model, [[4, 5, 6], [4, 5]], [[4, 7, 6], [7, 5]], metric)


def test_gradients_are_computed_inside_the_caller_s_no_grad() -> None:
    model = small("gpt2")
    clean, corrupted, metric = prompts(model, 2), prompts(model, 9), logit_difference(model, 1, 2)
    expected = attribution_patching(model, clean, corrupted, metric).effects
    _, edges = edge_scores(model, clean, corrupted, metric, steps=1)
    with torch.no_grad():
        assert torch.equal(attribution_patching(model, clean, corrupted, metric).effects, expected)
        assert torch.equal(edge_scores(model, clean, corrupted, metric, steps=1)[1], edges)
