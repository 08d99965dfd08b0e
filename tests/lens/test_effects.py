"""What layers say, what interventions do, and how far two looks are apart: against plain forward passes."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from generation.spoken import captioner, classifier, image_classifier, language_model, translator
from models.small import inputs_of, small
from regard.attention import AttentionMap, edits, masks
from regard.lens import look
from regard.lens.compare import compare, compare_maps, head_distances
from regard.lens.effects import effect, logit_lens
from regard.lens.interventions import attention_scale, no_causal_mask, switch_off

from .planted import map_of, pointing_at

TEXT = "the cat sat on the mat."

# ---- logit lens


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (language_model, (TEXT,)),
        (lambda: language_model(norm_place="post"), (TEXT,)),
        (translator, (TEXT, "고양이가")),
        (lambda: translator("t5-small"), (TEXT, "고양이가")),
        (captioner, (torch.rand(3, 16, 16), TEXT)),
    ],
    ids=["decoder", "post-norm", "translator", "t5", "captioner"],
)
def test_the_last_layer_says_what_the_model_says(make: Any, given: tuple[Any, ...]) -> None:
    seen = look(make(), *given)
    for position in (0, -1):
        found = logit_lens(seen, position, k=4)
        assert [one.layer for one in found] == [-1, 0, 1]
        wanted = seen.next(position, k=4)
        assert [x.token for x in found[-1].best] == [x.token for x in wanted]
        assert [x.text for x in found[-1].best] == [x.text for x in wanted]
        assert [x.probability for x in found[-1].best] == pytest.approx([x.probability for x in wanted], abs=1e-5)
        assert found[0].best[0].probability != pytest.approx(found[-1].best[0].probability, abs=1e-6)


def test_the_logit_lens_of_a_model_in_training_has_no_dropout() -> None:
    model = classifier()
    model.train()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.5
    seen = look(model, TEXT)
    assert logit_lens(seen) == logit_lens(seen)


def test_a_layer_in_between_is_a_model_that_ends_there() -> None:
    deep = language_model()
    shallow = language_model(n_layers=1)
    shallow.load_state_dict({name: x for name, x in deep.state_dict().items() if ".blocks.1." not in name})
    found, wanted = logit_lens(look(deep, TEXT), 3), look(shallow, TEXT).next(3, k=5)
    assert [x.probability for x in found[1].best] == pytest.approx([x.probability for x in wanted], abs=1e-5)
    chances = torch.tensor([x.probability for x in look(shallow, TEXT).next(3, k=10_000)])
    assert found[1].entropy == pytest.approx(float(-torch.xlogy(chances, chances).sum()), abs=1e-3)


@pytest.mark.parametrize(("make", "what"), [(classifier, TEXT), (image_classifier, torch.rand(3, 16, 16))])
def test_classes_layer_by_layer(make: Any, what: Any) -> None:
    model = make()
    seen = look(model, what)
    with torch.no_grad():
        chances = model(*seen.inputs).softmax(-1)[0]
    found = logit_lens(seen, k=3)[-1].best
    assert [x.probability for x in found] == pytest.approx(chances.sort(descending=True).values.tolist(), abs=1e-5)
    assert {x.text for x in found} == set(model.processor.labels)


def test_labels_that_exclude_nothing_have_chances_of_their_own() -> None:
    model = small("sentiment", problem_type="multi_label", n_classes=4)
    seen = look(model, [5, 6, 7])
    found = logit_lens(seen, k=4)[-1]
    assert {x.text: x.probability for x in found.best} == pytest.approx(seen.classes(), abs=1e-6)
    each = torch.tensor(list(seen.classes().values()))
    binary = torch.special.entr(each) + torch.special.entr(1 - each)
    assert found.entropy == pytest.approx(float(binary.sum()), abs=1e-5)
    changed = effect(model, [5, 6, 7], switch_off(model, [("encoder", 0, 1)]))
    p, q = (
        torch.tensor([x.probability for x in sorted(one.next, key=lambda x: x.text)])
        for one in (changed.before, changed.after)
    )
    expected = (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).sum()
    assert changed.divergence == pytest.approx(float(expected), abs=1e-5)
    with pytest.raises(ValueError, match="it predicts a number"):
        logit_lens(look(small("sentiment", problem_type="regression", n_classes=1), [5, 6, 7]))


def test_a_masked_token_is_said_at_its_place() -> None:
    model = small("bert-base-masked")
    seen = look(model, inputs_of(model.config)[0][:1])
    with torch.no_grad():
        best = model(*seen.inputs)[0, 4].argmax()
    assert logit_lens(seen, 4)[-1].best[0].token == int(best)


def test_the_lens_sees_interventions() -> None:
    model = language_model()
    seen = look(model, TEXT)
    plain = logit_lens(seen)
    with switch_off(model, [("self", 1, 0)]):
        changed = logit_lens(seen)
    assert changed[:2] == plain[:2]
    assert changed[2] != plain[2]
    assert logit_lens(seen) == plain


def test_what_says_nothing_is_told() -> None:
    seen = look(small("luong-lstm"), [3, 4, 5], [6, 7])
    with pytest.raises(ValueError, match="no stack of layers"):
        logit_lens(seen)
    with pytest.raises(ValueError, match="head='none'"):
        logit_lens(look(small("bert-base"), [3, 4, 5]))
    with pytest.raises(ValueError, match="position=99"):
        logit_lens(look(language_model(), TEXT), 99)
    with pytest.raises(ValueError, match="k=0 must be at least 1"):
        logit_lens(look(language_model(), TEXT), k=0)


# ---- effects


def losses(logits: Tensor, tokens: Tensor) -> list[float]:
    found: list[float] = torch.nn.functional.cross_entropy(logits, tokens, reduction="none").tolist()
    return found


def test_the_effect_on_a_language_model() -> None:
    model = language_model()
    off = [("self", layer, head) for layer in (0, 1) for head in (0, 2)]
    found = effect(model, TEXT, switch_off(model, off), k=3)
    (tokens,) = look(model, TEXT).inputs
    with torch.no_grad():
        before = model(tokens)[0]
        with switch_off(model, off):
            after = model(tokens)[0]
    assert found.before.each == pytest.approx(losses(before[:-1], tokens[0, 1:]), abs=1e-5)
    assert found.after.each == pytest.approx(losses(after[:-1], tokens[0, 1:]), abs=1e-5)
    assert found.before.loss == pytest.approx(sum(found.before.each) / len(found.before.each))
    assert found.loss_change == pytest.approx((found.after.loss or 0) - (found.before.loss or 0))
    assert found.after.next[0].probability == pytest.approx(float(after[-1].softmax(-1).max()), abs=1e-5)
    wanted = torch.nn.functional.kl_div(after[-1].log_softmax(-1), before[-1].softmax(-1), reduction="sum")
    assert found.divergence == pytest.approx(float(wanted), abs=1e-4)
    assert len(found.tokens) == len(found.before.each) == tokens.shape[1] - 1
    assert (
        json.loads(json.dumps(found.to_dict(), allow_nan=False))["after"]["next"][0]["text"] == found.after.next[0].text
    )
    assert edits._edits == ()


def test_the_effect_on_a_translator_with_and_without_a_target() -> None:
    model = translator()
    given = effect(model, TEXT, [attention_scale(model, 0.0, kinds=["cross"])], "고양이가 매트")
    seen = look(model, TEXT, "고양이가 매트")
    with torch.no_grad():
        logits = model(*seen.inputs)[0]
    wanted = torch.tensor([label.token_id for label in seen.rows(kind="cross")])
    assert given.before.each == pytest.approx(losses(logits, wanted), abs=1e-5)
    assert given.before.written is given.after.written is None
    assert given.loss_change != pytest.approx(0, abs=1e-4)
    off = [("cross", layer, head) for layer in (0, 1) for head in range(4)]
    free = effect(model, TEXT, [switch_off(model, off)])
    with switch_off(model, off):
        wanted_text = look(model, TEXT).target_text
    assert free.before.written == look(model, TEXT).target_text
    assert free.after.written == wanted_text
    assert len(free.before.each) == len(free.after.each) == len(free.tokens)


@pytest.mark.parametrize(
    ("make", "what", "kind"),
    [(classifier, TEXT, "encoder"), (image_classifier, torch.rand(3, 16, 16), "encoder")],
    ids=["text", "image"],
)
def test_the_effect_on_classes(make: Any, what: Any, kind: str) -> None:
    model = make()
    seen = look(model, what)
    off = [(kind, 0, head) for head in range(4)]
    found = effect(model, what, switch_off(model, off))
    with switch_off(model, off), torch.no_grad():
        chances = model(*seen.inputs).softmax(-1)[0]
    assert [x.probability for x in found.after.next] == pytest.approx(sorted(chances.tolist(), reverse=True), abs=1e-5)
    assert found.before.loss is None
    assert found.loss_change is None
    assert found.divergence > 1e-6


def test_nothing_changes_nothing() -> None:
    model = captioner()
    found = effect(model, torch.rand(3, 16, 16), [], TEXT)
    assert found.divergence == pytest.approx(0, abs=1e-6)
    assert found.before == found.after
    several = effect(language_model(), TEXT, [])
    assert several.loss_change == 0


def test_the_future_gives_the_next_token_away_only_to_those_who_may_see_it() -> None:
    model = language_model()
    found = effect(model, TEXT, [no_causal_mask(model)], position=0)
    assert found.divergence > 1e-5


# ---- comparison


def js(p: Tensor, q: Tensor) -> Tensor:
    m = (p + q) / 2
    kl = [(x * (x.clamp(min=1e-30).log() - m.clamp(min=1e-30).log())).sum(-1) for x in (p, q)]
    return (kl[0] + kl[1]) / 2 / math.log(2)


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.window(30)], ids=["all", "causal", "window"])
def test_divergence_is_that_of_the_whole_matrices(mask: Any) -> None:
    q, k, r = torch.randn(3, 1, 3, 300, 8)
    a, b = AttentionMap(q, k, mask), AttentionMap(r, k, mask)
    divergence, largest = compare_maps(a, b)
    torch.testing.assert_close(divergence, js(a.dense()[0], b.dense()[0]).mean(-1), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(largest, (a.dense() - b.dense())[0].abs().amax((-1, -2)))
    every = head_distances(a, AttentionMap(r[:, :2], k[:, :2], mask))
    assert every.shape == (3, 2)
    torch.testing.assert_close(every.diagonal(), divergence[:2])
    torch.testing.assert_close(every[2, 0], js(a.dense()[0, 2], b.dense()[0, 0]).mean(), atol=1e-5, rtol=1e-4)


def test_blocks_of_any_size_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, r = torch.randn(3, 2, 2, 50, 8)
    a, b = AttentionMap(q, k), AttentionMap(r, k)
    whole = compare_maps(a, b)
    monkeypatch.setattr("regard.lens.compare._WEIGHTS_AT_ONCE", 64)
    monkeypatch.setattr("regard.lens.compare._BLOCK_SIDE", 7)
    torch.testing.assert_close(compare_maps(a, b), whole)


def test_the_same_is_0_and_nothing_in_common_is_1() -> None:
    a, b = map_of(pointing_at([0, 1, 2], 4)), map_of(pointing_at([3, 3, 3], 4))
    assert [float(x[0]) for x in compare_maps(a, a)] == pytest.approx([0, 0], abs=1e-5)
    assert [float(x[0]) for x in compare_maps(a, b)] == pytest.approx([1, 1], abs=1e-5)
    half = map_of(pointing_at([0, 3, 2], 4))
    assert float(compare_maps(a, half)[0]) == pytest.approx(1 / 3, abs=1e-5)


def test_two_models_two_layers_and_an_intervention() -> None:
    one, other = language_model(), language_model(seed=1)
    a, b = look(one, TEXT), look(other, TEXT)
    found = compare(a, b)
    assert found.divergence.shape == (2, 4)
    torch.testing.assert_close(
        found.largest[1, 2], (a.weights(layer=1, head=2) - b.weights(layer=1, head=2)).abs().max()
    )
    layers = compare(a, a, layers=[(0, 1), (1, 1), (-1, 0)])
    assert layers.layers == [(0, 1), (1, 1), (1, 0)]
    torch.testing.assert_close(layers.divergence[1], torch.zeros(4))
    torch.testing.assert_close(layers.divergence[0], layers.divergence[2])
    with switch_off(one, [("self", 0, 0)]):
        changed = compare(a, look(one, TEXT))
    assert (changed.divergence[0] == 0).all()
    assert (changed.divergence[1] > 0).any()
    assert json.loads(json.dumps(changed.to_dict()))["layers"] == [[0, 0], [1, 1]]


def test_what_cannot_be_compared_is_told() -> None:
    a = look(language_model(), TEXT)
    with pytest.raises(ValueError, match="both must be of the same tokens"):
        compare(a, look(language_model(), "the cat"))
    with pytest.raises(ValueError, match="a has 2 self layers and b has 1; give layers="):
        compare(a, look(language_model(n_layers=1), TEXT))
    with pytest.raises(ValueError, match="layer=7"):
        compare(a, a, layers=[(0, 7)])
