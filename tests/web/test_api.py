"""The explorer's answers against the lens: every number that is sent is one that ``regard.look`` gives."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient

import regard
from generation.spoken import image_classifier, language_model, translator
from regard.attention import record
from regard.config.data_config import TokenizerKind
from regard.data.corpora import open_corpus
from regard.foundation.jsonio import to_jsonable
from regard.lens import interventions
from regard.lens.capture import attention_site
from regard.lens.effects import logit_lens
from regard.lens.labels import token_text
from regard.lens.patterns import patterns
from regard.models import Model
from regard.recipes import run_config
from regard.web.requests import Limits
from regard.web.run_examples import RunExamples, examples_of_run, name_of_run, spelled_words
from regard.web.served_models import decode_image

from .served import TEXT, asked, asking, numbers, opened, picture, refusal, small_models

FAMILIES = ("speaker", "grouped", "sloping", "translator", "recurrent", "captioner", "classifier", "images")
TARGET = "the dog ran"


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    return small_models()


@pytest.fixture(scope="module")
def client(models: dict[str, Model]) -> Iterator[TestClient]:
    with asking(models) as client:
        yield client


def pair(client: TestClient, models: dict[str, Model], name: str) -> tuple[dict[str, Any], regard.lens.Look]:
    """The same look through the server and through the library."""
    model = models[name]
    what: Any = decode_image(picture(), Limits()) if model.config.source == "image" else TEXT
    target = TARGET if model.config.architecture in ("encoder-decoder", "recurrent") else None
    fields = {} if target is None else {"target": target}
    return opened(client, name, **fields), regard.look(model, what, target)


# ---- models and looks


def test_the_models_are_described(client: TestClient) -> None:
    found = {each["id"]: each for each in client.get("/api/models").json()}
    assert tuple(found) == FAMILIES
    assert found["translator"] == {
        "id": "translator",
        "name": "translator",
        "task": "translate",
        "kinds": {kind: {"layers": 2, "heads": 4} for kind in ("encoder", "self", "cross")},
        "max_len": 96,
        "d_head": 6,
        "generates": True,
        "image": False,
        "source": True,
        "causal": True,
        "scales": True,
        "layered": True,
        "contributes": True,
        "splits": ["encoder", "self", "cross"],
        "state_space": False,
        "experts": False,
        "history": False,
        "examples": [],
        "tags": [],
    }
    assert not any(found["recurrent"][name] for name in ("layered", "contributes", "splits", "scales"))
    assert found["recurrent"]["kinds"] == {"cross": {"layers": 1, "heads": 1}}
    assert [found[name]["task"] for name in ("speaker", "captioner", "classifier", "images")] == [
        "lm",
        "caption",
        "classify",
        "classify-images",
    ]
    assert [name for name in found if found[name]["image"]] == ["captioner", "images"]
    assert [name for name in found if not found[name]["generates"]] == ["classifier", "images"]


def run_of(folder: Path, task: str, source: str) -> Path:
    """A run as far as it says what it learned from."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(run_config(task, data={"source": source}).model_dump_json())
    return folder


@pytest.mark.parametrize(
    ("task", "corpus", "tags"),
    [("translate", "en-ko", {"[plain]", "[polite]", "[formal]"}), ("caption", "shapes", set())],
)
def test_a_run_brings_held_out_examples_and_its_tags(tmp_path: Path, task: str, corpus: str, tags: set[str]) -> None:
    found = examples_of_run(f"{run_of(tmp_path / 'run', task, corpus)}@1200")
    assert len(set(found.inputs)) == 6
    assert set(found.tags) == tags
    if corpus == "shapes":
        assert decode_image(found.inputs[0], Limits()).size == (64, 64)
    else:
        held_out = {open_corpus("en-ko").example("valid", n).source for n in range(2000)}
        assert set(found.inputs) <= held_out


def test_examples_of_files(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"<{n % 3}> sentence number {n}\tzin nummer {n}\n" for n in range(400)))
    found = examples_of_run(run_of(tmp_path / "a", "translate", str(pairs)))
    assert len(found.inputs) == 6
    assert set(found.tags) == {"<0>", "<1>", "<2>"}
    pairs.write_text(pairs.read_text() + "without one\tzonder\n" * 40)  # a tag that only some have is part of the text
    assert examples_of_run(tmp_path / "a").tags == ()
    pairs.write_text("".join(f"sentence number {n % 80}\tzin nummer {n % 80}\n" for n in range(400)))
    inputs = examples_of_run(tmp_path / "a").inputs
    assert len(inputs) == len(set(inputs)) > 1, "nothing is offered twice"
    pairs.unlink()  # what is gone cannot be shown
    assert examples_of_run(tmp_path / "a") == RunExamples()
    assert examples_of_run(tmp_path / "nothing") == RunExamples()


