"""The first minutes of somebody who has just trained a model: what opens, what it says, what can be done at once."""

from __future__ import annotations

import ast
import base64
import io
import math
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import regard
from generation.spoken import LINES, classifier, language_model, translator
from regard.data.corpora import open_corpus
from regard.lens import Look, interventions, look
from regard.lens.compare import compare_predictions
from regard.lens.effects import target_tokens, text_losses
from regard.models import Model
from regard.web.run_examples import RunExamples
from regard.web.served_models import ServedModel

from .browsing import Tab, as_percent, padded, serving
from .conftest import TEXT

SCREEN = {"width": 1440, "height": 900}
TAGS = ("[formal]", "[plain]")
REVIEWS = ("the cat sat on the mat", "the dog ran")


def scene(n: int) -> str:
    out = io.BytesIO()
    open_corpus("shapes").example("valid", n).pillow().save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


@pytest.fixture(scope="module")
def critic() -> Model:
    return classifier()


@pytest.fixture(scope="module")
def writer() -> Model:
    """A language model that has learned a few lines by heart."""
    model = language_model()
    tokenizer = model.processor.source
    rows = padded([[*tokenizer.encode(line), model.config.eos_id] for line in LINES])
    optimiser = torch.optim.Adam(model.parameters(), lr=6e-3)
    for _ in range(80):
        logits = model(rows[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), ignore_index=0)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model


@pytest.fixture(scope="module")
def home(models: dict[str, Model], critic: Model, writer: Model) -> Iterator[str]:
    """The models with what their runs would bring along."""
    translated = (TEXT, "[formal] Did the tiger shine?")
    with serving(
        [
            ServedModel("demo", "demo", models["en-ko"], lambda: RunExamples(translated, TAGS)),
            ServedModel("critic", "critic", critic, lambda: RunExamples(REVIEWS)),
            ServedModel("images", "images", models["images"], lambda: RunExamples((scene(1), scene(2)))),
            ServedModel("speaker", "speaker", models["speaker"]),
            ServedModel("writer", "writer", writer),
            ServedModel("gru", "gru", translator("bahdanau-gru")),
            ServedModel("mamba", "mamba", language_model(mixer="mamba")),
        ]
    ) as address:
        yield address


# ---- what is offered


def test_examples_of_the_run_are_a_click_away(tab: Tab) -> None:
    tab.open(model="demo")
    assert tab.page.input_value('textarea[name="text"]') == TEXT
    tab.page.click('[data-example="1"]')
    tab.settled()
    assert tab.state["text"] == tab.page.input_value('textarea[name="text"]') == "[formal] Did the tiger shine?"


def test_examples_of_images_are_thumbnails(tab: Tab) -> None:
    tab.open(model="images")
    first = tab.page.get_attribute(".picture img", "src")
    tab.page.click('[data-example="1"]')
    tab.settled()
    assert tab.page.get_attribute(".picture img", "src") == f"data:image/png;base64,{scene(2)}" != first


def test_the_tag_of_a_sentence_is_picked(tab: Tab) -> None:
    tab.open(model="demo", text=TEXT)
    chosen = ".tags [aria-checked=true]"
    assert tab.page.inner_text(chosen) == "[formal]"
    tab.page.click('.tags [data-value="[plain]"]')
    tab.settled()
    assert tab.state["text"] == TEXT.replace("[formal]", "[plain]")
    assert tab.page.inner_text(chosen) == "[plain]"
    tab.page.fill('textarea[name="text"]', "Did the ring shine?")
    assert tab.page.locator(chosen).count() == 0


def test_what_the_model_did_not_learn_is_marked(tab: Tab) -> None:
    tab.open(model="demo", text=TEXT)
    assert tab.page.locator(".outside").count() == 0
    tab.open(model="demo", text="Did the ring shine?")
    assert tab.page.inner_text(".outside").startswith("This input is unlike the model's training data.")
    assert "start with a tag" in tab.page.inner_text(".outside")
    tab.open(model="demo", text="[formal] Did the zeppelin shine?")
    assert "Words it has hardly ever seen: zeppelin." in tab.page.inner_text(".outside")
    tab.speak_korean()
    assert "거의 본 적이 없는" in tab.page.inner_text(".outside")
    tab.open(model="speaker", text="zeppelin")  # nothing is known of what it learned from
    assert tab.page.locator(".outside").count() == 0


