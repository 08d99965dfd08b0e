"""Contributions, Why and Patching through the server: each number is the one that ``regard.capture`` gives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

import regard
from generation.spoken import classifier, language_model, translator
from regard.foundation.cancellation import Cancelled, cancel_with
from regard.lens.activations import ActivationRecord
from regard.lens.effects import target_tokens, text_losses
from regard.lens.patching import attribution_patching, logit_difference, patching_sweep
from regard.models import Model
from regard.web.requests import Limits
from regard.web.served_models import decode_image

from .served import TEXT, asked, asking, opened, picture, refusal, small_models

TARGET, CHANGED = "the dog ran", "the mat sat on the cat."
LAYERED = ("speaker", "grouped", "sloping", "translator", "captioner", "classifier", "images")
CLOSE = {"abs": 1e-4, "rel": 1e-4}


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    return small_models()


@pytest.fixture(scope="module")
def client(models: dict[str, Model]) -> Iterator[TestClient]:
    with asking(models) as client:
        yield client


def pair(client: TestClient, models: dict[str, Model], name: str) -> tuple[dict[str, Any], ActivationRecord]:
    """The same text through the server and through the library."""
    model = models[name]
    what: Any = decode_image(picture(), Limits()) if model.config.source == "image" else TEXT
    target = TARGET if model.config.architecture == "encoder-decoder" else None
    return opened(client, name, **({} if target is None else {"target": target})), regard.capture(model, what, target)


def total(parts: Any) -> float:
    return sum(map(total, parts)) if isinstance(parts, list) else float(parts)


@pytest.mark.parametrize("name", LAYERED)
def test_parts_sum_to_the_logit(client: TestClient, models: dict[str, Model], name: str) -> None:
    look, record = pair(client, models, name)
    for position in (-1, 2):
        found = asked(client, look, "contributions", position=position)
        exact = record.logit_attribution(found["token"], position=position)
        assert found["logit"] == pytest.approx(exact.logit, **CLOSE)
        assert total(list(found["parts"].values())) == pytest.approx(found["logit"], **CLOSE)
        assert found["parts"].keys() == exact.parts.keys()
        for part, values in found["parts"].items():
            assert torch.allclose(torch.tensor(values).double(), exact.parts[part].double(), atol=1e-4)
        best = found["choices"][0]
        assert best["token"] == found["token"], "the likeliest"
        other = asked(client, look, "contributions", position=position, token=found["choices"][1]["token"])
        assert other["logit"] < found["logit"]


@pytest.mark.parametrize("name", LAYERED)
def test_pairs_of_writers_sum_to_the_score(client: TestClient, models: dict[str, Model], name: str) -> None:
    look, record = pair(client, models, name)
    for kind in look["kinds"]:
        at = {"kind": kind, "layer": 1, "head": 3, "row": 2, "col": 1}
        found, exact = asked(client, look, "why", **at), record.why(**at)  # type: ignore[arg-type]
        summed = found["others"] + found["position_bias"] + sum(each["value"] for each in found["pairs"])
        assert summed == pytest.approx(exact.score, **CLOSE)
        assert found["score"] == pytest.approx(exact.score, **CLOSE)
        assert [each["value"] for each in found["pairs"]] == pytest.approx([v for *_, v in exact.top(12)], **CLOSE)
        for each in found["pairs"]:
            for side in (each["query"], each["key"]):
                if "head" in side:
                    label = asked(client, look, "labels", kind=side["name"], axis="cols")[side["from"]["index"]]
                    assert label.items() <= side["from"].items(), "the same name as in the other views"
                    assert 0 < side["from"]["weight"] <= 1


@pytest.mark.parametrize(("name", "kind"), [("speaker", "self"), ("translator", "encoder"), ("classifier", "encoder")])
def test_a_sweep_is_the_lens_s(client: TestClient, models: dict[str, Model], name: str, kind: str) -> None:
    model, target = models[name], {"target": TARGET} if name == "translator" else {}
    look, other = opened(client, name, **target), opened(client, name, text=CHANGED, **target)
    names = {over: asked(client, look, "patching", other=other["id"], kind=kind, over=over) for over in ("ff", "heads")}
    for over, found in names.items():
        assert found["exact"]
        at = {"other": other["id"], "kind": kind, "over": over, "layer": 1, "unit": 2}
        predictions = asked(client, look, "patched", **at)["predictions"]
        tokens = {each["text"]: each["token"] for each in predictions}
        ends = [look_at["classes"] if name == "classifier" else None for look_at in (look, other)]
        if ends[0]:
            assert {each["text"]: each["clean"] for each in predictions} == pytest.approx(ends[0], abs=1e-6)
        if not {found["answer"], found["wrong"]} <= tokens.keys():
            continue
        metric = logit_difference(model, tokens[found["answer"]], tokens[found["wrong"]])
        both = None if not target else (TARGET, TARGET)
        exact = patching_sweep(model, TEXT, CHANGED, metric, over=over, kind=kind, target=both)  # type: ignore[arg-type]
        assert torch.allclose(torch.tensor(found["effects"]), exact.effects, atol=1e-3)
        assert [found["clean"], found["corrupted"]] == pytest.approx([exact.clean, exact.corrupted], **CLOSE)


def test_the_text_patched_with_itself_is_brought_back_whole(client: TestClient) -> None:
    """All that a changed word changes goes through the first layer's input there."""
    look, other = opened(client, "grouped", text="the cat sat"), opened(client, "grouped", text="the cat fat")
    at = {"other": other["id"], "kind": "self", "over": "residual"}
    found = asked(client, look, "patching", **at)
    assert found["effects"][0][8] == pytest.approx(1, abs=1e-3)
    assert found["effects"][0][:8] == pytest.approx([0] * 8, abs=1e-5)
    for each in asked(client, look, "patched", **at, layer=0, unit=8)["predictions"]:
        assert each["patched"] == pytest.approx(each["clean"], abs=1e-5)