def test_a_run_is_called_by_its_own_name(tmp_path: Path) -> None:
    run_of(tmp_path / "demo" / "run", "translate", "en-ko")
    run_of(tmp_path / "critic", "classify", "reviews.csv")
    names = {
        "demo/run": "demo",
        "demo/run/model": "demo",
        "demo/run@1200": "demo@1200",
        "critic": "critic",
        "gpt2": "gpt2",
    }
    assert {path: name_of_run(tmp_path / path) for path in names} == names


def test_an_image_encoder_with_stages_is_looked_into() -> None:
    model = image_classifier(stages=(1, 1), stage_heads=(2, 4), class_tokens=0, pooling="mean")
    seen = regard.look(model, decode_image(picture(), Limits()))
    with asking({"stages": model}) as client:
        look = opened(client, "stages")
        assert look["kinds"].keys() == {"stage0", "stage1"}
        for kind, sizes in look["kinds"].items():
            row = asked(client, look, "top", kind=kind, layer=0, head=0, row=1, k=3)
            weights = seen.weights(layer=0, head=0, kind=kind)
            assert list(weights.shape) == [sizes["n_rows"], sizes["n_cols"]]
            assert [each["weight"] for each in row] == pytest.approx(weights[1].topk(3).values.tolist(), abs=1e-6)


def test_words_that_have_to_be_spelled_are_unfamiliar() -> None:
    model = language_model()  # its tokenizer learned a few lines
    known, strange = (regard.look(model, text).rows() for text in ("the cat on", "the xylophone on"))
    assert spelled_words(known) == []
    assert spelled_words(strange) == ["xylophone"]


@pytest.mark.parametrize("kind", ["words", "unigram"])
def test_a_word_without_a_token_is_named_as_it_was_typed(kind: TokenizerKind) -> None:
    model = language_model(kind)
    with asking({"model": model}) as client:
        look = client.post("/api/looks", json={"model": "model", "text": "the Ξένος on"}).json()
    assert look["unfamiliar"] == ["Ξένος"]


@pytest.mark.parametrize("name", ["classifier", "images"])
def test_a_classifier_says_its_classes(client: TestClient, models: dict[str, Model], name: str) -> None:
    sent, look = pair(client, models, name)
    what: Any = decode_image(picture(), Limits()) if name == "images" else TEXT
    exact = regard.classify(models[name], what)[0].all
    assert list(sent["classes"]) == list(exact)
    assert sent["classes"] == pytest.approx(exact, abs=1e-5)
    assert look.classes() == pytest.approx(exact, abs=1e-5)
    assert "uncertain" not in sent


@pytest.mark.parametrize("name", ["speaker", "translator", "captioner"])
def test_where_the_model_was_least_sure(client: TestClient, models: dict[str, Model], name: str) -> None:
    sent, look = pair(client, models, name)
    first = 1 if name == "speaker" else 0  # before it has read two tokens nothing can be known
    spread = [sum(-p * math.log(p) for _, _, p in look.next(n, k=10_000)) for n in range(len(look.hidden()))]
    assert sent["uncertain"] == max(range(first, len(spread)), key=spread.__getitem__)
    assert look.uncertainty().tolist() == pytest.approx(spread, abs=1e-4)


def test_where_a_change_of_the_model_shows_most(client: TestClient, models: dict[str, Model]) -> None:
    off = [["self", 0, 1]]
    plain, changed = opened(client, "speaker"), opened(client, "speaker", variant={"off": off})
    with interventions.switch_off(models["speaker"], [("self", 0, 1)]):
        after = regard.look(models["speaker"], TEXT)
    before = regard.look(models["speaker"], TEXT)
    exact = [
        sum(abs(p[token] - q.get(token, 0.0)) for token in p) / 2
        for p, q in (
            [{token: chance for token, _, chance in look.next(n, k=10_000)} for look in (before, after)]
            for n in range(len(before.hidden()))
        )
    ]
    assert asked(client, changed, "changes", other=plain["id"]) == pytest.approx(exact, abs=1e-5)
    assert max(exact) > 1e-4
    short = opened(client, "speaker", text="the cat")
    told = refusal(client.get(f"/api/looks/{short['id']}/changes", params={"other": plain["id"]}), 422)
    assert "same tokens" in told