# ---- what opens


def test_it_opens_on_the_story_where_the_model_was_least_sure(tab: Tab, seen: Look) -> None:
    tab.open(model="demo", text=TEXT)
    assert tab.page.inner_text("nav [aria-selected=true]") == "Story"
    assert tab.page.input_value('select[data-axis="row"]') == str(int(seen.uncertainty().argmax()))
    tab.to("align")
    unsure = int(seen.uncertainty().argmax())
    weights = seen.weights(kind="cross")[unsure]
    assert tab.page.inner_text("aside .who") == seen.rows(kind="cross")[unsure].text
    assert tab.weight(unsure, int(weights.argmax())) == pytest.approx(float(weights.max()), abs=1e-5)
    assert "least sure" in tab.page.inner_text("aside")
    assert tab.page.inner_text("aside .next").startswith("PREDICTED HERE"), "the row is called after what it writes"
    for one in seen.next(unsure, k=3):
        assert as_percent(one.probability) in tab.page.inner_text("aside .next")
    faint, strong = (tab.page.locator(f'.stage svg path[opacity^="{start}"]').count() for start in ("0.0", "0."))
    assert 0 < faint < strong  # the lines of the other tokens are still there


def test_models_without_layers_open_on_what_tells_most(tab: Tab) -> None:
    views = {"speaker": "story", "critic": "story", "images": "story", "gru": "align", "mamba": "sentence"}
    for model, view in views.items():
        tab.open(model=model)
        assert tab.page.get_attribute("nav [aria-selected=true]", "data-view") == view


@pytest.mark.parametrize("model", ["demo", "critic", "images", "speaker"])
def test_the_first_map_is_on_the_first_screen(tab: Tab, model: str) -> None:
    tab.page.set_viewport_size(SCREEN)
    tab.open(model=model)
    for _ in tab.languages():
        assert tab.page.locator(".stages li").first.bounding_box()["y"] < 500
    tab.page.click('nav [data-view="heatmap"]')
    tab.settled()
    for _ in tab.languages():
        matrix = tab.page.locator(".stage .sheet").bounding_box()
        assert matrix["y"] + matrix["height"] <= 900


def test_every_tab_is_in_sight(tab: Tab) -> None:
    tab.page.set_viewport_size(SCREEN)
    tab.open(model="demo", text=TEXT, beam=2)
    for _ in tab.languages():
        assert tab.page.eval_on_selector("nav", "(nav) => nav.scrollWidth <= nav.clientWidth && nav.offsetHeight < 60")


def test_layers_and_heads_count_from_1(tab: Tab) -> None:
    tab.open(model="demo", text=TEXT, view="heatmap", kind="cross", layer=1, head=0)
    assert [each.inner_text() for each in tab.page.query_selector_all(".stepper output")] == ["2 / 2", "1 / 4"]
    tab.page.click('nav [data-view="patterns"]')
    tab.settled()
    texts = tab.texts()
    assert {"Head 1", "Head 4", "1", "2"} <= set(texts)
    assert not {"Head 0", "0"} & set(texts)


# ---- what the model says


def test_a_classifier_says_its_class(tab: Tab, critic: Model, models: dict[str, Model]) -> None:
    exact = regard.classify(critic, REVIEWS[0])[0].all
    tab.open(model="critic")
    for view in tab.tabs():
        tab.to(view)
        said = [each.inner_text().split("\n") for each in tab.page.query_selector_all(".classes li")]
        assert said == [[name, as_percent(chance)] for name, chance in exact.items()]
    tab.open(model="images")
    assert tab.page.locator(".classes li").count() == models["images"].config.n_classes