def test_a_sweep_that_is_too_long_is_estimated(models: dict[str, Model]) -> None:
    with asking({"speaker": models["speaker"]}, Limits(sweep_operations=0)) as client:
        look, other = opened(client, "speaker"), opened(client, "speaker", text=CHANGED)
        found = asked(client, look, "patching", other=other["id"], kind="self", over="heads")
    assert not found["exact"]
    tokens = [regard.look(models["speaker"], text).logits()[-1].softmax(-1) for text in (TEXT, CHANGED)]
    moved = tokens[0] - tokens[1]
    metric = logit_difference(models["speaker"], int(moved.argmax()), int(moved.argmin()))
    exact = attribution_patching(models["speaker"], TEXT, CHANGED, metric, over="heads")
    assert torch.allclose(torch.tensor(found["effects"]), exact.effects, atol=1e-3)


def test_a_sweep_that_nobody_waits_for_stops(models: dict[str, Model]) -> None:
    left = threading.Event()
    left.set()
    metric = logit_difference(models["speaker"], 5, 6)
    with cancel_with(left), pytest.raises(Cancelled):
        patching_sweep(models["speaker"], TEXT, CHANGED, metric)


def test_what_does_not_apply_is_refused_in_a_sentence(client: TestClient) -> None:
    look = opened(client, "recurrent", target=TARGET)
    at = f"/api/looks/{look['id']}"
    for question in ("contributions", "why?kind=cross&layer=0&head=0&row=0&col=0"):
        assert "no layers that write into a residual stream" in refusal(client.get(f"{at}/{question}"), 422)
    longer, short = opened(client, "speaker", text="the cat sat on the mat, the cat"), opened(client, "speaker")
    at = f"/api/looks/{short['id']}"
    sentence = refusal(client.get(f"{at}/patching?kind=self&other={longer['id']}"), 422)
    assert sentence.startswith("the texts have 13 and ")
    assert "same prediction" in refusal(client.get(f"{at}/patching?kind=self&other={short['id']}"), 422)
    assert "same model" in refusal(client.get(f"{at}/patching?kind=self&other={look['id']}"), 422)
    assert "is not within" in refusal(client.get(f"{at}/contributions?token=99999"), 422)
    other = opened(client, "speaker", text=CHANGED)
    for unit in ("layer=0&unit=99", "layer=9&unit=0"):
        refusal(client.get(f"{at}/patched?kind=self&other={other['id']}&{unit}"), 422)


@pytest.mark.parametrize("name", ["speaker", "translator", "captioner", "classifier", "images"])
def test_every_head_is_switched_off_once(client: TestClient, models: dict[str, Model], name: str) -> None:
    model = models[name]
    target = TARGET if name in ("translator", "captioner") else None
    look = opened(client, name, **({} if target is None else {"target": target}))
    found = asked(client, look, "heads")
    assert {kind: [len(layer) for layer in layers] for kind, layers in found["without"].items()} == {
        kind: [size["heads"]] * size["layers"] for kind, size in look["kinds"].items()
    }
    kind = next(iter(found["without"]))
    what: Any = decode_image(picture(), Limits()) if model.config.source == "image" else TEXT
    with regard.lens.interventions.switch_off(model, [(kind, 1, 2)]):
        changed = regard.look(model, what, target)
        if name in ("classifier", "images"):
            best = max(look["classes"], key=look["classes"].get)
            expected = changed.classes()[best]
        else:
            tokens = [token for _, token in target_tokens(changed)]
            expected = float(torch.tensor(text_losses(changed, tokens)).mean().neg().exp())
    assert found["without"][kind][1][2] == pytest.approx(expected, rel=1e-3)