@pytest.mark.parametrize("name", FAMILIES)
def test_every_weight_that_is_sent_is_the_lens_s(client: TestClient, models: dict[str, Model], name: str) -> None:
    sent, look = pair(client, models, name)
    assert tuple(sent["kinds"]) == look.kinds
    assert (sent["text"], sent["target"]) == (look.text, look.target_text)
    for kind, size in sent["kinds"].items():
        rows, cols = size["n_rows"], size["n_cols"]
        assert (rows, cols) == (len(look.rows(kind=kind)), len(look.cols(kind=kind)))
        assert (size["layers"], size["heads"]) == (look.layers(kind=kind), look.heads(kind=kind))
        corner = {"r0": rows // 2, "r1": rows, "c0": cols // 3, "c1": cols}
        for layer in range(size["layers"]):
            for head in (*range(size["heads"]), None):
                whole = numbers(
                    client,
                    sent,
                    "tile",
                    kind=kind,
                    layer=layer,
                    head="mean" if head is None else head,
                    r0=0,
                    r1=rows,
                    c0=0,
                    c1=cols,
                )
                expected = look.weights(layer=layer, head=head, kind=kind)
                torch.testing.assert_close(whole, expected, rtol=0, atol=1e-6)
                torch.testing.assert_close(whole.sum(-1), torch.ones(rows), rtol=0, atol=1e-5)
        part = numbers(client, sent, "tile", kind=kind, layer=0, head=0, **corner)
        # A product of another shape may sum q · k in another order: a score of about 10 differs by an ulp or two, 1e-6,
        # which exp turns into the same relative error of its weight.
        expected = look.weights(layer=0, head=0, kind=kind)[rows // 2 :, cols // 3 :]
        torch.testing.assert_close(part, expected, rtol=4e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["translator", "captioner", "images"])
def test_labels_come_in_pages(client: TestClient, models: dict[str, Model], name: str) -> None:
    sent, look = pair(client, models, name)
    for kind in sent["kinds"]:
        for axis, expected in (("rows", look.rows(kind=kind)), ("cols", look.cols(kind=kind))):
            found = asked(client, sent, "labels", kind=kind, axis=axis)
            assert [(x["text"], x["special"]) for x in found] == [(x.text, x.special) for x in expected]
            assert [x.get("box") for x in found] == [None if x.box is None else list(x.box) for x in expected]
            assert asked(client, sent, "labels", kind=kind, axis=axis, start=2, stop=5) == found[2:5]


def test_overviews_and_thumbnails(client: TestClient, models: dict[str, Model]) -> None:
    sent, look = pair(client, models, "translator")
    for reduce in ("mean", "max"):
        found = numbers(client, sent, "pooled", kind="encoder", layer=1, head=2, h=4, w=3, reduce=reduce)
        torch.testing.assert_close(found, look.pooled(kind="encoder", layer=1, head=2, h=4, w=3, reduce=reduce))
    assert numbers(client, sent, "pooled", kind="cross", layer=0, head="mean", h=500, w=500).shape == (
        len(look.rows(kind="cross")),
        len(look.cols(kind="cross")),
    )
    small = numbers(client, sent, "thumbnails", kind="cross", layer=1, size=3)
    torch.testing.assert_close(small, look.map(kind="cross", layer=1).pooled(3, 3)[0])


def test_as_many_cells_as_fit_into_a_megabyte(models: dict[str, Model]) -> None:
    """512 × 512 may be asked for: the answer says in X-Shape that it has 500 × 500."""
    model = language_model(kind="chars", max_len=520)
    text = (TEXT * 30)[:520]
    look = regard.look(model, text)
    with asking({"speaker": model}) as client:
        sent = opened(client, "speaker", text=text)
        for asked_for, sent_back in (((512, 512), (500, 500)), ((512, 488), (512, 488)), ((490, 512), (489, 511))):
            found = numbers(client, sent, "pooled", kind="self", layer=0, head=1, h=asked_for[0], w=asked_for[1])
            assert found.shape == sent_back
            torch.testing.assert_close(found, look.pooled(layer=0, head=1, kind="self", h=sent_back[0], w=sent_back[1]))
        small = numbers(client, sent, "thumbnails", kind="self", layer=0, size=512)
        assert small.shape == (4, 250, 250)


MERGED = ({"words": True, "specials": True}, {"words": True, "specials": False}, {"words": False, "specials": False})


@pytest.mark.parametrize("name", ["speaker", "translator", "captioner", "classifier", "images"])
@pytest.mark.parametrize("reading", MERGED, ids=["words", "words alone", "no specials"])
def test_words_and_hidden_special_tokens(
    client: TestClient, models: dict[str, Model], name: str, reading: dict[str, bool]
) -> None:
    sent, look = pair(client, models, name)
    sizes = client.get(f"/api/looks/{sent['id']}", params=reading).json()["kinds"]
    for kind in look.kinds:
        view = look.merged(kind=kind, **reading)
        n_rows, n_cols = len(view.rows), len(view.cols)
        assert (sizes[kind]["n_rows"], sizes[kind]["n_cols"]) == (n_rows, n_cols)
        labels = asked(client, sent, "labels", kind=kind, axis="cols", **reading)
        assert [label["text"] for label in labels] == [label.text for label in view.cols]
        place = {"kind": kind, "layer": 1, **reading}
        whole = {"r0": 0, "r1": n_rows, "c0": 0, "c1": n_cols}
        for head in (2, None):
            exact, at = view.weights(layer=1, head=head), {**place, "head": "mean" if head is None else head}
            torch.testing.assert_close(numbers(client, sent, "tile", **at, **whole), exact, rtol=0, atol=1e-6)
            pooled = numbers(client, sent, "pooled", **at, h=2, w=3)
            blocks = [[b.mean() for b in a.tensor_split(min(3, n_cols), 1)] for a in exact.tensor_split(min(2, n_rows))]
            torch.testing.assert_close(pooled, torch.tensor(blocks), rtol=0, atol=1e-6)
            best = asked(client, sent, "top", **at, row=n_rows - 1, k=1)[0]
            assert best["weight"] == pytest.approx(float(exact[-1].max()), abs=1e-6)
            assert best["text"] == view.cols[best["index"]].text
        small = numbers(client, sent, "thumbnails", **place, size=2)
        torch.testing.assert_close(small[3], view.pooled(layer=1, head=3, h=2, w=2), rtol=0, atol=1e-6)
        table = client.get(f"/api/looks/{sent['id']}/csv", params={**place, "head": 0}).content.decode("utf-8-sig")
        last = list(csv.reader(io.StringIO(table)))[-1]
        assert float(last[1]) == pytest.approx(float(view.weights(layer=1, head=0)[-1, 0]), abs=1e-6)


def test_where_nothing_but_special_tokens_was_looked_at(models: dict[str, Model]) -> None:
    with asking({"translator": models["translator"]}) as client:
        sent = opened(client, "translator", target="")
        hidden = client.get(f"/api/looks/{sent['id']}", params={"specials": False})
        assert "leaves no self attention" in refusal(hidden, 422)


def test_where_a_row_looks_most(client: TestClient, models: dict[str, Model]) -> None:
    sent, look = pair(client, models, "speaker")
    for head in (1, None):
        (expected,) = look.top(3, layer=1, head=head, rows=5)
        found = asked(client, sent, "top", kind="self", layer=1, head="mean" if head is None else head, row=5, k=3)
        assert [x["text"] for x in found] == [label.text for label, _ in expected.at]
        assert [x["weight"] for x in found] == pytest.approx([weight for _, weight in expected.at], abs=1e-6)
        assert [look.cols()[x["index"]].text for x in found] == [x["text"] for x in found]
    assert len(asked(client, sent, "top", kind="self", layer=0, head=0, row=0, k=9)) == 1  # nothing else is seen


# ---- the arithmetic of one weight


@pytest.mark.parametrize("name", FAMILIES)
def test_the_walk_can_be_done_by_hand(client: TestClient, models: dict[str, Model], name: str) -> None:
    sent, look = pair(client, models, name)
    model: Any = models[name]
    with torch.no_grad(), record(model) as recorder:
        model.hidden(*look.inputs)
    for kind, size in sent["kinds"].items():
        layer, head, row = size["layers"] - 1, size["heads"] - 1, size["n_rows"] - 2
        steps = [
            asked(client, sent, "walk", kind=kind, layer=layer, head=head, row=row, col=col)
            for col in range(size["n_cols"])
        ]
        weights = look.weights(layer=layer, head=head, rows=row, kind=kind)[0].tolist()
        assert [step["weight"] for step in steps] == pytest.approx(weights, abs=1e-6)
        for step in steps:
            if step["mechanism"] == "dot":
                assert step["dot"] == pytest.approx(sum(a * b for a, b in zip(step["q"], step["k"], strict=True)))
                assert step["factor"] == pytest.approx(1 / math.sqrt(len(step["q"])))
                assert step["scaled"] == pytest.approx(step["dot"] * step["factor"], abs=1e-5)
            if step["masked"]:
                assert (step["score"], step["weight"]) == (None, 0)
            else:
                assert step["score"] == pytest.approx(step["scaled"] + step["bias"], abs=1e-5)
                assert step["weight"] == pytest.approx(math.exp(step["score"] - step["lse"]), abs=1e-5)
            assert step["contribution"] == pytest.approx([step["weight"] * x for x in step["v"]], abs=1e-6)
        place = next(n for n, m in model.named_modules() if m is attention_site(model, kind, layer).owner)
        output = recorder.attentions[place][-1].output
        assert output is not None
        total = torch.tensor([step["contribution"] for step in steps]).sum(0)
        torch.testing.assert_close(total, output[0, head, row], rtol=1e-4, atol=1e-5)


def test_the_future_is_masked_and_a_slope_is_a_bias(client: TestClient, models: dict[str, Model]) -> None:
    sent, _ = pair(client, models, "sloping")
    ahead = asked(client, sent, "walk", kind="self", layer=0, head=0, row=1, col=4)
    assert (ahead["masked"], ahead["score"], ahead["weight"]) == (True, None, 0)
    back = asked(client, sent, "walk", kind="self", layer=0, head=0, row=4, col=1)
    assert not back["masked"]
    assert back["bias"] < 0


def test_a_long_text_has_no_v(models: dict[str, Model]) -> None:
    with asking({"speaker": models["speaker"]}, Limits(walk_tokens=4)) as client:
        sent = opened(client, "speaker")
        found = asked(client, sent, "walk", kind="self", layer=1, head=0, row=3, col=2)
    assert not {"v", "contribution"} & set(found)
    assert found["weight"] == pytest.approx(
        float(regard.look(models["speaker"], TEXT).weights(layer=1, head=0, rows=3, cols=2)), abs=1e-6
    )
    assert "at most 4 tokens" in found["v_absent"]


# ---- what the model would say


def test_the_next_token(client: TestClient, models: dict[str, Model]) -> None:
    sent, look = pair(client, models, "speaker")
    asked_for: list[dict[str, Any]] = [{}, {"position": 2, "k": 4}, {"temperature": 0.5, "top_k": 3}, {"top_p": 0.2}]
    for options in asked_for:
        expected = look.next(**options)
        found = asked(client, sent, "next", **options)
        assert [(x["token"], x["text"]) for x in found] == [(x.token, x.text) for x in expected]
        assert [x["probability"] for x in found] == pytest.approx([x.probability for x in expected], abs=1e-6)
    answer = client.get(f"/api/looks/{pair(client, models, 'classifier')[0]['id']}/next")
    assert "head='classify'" in refusal(answer, 422)


def test_patterns_and_the_logit_lens_are_the_lens_s(client: TestClient, models: dict[str, Model]) -> None:
    sent, look = pair(client, models, "speaker")
    found = asked(client, sent, "patterns", kind="self")
    exact = patterns(look, kind="self")
    assert found == json.loads(json.dumps(exact.to_dict()))
    assert found["labels"][1][0] == exact.label(1, 0)
    assert asked(client, sent, "logit-lens", position=3) == json.loads(json.dumps(to_jsonable(logit_lens(look, 3))))


def depth(nodes: dict[int, dict[str, Any]], node: dict[str, Any]) -> int:
    return 0 if node["parent"] is None else 1 + depth(nodes, nodes[node["parent"]])


def test_of_a_large_tree_what_was_given_up_is_left_out(models: dict[str, Model]) -> None:
    with asking({"translator": models["translator"]}, Limits(beam_nodes=10)) as client:
        found = asked(client, opened(client, "translator", generate={"beam": 3, "max_new_tokens": 6}), "beams")
    assert found["left_out"] > 0
    assert all(node["kept"] for node in found["nodes"])


def test_a_beam_search_is_a_tree(client: TestClient, models: dict[str, Model]) -> None:
    sent = opened(client, "translator", generate={"beam": 3, "max_new_tokens": 6})
    assert sent["beams"]
    nodes = asked(client, sent, "beams")["nodes"]
    made = regard.generate(
        models["translator"],
        regard.look(models["translator"], TEXT, "a").inputs[0].tolist(),
        beam=3,
        n_best=3,
        max_new_tokens=6,
    )
    leaves = {node["rank"]: node for node in nodes if "rank" in node}
    assert sorted(leaves) == [0, 1, 2]
    for rank, hypothesis in enumerate(made.hypotheses[0]):
        assert leaves[rank]["final"] == pytest.approx(hypothesis.score, abs=1e-5)
        assert leaves[rank]["score"] == pytest.approx(hypothesis.score * len(hypothesis.tokens), abs=1e-4)
    given_up = [node for node in nodes if not node["kept"]]
    assert given_up, "a search of three beams gives up something on the way"
    assert not any(node["best"] or "rank" in node for node in given_up)
    of = {node["id"]: node for node in nodes}
    for node in nodes[1:]:
        assert node["parent"] in of
        assert node["kept"] <= of[node["parent"]]["kept"]
    assert made.steps is not None
    for t, step in enumerate(made.steps):  # every beam the search had stands in the tree, with the search's score
        for _, parent, token, score in step.of(0):
            text = token_text(token, models["translator"].processor.source, models["translator"].config)
            same = [n for n in nodes if n["text"] == text and depth(of, n) == t + 1]
            assert any(node["score"] == pytest.approx(score, abs=1e-5) for node in same), (t, parent, token)
    path = [leaves[0]]
    while path[0]["parent"] is not None:
        path.insert(0, nodes[path[0]["parent"]])
    assert [node for node in nodes if node["best"]] == path
    assert all(node["parent"] is None or node["score"] < nodes[node["parent"]]["score"] for node in nodes)
    assert "".join(node["text"] for node in path if not node["text"].startswith("<")) == sent["target"]
    greedy = opened(client, "translator", generate={"max_new_tokens": 4})
    assert not greedy["beams"]
    assert "beam=2 or more" in refusal(client.get(f"/api/looks/{greedy['id']}/beams"), 422)


# ---- while it is written


def lines(client: TestClient, **body: Any) -> list[dict[str, Any]]:
    answer = client.post("/api/stream", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


@pytest.mark.parametrize("name", ["speaker", "translator", "recurrent", "captioner"])
def test_a_stream_ends_with_a_look_at_what_was_written(client: TestClient, models: dict[str, Model], name: str) -> None:
    model = models[name]
    given: dict[str, Any] = {"image": picture()} if model.config.source == "image" else {"text": TEXT}
    *told, last = lines(client, model=name, generate={"max_new_tokens": 7}, **given)
    what: Any = decode_image(picture(), Limits()) if "image" in given else TEXT
    look = regard.look(model, what, generate={"max_new_tokens": 7})
    assert look.generated is not None
    assert [line["token"] for line in told] == look.generated.tokens[0]
    text = "".join(line["text"] for line in told)
    assert text == (look.text or "")[len(TEXT) :] if name == "speaker" else text == look.target_text
    kind = look.kinds[-1]
    size = last["kinds"][kind]
    assert last["look"] == last["id"]
    found = numbers(client, last, "tile", kind=kind, layer=0, head=0, r0=0, r1=size["n_rows"], c0=0, c1=size["n_cols"])
    torch.testing.assert_close(found, look.weights(layer=0, head=0, kind=kind), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["translator", "recurrent", "captioner"])
@pytest.mark.parametrize("head", [0, None])
def test_where_the_model_looks_is_told_while_it_writes(
    client: TestClient, models: dict[str, Model], name: str, head: int | None
) -> None:
    """Rows of the recorder on the cached path are the look's at the finished text."""
    given: dict[str, Any] = {"image": picture()} if models[name].config.source == "image" else {"text": TEXT}
    layer = 0 if name == "recurrent" else 1
    watch = {"layer": layer, "head": head}
    *told, last = lines(client, model=name, generate={"max_new_tokens": 9}, watch=watch, **given)
    if "text" in given:
        assert told.pop(0)["source"] == asked(client, last, "labels", kind="cross", axis="cols")
    plain_told = lines(client, model=name, generate={"max_new_tokens": 9}, **given)[:-1]
    said = [line for line in told if line["token"] != models[name].config.eos_id]
    assert [(line["token"], line["text"]) for line in said] == [(line["token"], line["text"]) for line in plain_told]
    size = last["kinds"]["cross"]
    place = {"kind": "cross", "layer": layer, "head": "mean" if head is None else head}
    exact = numbers(client, last, "tile", **place, r0=0, r1=size["n_rows"], c0=0, c1=size["n_cols"])
    rows = torch.tensor([line["weights"] for line in told])
    assert len(rows) >= 4
    torch.testing.assert_close(rows, exact[: len(rows)], rtol=0, atol=1e-5)
    labels = asked(client, last, "labels", kind="cross", axis="rows")
    for line, label in zip(told, labels, strict=False):
        if "\ufffd" not in label["text"]:  # nonsense is no character, however many tokens of it there are
            assert line["label"]["text"] == label["text"]


def silent() -> Model:
    """A translator that ends before it has begun."""
    model: Any = translator()
    with torch.no_grad():
        model.head.bias = torch.nn.Parameter(torch.zeros(model.config.output_vocab_size))
        model.head.bias[model.config.eos_id] = 1000.0
    return cast(Model, model)


def test_the_end_is_watched_too() -> None:
    model = silent()
    with asking({"silent": model}) as client:
        _, end, last = lines(client, model="silent", text=TEXT, watch={"layer": 1, "head": 2})
        found = numbers(client, last, "tile", kind="cross", layer=1, head=2, r0=0, r1=1, c0=0, c1=len(end["weights"]))
    assert end["token"] == model.config.eos_id
    assert end["label"]["special"]
    torch.testing.assert_close(torch.tensor([end["weights"]]), found, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "watch", "words"),
    [
        ("speaker", {}, "model 'speaker' has no cross-attention to watch"),
        ("translator", {"layer": 2}, "watch.layer=2: cross attention has 2 layers, 0 … 1"),
        ("translator", {"head": 4}, "watch.head=4: cross attention has 4 heads, 0 … 3"),
        ("translator", {"head": -1}, "watch.head: input should be greater than or equal to 0"),
    ],
)
def test_what_cannot_be_watched(client: TestClient, model: str, watch: dict[str, Any], words: str) -> None:
    asked_for = {"model": model, "text": TEXT, "watch": watch}
    assert words in refusal(client.post("/api/stream", json=asked_for), 422)


def test_a_model_that_says_nothing_has_looked_all_the_same() -> None:
    model = silent()
    with asking({"silent": model}) as client:
        (last,) = lines(client, model="silent", text=TEXT)
    assert last["kinds"]["cross"]["n_rows"] == 1
    assert last["target"] == ""


def test_a_stream_that_cannot_be_is_refused_before_it_begins(client: TestClient) -> None:
    asked_for = {"model": "speaker", "text": TEXT, "generate": {"beam": 4}}
    assert "beam=4" in refusal(client.post("/api/stream", json=asked_for), 422)
    assert "does not generate text" in refusal(
        client.post("/api/stream", json={"model": "classifier", "text": TEXT}), 422
    )
    long = {"model": "speaker", "text": "ROMEO: " * 60}
    assert "max_len=96" in refusal(client.post("/api/stream", json=long), 422)


# ---- a changed model


def test_variants_change_what_is_seen_and_nothing_else(client: TestClient, models: dict[str, Model]) -> None:
    model = models["speaker"]
    n = opened(client, "speaker")["kinds"]["self"]["n_rows"]
    everything = {"kind": "self", "layer": 1, "head": 2, "r0": 0, "r1": n, "c0": 0, "c1": n}
    plain_weights = regard.look(model, TEXT).weights(layer=1, head=2)
    seeing = numbers(client, opened(client, "speaker", variant={"causal": False}), "tile", **everything)
    with interventions.no_causal_mask(model):
        torch.testing.assert_close(seeing, regard.look(model, TEXT).weights(layer=1, head=2), rtol=0, atol=1e-6)
    assert (seeing.triu(1) > 0).any()
    flat = numbers(client, opened(client, "speaker", variant={"scale": 0.0}), "tile", **everything)
    torch.testing.assert_close(flat, torch.ones(n, n).tril() / torch.arange(1, n + 1)[:, None])
    off = [["self", 0, head] for head in range(4)]
    silent = opened(client, "speaker", variant={"off": off})
    with interventions.switch_off(model, [("self", 0, head) for head in range(4)]):
        changed = regard.look(model, TEXT)
        torch.testing.assert_close(
            numbers(client, silent, "tile", **everything), changed.weights(layer=1, head=2), rtol=0, atol=1e-6
        )
        expected = changed.next(k=5)
    assert [x["token"] for x in asked(client, silent, "next", k=5)] == [x.token for x in expected]
    steps = [asked(client, silent, "walk", kind="self", layer=1, head=2, row=4, col=col) for col in range(n)]
    assert [step["weight"] for step in steps] == pytest.approx(
        changed.weights(layer=1, head=2, rows=4)[0].tolist(), abs=1e-6
    )
    untouched = numbers(client, opened(client, "speaker"), "tile", **everything)
    torch.testing.assert_close(untouched, plain_weights, rtol=0, atol=1e-6)


# ---- files


def test_a_table_of_weights(client: TestClient, models: dict[str, Model]) -> None:
    sent, look = pair(client, models, "translator")
    answer = client.get(f"/api/looks/{sent['id']}/csv", params={"kind": "cross", "layer": 1, "head": 3})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    assert "regard-cross-1-3.csv" in answer.headers["content-disposition"]
    header, *table = csv.reader(io.StringIO(answer.content.decode("utf-8-sig")))
    assert header[1:] == [label.text for label in look.cols(kind="cross")]
    assert [line[0] for line in table] == [label.text for label in look.rows(kind="cross")]
    values = torch.tensor([[float(x) for x in line[1:]] for line in table])
    torch.testing.assert_close(values, look.weights(layer=1, head=3, kind="cross"), rtol=0, atol=1e-6)


def test_the_image_that_was_looked_at(client: TestClient) -> None:
    sent = opened(client, "captioner", image=picture((900, 400)))
    answer = client.get(sent["image"])
    assert answer.headers["content-type"] == "image/png"
    shown = Image.open(io.BytesIO(answer.content))
    assert max(shown.size) <= 640
    text = opened(client, "speaker")
    assert "image" not in text
    assert "no image" in refusal(client.get(f"/api/looks/{text['id']}/image"), 404)


def test_one_page_that_needs_no_server(client: TestClient) -> None:
    sent = opened(client, "translator")
    answer = client.get(f"/api/looks/{sent['id']}/html")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert b"<html" in answer.content
    assert len(answer.content) < 1_000_000


@pytest.mark.promise(6, "strict content security policy on every answer")
def test_the_page_and_its_files(client: TestClient) -> None:
    page = client.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for answer in (page, client.get("/static/main.js"), client.get("/api/models"), client.get("/nothing")):
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
    script = client.get("/static/main.js")
    assert script.headers["content-type"].startswith("text/javascript")
    again = client.get("/static/main.js", headers={"If-None-Match": script.headers["etag"]})
    assert again.status_code == 304
    for path in ("/static/../server.py", "/static/%2e%2e/server.py", "/static/nothing.js", "/nothing"):
        refusal(client.get(path), 404)


# ---- kept


def test_an_answer_is_sent_once(client: TestClient) -> None:
    url = f"/api/looks/{opened(client, 'speaker')['id']}/tile?kind=self&layer=0&head=0&r0=0&r1=2&c0=0&c1=2"
    first = client.get(url)
    assert "immutable" in first.headers["cache-control"]
    again = client.get(url, headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = client.get(url.replace("head=0", "head=1"), headers={"If-None-Match": first.headers["etag"]})
    assert other.status_code == 200
    assert other.headers["etag"] != first.headers["etag"]


def test_the_look_not_asked_for_the_longest_goes_first(models: dict[str, Model]) -> None:
    with asking({"speaker": models["speaker"]}, Limits(kept_looks=2)) as client:
        first, second = opened(client, "speaker"), opened(client, "speaker")
        asked(client, first, "next")  # now the second is the older one
        third = opened(client, "speaker")
        assert "was dropped" in refusal(client.get(f"/api/looks/{second['id']}/next"), 404)
        assert asked(client, first, "next") == asked(client, third, "next")
        assert client.get(f"/api/looks/{third['id']}").json() == third


def test_looks_are_kept_by_their_bytes(models: dict[str, Model]) -> None:
    model = models["speaker"]
    look = regard.look(model, TEXT)
    n_tokens = len(look.rows())
    size = 2 * 4 * 24 * n_tokens * 2  # two layers of q and k in fp32; states and normalisers come on top
    with asking({"speaker": model}, Limits(kept_bytes=int(2.5 * size))) as client:
        first, second = opened(client, "speaker"), opened(client, "speaker")
        refusal(client.get(f"/api/looks/{first['id']}"), 404)
        assert client.get(f"/api/looks/{second['id']}").status_code == 200
        told = refusal(client.post("/api/looks", json={"model": "speaker", "text": "ROMEO: what light " * 10}), 413)
        assert "q and k of this text" in told
        assert client.get(f"/api/looks/{second['id']}").status_code == 200  # nothing was let go of for it


# ---- what is asked wrongly


@pytest.mark.parametrize(
    ("what", "query", "words"),
    [
        ("tile", {"layer": 2}, "layer=2: self attention has 2 layers, 0 … 1"),
        ("tile", {"head": 4}, "head=4: self attention has 4 heads, 0 … 3"),
        ("tile", {"head": "best"}, "head: string should match"),
        ("tile", {"kind": "cross"}, "kind='cross' is not one of this look's: self"),
        ("tile", {"r1": 5000}, "rows 0 … 5000 are not within"),
        ("tile", {"r0": 2, "r1": 2}, "rows 2 … 2 are not within"),
        ("tile", {"c0": -1}, "c0: input should be greater than or equal to 0"),
        ("pooled", {"h": 0, "w": 3}, "h: input should be greater than or equal to 1"),
        ("pooled", {"h": 3, "w": 513}, "w: input should be less than or equal to 512"),
        ("pooled", {"h": 3, "w": 3, "reduce": "sum"}, "reduce: input should be 'mean' or 'max'"),
        ("top", {"row": 700}, "row=700 is not within 0 …"),
        ("walk", {"row": 1, "col": 999}, "col=999 is not within 0 …"),
        ("walk", {"row": 1, "col": 1, "head": 9}, "head=9: self attention has 4 heads, 0 … 3"),
        ("next", {"temperature": "nan"}, "temperature: input should be a finite number"),
        ("next", {"temperature": "1e400"}, "temperature: input should be a finite number"),
        ("next", {"position": 500}, "position=500"),
        ("labels", {"axis": "rows", "start": 90}, "are not within"),
        ("labels", {"axis": "diagonal"}, "axis: input should be 'rows' or 'cols'"),
        ("patterns", {"kind": "cross"}, "kind='cross' is not one of this look's: self"),
        ("nothing", {}, "Not Found"),
    ],
)
def test_a_wrong_question_gets_one_sentence(client: TestClient, what: str, query: dict[str, Any], words: str) -> None:
    sent = opened(client, "speaker")
    usual = {"kind": "self", "layer": 0, "head": 0, "r0": 0, "r1": 3, "c0": 0, "c1": 3}
    answer = client.get(f"/api/looks/{sent['id']}/{what}", params={**usual, **query})
    assert words in refusal(answer, 404 if what == "nothing" else 422)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"model": "nobody", "text": "a"}, 404, "model 'nobody' is not served here; available: speaker, grouped"),
        ({"model": "speaker"}, 422, "text is empty"),
        ({"text": "a"}, 422, "model: field required"),
        ({"model": "speaker", "text": "ROMEO: " * 60}, 422, "at most max_len=96"),
        ({"model": "speaker", "text": "a", "target": "b"}, 422, "reads a text only"),
        ({"model": "speaker", "text": "a", "image": picture()}, 422, "reads text, not an image"),
        ({"model": "captioner", "text": "a"}, 422, "reads an image"),
        ({"model": "captioner", "image": "no base64!"}, 422, "image is not base64"),
        ({"model": "captioner", "image": "aGVsbG8="}, 422, "image is not one of PNG, JPEG"),
        ({"model": "captioner", "image": picture()[: 4 * 20]}, 422, "image cannot be read"),
        ({"model": "classifier", "text": "a", "generate": {}}, 422, "does not generate text"),
        ({"model": "translator", "text": "a", "target": "b", "generate": {}}, 422, "not both"),
        ({"model": "speaker", "text": "a", "generate": {"beam": 2, "temperature": 1}}, 422, "beam=2 searches"),
        ({"model": "speaker", "text": "a", "generate": {"beams": 2}}, 422, "generate.beams: extra inputs"),
        ({"model": "speaker", "text": "a", "variant": {"off": [["self", 9, 0]]}}, 422, "layer=9"),
        ({"model": "speaker", "text": "a", "variant": {"off": [["cross", 0, 0]]}}, 422, "kind='cross'"),
        ({"model": "classifier", "text": "a", "variant": {"causal": False}}, 422, "no causal mask"),
        ({"model": "recurrent", "text": "a", "variant": {"scale": 2}}, 422, "dot products"),
    ],
)
def test_a_look_that_cannot_be_gets_one_sentence(
    client: TestClient, body: dict[str, Any], status: int, words: str
) -> None:
    assert words in refusal(client.post("/api/looks", json=body), status)
