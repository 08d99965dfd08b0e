"""What a page must survive beside its views: links, phones, one token, long texts, other scripts, and mistakes."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.data.corpora import open_corpus
from regard.lens import Look, look
from regard.models import Model
from regard.web.run_examples import RunExamples
from regard.web.served_models import ServedModel

from .browsing import EVERY_SENTENCE, Tab, serving
from .conftest import TEXT
from .test_views import CLOSE


def test_a_link_brings_the_same_picture_back(tab: Tab, seen: Look) -> None:
    tab.open(model="en-ko", text=TEXT, view="heatmap", kind="encoder", layer=0, head=0)
    tab.page.keyboard.press("ArrowRight")
    tab.page.keyboard.press("ArrowDown")
    tab.page.keyboard.press("3")
    tab.settled()
    assert (tab.state["head"], tab.state["layer"], tab.state["view"]) == ("1", "1", "sentence")
    tab.page.keyboard.press("/")
    tab.page.keyboard.type("ring")
    tab.page.wait_for_function("() => location.hash.includes('find=ring')")
    tab.page.keyboard.press("Escape")
    address = tab.page.url
    tab.page.goto("about:blank")
    tab.page.goto(address)
    tab.page.wait_for_selector("nav button[aria-selected=true]")
    tab.settled()
    assert tab.page.input_value(".find") == "ring"
    tab.page.evaluate("() => { location.hash = location.hash.replace('ring', 'tiger').replace('find=tiger', ''); }")
    tab.page.wait_for_function("() => document.querySelector('textarea')?.value.includes('tiger')")
    tab.settled()
    assert (tab.state["head"], tab.state["layer"]) == ("1", "1")
    assert tab.page.inner_text(".stepper >> nth=1 >> output") == "2 / 4"
    tab.page.keyboard.press("?")
    assert tab.page.is_visible("dialog")
    tab.page.keyboard.press("Escape")
    assert tab.tabs() == [
        *(
            "story",
            "align",
            "sentence",
            "heatmap",
            "grid",
            "walk",
            "next",
            "contributions",
            "why",
            "patching",
            "patterns",
        ),
        "variant",
    ]


@pytest.fixture
def scene(tmp_path: Path) -> Path:
    file = tmp_path / "scene.png"
    open_corpus("shapes").example("valid", 3).pillow().save(file)
    return file


@pytest.mark.slow
@pytest.mark.parametrize(("theme", "lang"), [("light", "en"), ("dark", "ko")])
def test_phone_width(tab: Tab, scene: Path, theme: str, lang: str) -> None:
    """Nothing sticks out at the side, in any of the views."""
    tab.page.set_viewport_size({"width": 360, "height": 740})
    views: set[str] = set()
    for model in ("en-ko", "shapes"):
        if model == "shapes":
            tab.show(scene, model=model, theme=theme, lang=lang)
        else:
            tab.open(model=model, text=TEXT, beam=2, theme=theme, lang=lang)
        for view in tab.tabs():
            tab.to(view)
            assert tab.page.evaluate("() => document.documentElement.scrollWidth") <= 360, view
        views |= set(tab.tabs())
    assert len(views) == 14


@pytest.mark.slow
def test_one_token(tab: Tab, models: dict[str, Model]) -> None:
    tab.open(model="speaker", text="t", view="sentence", row=0, col=0)
    assert len(look(models["speaker"], "t").rows()) == 1
    assert tab.weight(0, 0) == 1
    tab.every_view()
    tab.open(model="en-ko", text="ring", target="반지", beam=2)
    assert len(tab.every_view()) == 12
    tab.open(model="en-ko", text="ring", beam=2)
    assert "beams" in tab.every_view()


WRITINGS = [("שלום עולם", "en"), ("مرحبا بالعالم", "ko"), ("👩‍👩‍👧 and 🐈 sat", "en"), ("고양이가 앉았다", "ko")]


@pytest.mark.slow
@pytest.mark.parametrize(("text", "lang"), WRITINGS)
def test_writing_of_other_kinds(tab: Tab, models: dict[str, Model], scene: Path, text: str, lang: str) -> None:
    """Each in all views: those that only another model has are seen with that model, and its words merged."""
    found = look(models["speaker"], text)
    written = look(models["speaker"], text, generate={"beam": 2, "n_best": 2, "max_new_tokens": 16})
    tab.open(model="speaker", text=text, view="sentence", layer=1, head=1, row=2, col=1, beam=2, lang=lang)
    assert tab.weight(2, 1) == pytest.approx(float(written.weights(layer=1, head=1)[2, 1]), **CLOSE)
    assert tab.page.inner_text("aside .who").strip() == found.rows()[2].text.strip()
    views = set(tab.every_view())
    tab.open(model="en-ko", text=text, target=text, words=1, lang=lang)
    views |= set(tab.every_view("align", "sentence", "heatmap"))
    tab.show(scene, model="shapes", target=text, lang=lang)
    views |= set(tab.every_view("image", "grid"))
    assert len(views) == 14


def test_a_long_text_is_an_overview_until_zoomed_into(tab: Tab, models: dict[str, Model]) -> None:
    text = "the cat sat on the mat. " * 300
    found = look(models["speaker"], text)
    n = len(found.rows())
    assert n > 1500
    tab.open(model="speaker", text=text, view="heatmap", layer=1, head=0, lang="en")
    assert tab.page.inner_text(".caption").startswith("Each cell is the mean of")
    box = tab.box()
    tab.over(60, box["height"] * 0.6)
    shown, about = tab.tip()
    r0, r1, c0, c1 = (int(x.replace("\u202f", "")) for x in re.findall(r"[\d\u202f]+", about[0]))
    block = found.weights(layer=1, head=0, rows=slice(r0 - 1, r1), cols=slice(c0 - 1, c1))
    assert shown == pytest.approx(float(block.mean()), **CLOSE)
    zoomed = {"zoom": "1000,1020,980,1000", "row": 1010, "col": 990}
    tab.open(model="speaker", text=text, view="heatmap", layer=1, head=0, **zoomed)
    assert tab.weight(1010, 990) == pytest.approx(
        float(found.weights(layer=1, head=0, rows=[1010], cols=[990])), **CLOSE
    )
    for view in ("sentence", "grid", "patterns"):
        tab.page.click(f'nav [data-view="{view}"]')
        tab.settled()
        assert tab.page.inner_text(".message") == ""


def test_a_model_with_an_example_opens_with_it(browser: Any, models: dict[str, Model], scene: Path) -> None:
    """Nobody has to look for an image before there is something to see."""
    picture = base64.b64encode(scene.read_bytes()).decode()
    text = "[formal] Did the tiger shine?"
    served = [
        ServedModel("shapes", "shapes", models["shapes"], lambda: RunExamples((picture,))),
        ServedModel("en-ko", "en-ko", models["en-ko"], lambda: RunExamples((text,))),
    ]
    with serving(served) as home:
        page = browser.new_page()
        tab = Tab(page, home).open(model="shapes", view="image", kind="cross", layer=0, row=0)
        exact = look(models["shapes"], scene).weights(layer=0, head=None, kind="cross")[0]
        assert tab.weight(0, int(exact.argmax())) == pytest.approx(float(exact.max()), **CLOSE)
        assert page.is_visible(".picture img")
        page.select_option("header select", "en-ko")
        page.wait_for_selector('nav [data-view="align"]')
        tab.settled()
        assert page.input_value('textarea[name="text"]') == text
        assert tab.complaints == []
        page.close()


def test_what_is_wrong_is_one_sentence(tab: Tab) -> None:
    tab.open(model="speaker", text="the cat")
    tab.page.fill('textarea[name="text"]', "the cat sat " * 30_000)
    tab.page.click(".primary")
    tab.page.wait_for_function("() => document.querySelector('.message')?.textContent.length > 10")
    assert "characters" in tab.page.inner_text(".message")
    assert len(tab.complained(2)) == 2  # the browser's own line about the status, and ours


def test_every_sentence_in_both_languages(tab: Tab) -> None:
    tab.open(model="speaker", text="the cat")
    sentences = tab.page.evaluate(EVERY_SENTENCE)
    assert len(sentences) > 100
    for key, words in sentences:
        assert len(words) == 2, key
        assert all(words), key
        named = [sorted(re.findall(r"\{\w+\}", word)) for word in words]
        assert named[0] == named[1], key


# ---- words, and special tokens


def test_words_and_special_tokens_in_the_heat_map(tab: Tab, models: dict[str, Model]) -> None:
    text = "JULIET: wherefore art thou breaking windows?"
    found = look(models["speaker"], text)
    view = found.merged(kind="self", words=True, specials=True)
    assert len(view.rows) < len(found.rows())
    tab.open(model="speaker", text=text, view="heatmap", layer=1, head=2)
    tab.page.check('input[name="words"]')
    tab.settled()
    assert tab.state["words"] == "1"
    table = tab.table()
    assert [line[0] for line in table[1:]] == [label.text for label in view.rows]
    shown = torch.tensor([[float(x) for x in line[1:]] for line in table[1:]])
    assert torch.allclose(shown, view.weights(layer=1, head=2), atol=1e-6)
    for language in ("en", "ko"):
        tab.open(model="speaker", text=text, view="heatmap", layer=1, head=2, words=1, row=3, col=1, lang=language)
        assert tab.weight(3, 1) == pytest.approx(float(view.weights(layer=1, head=2)[3, 1]), **CLOSE)
        assert tab.page.inner_text("aside .who") == view.rows[3].text
    tab.page.click('nav [data-view="walk"]')  # words have no q and k of their own: nothing stays held
    tab.settled()
    assert "row" not in tab.state


@pytest.mark.parametrize("kind", ["cross", "encoder"])
def test_hidden_special_tokens_in_the_sentence(tab: Tab, seen: Look, kind: str) -> None:
    view = seen.merged(kind=kind, words=True, specials=False)
    exact = view.weights(layer=1, head=3)
    assert torch.allclose(exact.sum(1), torch.ones(len(exact)), atol=1e-5)
    assert len(view.cols) < len(seen.cols(kind=kind))
    tab.open(model="en-ko", text=TEXT, view="sentence", kind=kind, layer=1, head=3)
    tab.page.check('input[name="words"]')
    tab.settled()
    tab.page.uncheck('input[name="specials"]')
    tab.settled()
    tab.click(40, 8 + 30 * 1.5)
    assert (tab.state["words"], tab.state["specials"], tab.state["row"]) == ("1", "0", "1")
    best = exact[1].topk(3)
    for index, weight in zip(best.indices.tolist(), best.values.tolist(), strict=True):
        assert tab.weight(1, index) == pytest.approx(weight, **CLOSE)
    tab.over(tab.box()["width"] * 0.75, 8 + 30 * 2.5)
    assert tab.tip()[0] == pytest.approx(float(exact[1, 2]), **CLOSE)
    shown = torch.tensor([[float(x) for x in line[1:]] for line in tab.files()[1:]])
    assert torch.allclose(shown, exact, atol=1e-6)
    address = tab.page.url
    tab.page.goto("about:blank")
    tab.page.goto(address)
    tab.page.wait_for_selector(f'aside [data-weight="1,{int(best.indices[0])}"]')
    tab.settled()
    if kind == "cross":
        tab.every_view()


def test_a_saved_page_holds_the_words_that_are_shown(
    tab: Tab, browser: Any, models: dict[str, Model], tmp_path: Path
) -> None:
    text = "JULIET: wherefore art thou breaking windows?"
    view = look(models["speaker"], text).merged(kind="self", words=True, specials=False)
    tab.open(model="speaker", text=text, view="heatmap", layer=1, head=2, words=1, specials=0, row=2, col=0)
    file = tmp_path / "words.html"
    file.write_bytes(tab.exported("html"))
    page = browser.new_page(offline=True)
    here = Tab(page, "")
    page.goto(file.as_uri())
    page.wait_for_selector('aside [data-weight="2,0"]')
    assert here.weight(2, 0) == pytest.approx(float(view.weights(layer=1, head=2)[2, 0]), **CLOSE)
    assert [line[0] for line in here.table()[1:]] == [label.text for label in view.rows]
    assert here.every_view() == ["sentence", "heatmap", "grid", "patterns"]
    assert here.complaints == []
    page.close()