def test_what_does_not_apply_is_hidden(tab: Tab, critic: Model) -> None:
    tab.open(model="critic", view="variant", off="encoder.0.1")
    assert tab.page.locator('input[name="causal"], .written section, .forced').count() == 0
    assert "writes" not in tab.page.inner_text(".stage")
    with interventions.switch_off(critic, [("encoder", 0, 1)]):
        changed = look(critic, REVIEWS[0]).classes()
    before = look(critic, REVIEWS[0]).classes()
    happened = tab.page.inner_text(".happened")
    assert {next(iter(before)), next(iter(changed))} <= set(re.findall("“(.+?)”", happened))
    assert as_percent(changed[next(iter(before))]) in happened
    for chances in (before, changed):
        assert {as_percent(chance) for chance in chances.values()} <= set(tab.texts())
    tab.open(model="demo", view="variant")
    assert tab.page.locator('input[name="causal"]').count() == 1


def test_the_tail_of_the_next_tokens_is_collapsed(tab: Tab, seen: Look) -> None:
    tab.open(model="demo", text=TEXT, view="next")
    assert tab.page.input_value('select[aria-label="After"]') == str(int(seen.uncertainty().argmax()))
    sure = int(seen.uncertainty().argmin())
    tab.open(model="demo", text=TEXT, view="next", position=sure)
    likely = [one for one in seen.next(sure, k=16) if one.probability >= 0.01]
    shown = [text for text in tab.texts() if text.endswith("%")]
    assert shown == [as_percent(one.probability) for one in seen.next(sure, k=max(3, len(likely)))]
    tab.page.click('[data-do="tail"]')
    tab.settled()
    assert len([text for text in tab.texts() if text.endswith("%")]) == 16
    tab.open(model="demo", text=TEXT, view="next", position=sure, temperature=3)
    shares = [*tab.texts(), tab.page.inner_text('[data-do="tail"]').partition(":")[0]]
    assert sum(float(text[:-1].split()[-1]) for text in shares if text.endswith("%")) == pytest.approx(100, abs=1)


# ---- what if


def test_what_if_shows_where_the_change_is_largest(tab: Tab, models: dict[str, Model], seen: Look) -> None:
    every = [("cross", layer, head) for layer in range(2) for head in range(4)]
    tab.open(model="demo", text=TEXT, view="variant", off=" ".join(f"cross.{n}.{h}" for _, n, h in every))
    with interventions.switch_off(models["en-ko"], every):
        changed, written = look(models["en-ko"], TEXT, seen.target_text), look(models["en-ko"], TEXT).target_text
    changes = compare_predictions(seen, changed)
    assert "the text is not written again" in tab.page.inner_text(".forced")
    assert tab.page.input_value('select[aria-label="After"]') == str(int(changes.argmax()))
    assert as_percent(float(changes.max())) in tab.page.inner_text(".stage")
    for found in (seen, changed):
        assert as_percent(found.next(int(changes.argmax()), k=1)[0].probability) in tab.texts()
    before, after = (tab.page.inner_text(f'[data-side="{side}"] .new').strip() for side in ("before", "after"))
    assert (before, after) == (seen.target_text, written or "∅")
    assert before != after
    assert "cannot see the source" in tab.page.inner_text(".happened")
    assert [mark.inner_text().strip() for mark in tab.page.query_selector_all(".written mark")]
    tab.page.click('[data-do="reset"]')
    tab.settled()
    assert tab.page.inner_text('[data-side="after"] .new').strip() == before


def test_without_the_causal_mask_a_language_model_writes_something_else(tab: Tab, writer: Model) -> None:
    model, text = writer, "a dog ran, and"
    tab.open(model="writer", text=text, view="variant", causal=0)
    options = {"max_new_tokens": 24}
    plain = look(model, text, generate=options)
    with interventions.no_causal_mask(model):
        changed, forced = look(model, text, generate=options), look(model, text)
    for side, found in (("before", plain), ("after", changed)):
        shown = tab.page.inner_text(f'[data-side="{side}"] .new')
        assert " ".join(shown.split()) == " ".join(str(found.text)[len(text) :].split())
    tokens = [token for token in look(model, text).tokens() if token is not None][1:]
    right = [(found.logits()[:-1].argmax(-1).tolist(), tokens) for found in (look(model, text), forced)]
    a, b = (sum(x == y for x, y in zip(*each, strict=True)) for each in right)
    happened = tab.page.inner_text(".happened")
    assert "sees the tokens after it" in happened
    assert f"predicted {a} of the first text's {len(tokens)} tokens; now {b}." in happened
    assert b < a == len(tokens), "it knew the line by heart"
    assert str(plain.text).startswith("a dog ran, and the cat ran too.")
    assert not str(changed.text).startswith(str(plain.text))
    assert tab.page.locator('[data-side="after"] mark').count() > 0
    rows = [label.text for label in look(model, text).rows()]
    above = dict.fromkeys(("before", "after"), 0.0)  # the weight that goes to tokens that come later
    for n, (_, _, before, after) in enumerate(tab.table()[1:]):
        if n % len(rows) > n // len(rows):
            above["before"] += float(before)
            above["after"] += float(after)
    assert above["before"] == 0
    assert above["after"] > 1