def test_labels_and_values_are_no_softmax() -> None:
    """A classifier of several labels has a sigmoid for each; a regression has a value."""
    for fields in ({"problem_type": "multi_label"}, {"problem_type": "regression", "n_classes": 1}):
        model = classifier(**fields)
        with asking({"judge": model}) as client:
            look, changed = opened(client, "judge"), opened(client, "judge", text=CHANGED)
            said = asked(client, look, "contributions")
            effects = asked(client, look, "heads")
            assert effects["before"] == pytest.approx(said["probability"], **CLOSE)
            assert len({effects["before"], *effects["without"]["encoder"][0]}) == 5
            if model.config.problem_type == "multi_label":
                options = {"kind": "encoder", "other": changed["id"], "layer": 0, "unit": 0}  # the same first token
                for one in asked(client, look, "patched", **options)["predictions"]:
                    assert one["patched"] == pytest.approx(one["corrupted"], **CLOSE)


def test_a_story_needs_queries_and_keys() -> None:
    with asking({"mamba": language_model(mixer="mamba2")}) as client:
        look, at = opened(client, "mamba"), {"kind": "self", "layer": 0, "head": 0, "row": 1}
        sentence = refusal(client.get(f"/api/looks/{look['id']}/story", params=at), 422)
    assert sentence == "model 'mamba' has state spaces in place of queries and keys"


@pytest.mark.parametrize("kind", ["self", "cross"])
def test_a_layer_of_the_story_adds_up(kind: str) -> None:
    """A decoder's layer adds the outputs of two attentions: a story about one includes the other."""
    with asking({"pre-norm": translator(norm_place="pre")}) as client:
        look = opened(client, "pre-norm", target=TARGET)
        told = asked(client, look, "story", kind=kind, layer=1, head=0, row=2)["block"]
    before, attention, between, ff, after = (
        torch.tensor(told[name]) for name in ("before", "attention", "between", "ff", "after")
    )
    assert torch.allclose(before + attention, between, atol=1e-5)
    assert ("cross" in told) == (kind == "self")
    assert torch.allclose(between + torch.tensor(told.get("cross", 0)) + ff, after, atol=1e-5)


@pytest.mark.parametrize("name", ["speaker", "recurrent"])
def test_experts_of_a_model_without_any_are_refused(client: TestClient, name: str) -> None:
    look = opened(client, name)
    options = {"kind": next(iter(look["kinds"])), "layer": 0}
    assert "has no experts" in refusal(client.get(f"/api/looks/{look['id']}/experts", params=options), 400)


def test_how_well_a_text_is_foretold(client: TestClient, models: dict[str, Model]) -> None:
    look = opened(client, "speaker")
    seen = regard.look(models["speaker"], TEXT)
    tokens = torch.tensor(seen.tokens()[1:])
    chances = seen.logits()[:-1].softmax(-1)
    found = asked(client, look, "fit")
    assert found["right"] == int((chances.argmax(-1) == tokens).sum())
    assert found["probability"] == pytest.approx(float(chances.gather(1, tokens[:, None]).log().mean().exp()), rel=1e-4)
    assert asked(client, opened(client, "classifier"), "fit") == {"tokens": 0}


@pytest.mark.parametrize("name", LAYERED)
def test_the_story_s_numbers_are_the_look_s(client: TestClient, models: dict[str, Model], name: str) -> None:
    look, record = pair(client, models, name)
    kind, row = ("cross" if "cross" in look["kinds"] else next(iter(look["kinds"]))), 2
    told = asked(client, look, "story", kind=kind, layer=1, head=3, row=row)
    head, weights = told["head"], record.attention(layer=1, kind=kind).tile()[0, 3, row]
    assert sum(key["weight"] for key in head["keys"]) + head["rest"] == pytest.approx(1, abs=1e-5)
    for key in head["keys"]:
        assert key["weight"] == pytest.approx(float(weights[key["index"]]), abs=1e-6)
        assert sum(a * b for a, b in zip(head["q"], key["k"], strict=True)) == pytest.approx(key["dot"], abs=1e-4)
        assert (key["score"] is None) == (key["weight"] == 0), "behind the mask"
        if name != "sloping" and key["weight"]:  # ALiBi adds a bias
            assert key["dot"] * head["factor"] == pytest.approx(key["score"], abs=1e-4)
    if not head["others"]:
        mixed = torch.tensor([key["weight"] for key in head["keys"]]) @ torch.tensor([key["v"] for key in head["keys"]])
        assert torch.allclose(mixed, torch.tensor(head["output"]), atol=1e-5)
    stack = "encoder" if kind == "encoder" else "decoder"
    block, layer = f"{stack}.blocks.1", told["block"]
    for part, site in (("ff", "ff.output"), ("after", "output")):
        assert torch.allclose(torch.tensor(layer[part]), record[f"{block}.{site}"][0, row], atol=1e-5)
    if parts := told["embedding"]["parts"]:
        summed = torch.tensor(list(parts.values())).sum(0)
        assert told["embedding"]["normed"] or torch.allclose(summed, torch.tensor(told["embedding"]["sum"]), atol=1e-5)
    best = asked(client, look, "contributions", position=told["position"])["choices"][0]
    assert told["predictions"][0] == pytest.approx(best, abs=1e-6)
    assert told["layers"][-1]["text"] == best["text"]