def test_the_head_that_matters_is_found_among_all(tab: Tab, models: dict[str, Model], seen: Look) -> None:
    tab.open(model="demo", text=TEXT, view="variant")
    tab.page.click('[data-do="find"]')
    tab.page.wait_for_selector('[data-do="worst"]')
    assert "Of 24 heads" in tab.page.inner_text(".matters")
    tab.page.click('[data-do="worst"]')
    tab.settled()
    kind, layer, head = tab.state["off"].split(".")
    tokens = [token for _, token in target_tokens(seen)]

    def chance(off: tuple[str, int, int]) -> float:
        with interventions.switch_off(models["en-ko"], [off]):
            losses = text_losses(look(models["en-ko"], TEXT, seen.target_text), tokens)
        return math.exp(-sum(losses) / len(losses))

    worst = chance((kind, int(layer), int(head)))
    assert as_percent(worst) in tab.page.inner_text(".matters")
    assert all(chance((kind, int(layer), other)) >= worst for other in range(4))
    tab.page.uncheck('input[name="root"]')
    tab.settled()
    assert float(tab.state["scale"]) == pytest.approx(models["en-ko"].config.d_model ** 0.5 / 2)


def test_maps_of_what_if_have_names(tab: Tab, seen: Look) -> None:
    tab.open(model="demo", text=TEXT, view="variant", kind="cross")
    texts = tab.texts()
    for label in (*seen.rows(kind="cross"), *seen.cols(kind="cross")):
        assert texts.count(label.text) >= 2, label.text


def test_heads_are_switched_by_keyboard(tab: Tab) -> None:
    tab.open(model="demo", text=TEXT, view="variant", kind="cross")
    head = tab.page.locator('.switches [data-heads="cross.1.2"]')
    assert (head.get_attribute("aria-pressed"), head.get_attribute("aria-label")) == ("false", "layer 2, head 3")
    head.focus()
    tab.page.keyboard.press("Enter")
    tab.settled()
    assert tab.state["off"] == "cross.1.2"
    assert tab.page.evaluate("() => document.activeElement.getAttribute('aria-pressed')") == "true"
    tab.page.keyboard.press("Space")
    tab.settled()
    assert "off" not in tab.state
    tab.page.get_by_role("button", name="all heads of layer 1").click()
    tab.settled()
    assert tab.state["off"] == "cross.0.0 cross.0.1 cross.0.2 cross.0.3"


def test_patches_are_chosen_on_the_picture(tab: Tab, models: dict[str, Model]) -> None:
    tab.open(model="images", view="image")
    assert [each.inner_text() for each in tab.page.query_selector_all(".chips button")] == ["[class]"]
    box = tab.box()
    side = min(box["width"], 520)
    tab.click(side * 0.1, side * 0.1)
    first = next(
        n
        for n, label in enumerate(look(models["images"], open_corpus("shapes").example("valid", 1).pillow()).rows())
        if label.box
    )
    assert tab.state["row"] == str(first)


# ---- in Korean


def test_korean_words_are_not_broken(tab: Tab) -> None:
    tab.open(model="demo", view="align", lang="ko")
    for selector in (".caption", "aside", ".offers"):
        style = tab.page.evaluate(f"() => getComputedStyle(document.querySelector('{selector}')).wordBreak")
        assert style == "keep-all", selector


def test_what_the_server_refuses_is_said_in_korean(tab: Tab) -> None:
    tab.open(model="speaker", text="the cat", lang="ko")
    tab.page.fill('textarea[name="text"]', "the cat sat " * 30_000)
    tab.page.click(".primary")
    tab.page.wait_for_function("() => document.querySelector('.message')?.textContent.length > 10")
    assert tab.page.inner_text(".message") == "문장은 200000자까지 넣을 수 있습니다."
    assert len(tab.complained(2)) == 2  # the browser's own line about the status, and ours


def refusals() -> Iterator[str]:
    """Every sentence that web/ refuses a request with, something in place of its values."""
    for file in Path(regard.__file__).with_name("web").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "RequestRefused"):
                continue
            said = node.args[1]
            if isinstance(said, ast.Constant):
                yield said.value
            elif isinstance(said, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "x7" for part in said.values)


def test_every_refusal_has_a_korean_sentence(tab: Tab) -> None:
    tab.open(model="speaker", text="the cat")
    sentences = list(refusals())
    assert len(sentences) > 30
    in_korean = tab.page.evaluate(
        "async (all) => { const { serverError } = await import('/static/server_errors.js');"
        " return all.map((one) => [serverError(one, 'en'), serverError(one, 'ko')]); }",
        sentences,
    )
    for sentence, (english, korean) in zip(sentences, in_korean, strict=True):
        assert english == sentence
        assert re.search("[가-힣]", korean)
        assert sentence not in korean, sentence
        assert "{" not in korean


def test_every_korean_sentence_is_of_one_that_is_still_said() -> None:
    """By its longest part between two values; the one about a string that is too long comes from pydantic."""
    package = Path(regard.__file__).parent
    known = re.findall(r'^  "([^"]*)":', (package / "web/static/server_errors.js").read_text("utf-8"), re.MULTILINE)
    assert len(known) > 50
    code = re.sub(r'"\s*\n\s*f?"', "", "".join(file.read_text("utf-8") for file in package.rglob("*.py")))
    parts = [max(re.split(r"\{\w+\}", sentence), key=len) for sentence in known]
    assert [part for part in parts if part not in code] == [": string should have at most "]


PHONE = {"width": 390, "height": 844}


def test_names_beside_a_heat_map_do_not_touch_on_a_phone(tab: Tab) -> None:
    tab.page.set_viewport_size(PHONE)
    tab.open(model="demo", view="heatmap", kind="encoder", text=f"{TEXT} {TEXT}", lang="ko")
    right = r'translate\(([\d.]+) ([\d.]+)\)" dy=".35em" font-size="([\d.]+)" font-weight="\d+" text-anchor="end"'
    names = re.findall(right, svg_of(tab))
    assert len(names) > 5
    places = [(float(y), float(size)) for _, y, size in names[:-1]]  # the last one is the legend's
    for (y, size), (below, _) in pairwise(places):
        assert below - y >= size, "neighbours overlap"
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_names_above_a_heat_map_do_not_touch_either(tab: Tab) -> None:
    slanted = r'translate\(([\d.]+) [\d.]+\) rotate\(-([\d.]+)\)" dy=".35em" font-size="([\d.]+)"'
    for text in (TEXT, f"{TEXT} {TEXT}", f"{TEXT} {TEXT} {TEXT}"):
        tab.page.set_viewport_size(PHONE)
        tab.open(model="demo", view="heatmap", kind="encoder", text=text)
        names = [tuple(map(float, found)) for found in re.findall(slanted, svg_of(tab))]
        for (x, turn, size), (right, _, _) in pairwise(names):
            assert (right - x) * math.sin(math.radians(turn)) >= size, "neighbours overlap"


def svg_of(tab: Tab) -> str:
    return tab.exported("svg").decode()


def test_patches_are_counted_from_1_and_named_in_the_language(tab: Tab) -> None:
    tab.open(model="images", view="heatmap")
    for name in ("patch", "패치"):
        said = svg_of(tab)
        assert f">{name} 1,1<" in said
        assert f">{name} 0," not in said
        assert "patch 0,0" in tab.table()[0], "files count from 0, in every language"
        tab.speak_korean()


def test_an_image_is_chosen_in_the_language_of_the_page(tab: Tab) -> None:
    tab.open(model="images", lang="ko")
    assert tab.page.inner_text(".pick") == "이미지 고르기…"
    tab.page.focus('input[name="image"]')
    with tab.page.expect_file_chooser():
        tab.page.click(".pick")
