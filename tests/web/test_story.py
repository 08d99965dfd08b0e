"""The story in a browser: ten stages of a translator, a language model, a classifier and a captioner."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from generation.spoken import classifier, language_model
from regard.data.corpora import open_corpus
from regard.lens import Look, look
from regard.models import Model

from .browsing import EVERY_SENTENCE, Tab, as_percent, serving
from .conftest import TEXT
from .test_first_minutes import PHONE

STAGES = ["tokens", "vectors", "qkv", "scores", "softmax", "mix", "heads", "layer", "layers", "end"]


@pytest.fixture(scope="module")
def told(models: dict[str, Model]) -> dict[str, Model]:
    return {**models, "critic": classifier(), "sloping": language_model(positions="alibi")}


@pytest.fixture(scope="module")
def home(told: dict[str, Model]) -> Iterator[str]:
    with serving(told) as address:
        yield address


def said(tab: Tab, stage: str) -> list[str]:
    """What the drawing of a stage says."""
    return tab.page.eval_on_selector_all(
        f'[data-stage="{stage}"] svg text', "(all) => all.map((one) => one.textContent)"
    )


def test_the_story_of_a_translator(tab: Tab, seen: Look) -> None:
    row, head = 1, 2
    tab.open(model="en-ko", text=TEXT, kind="cross", layer=1, head=head, row=row)
    weights = seen.weights(layer=1, head=head, kind="cross")[row]

    def check() -> None:
        assert tab.page.eval_on_selector_all(".stages > li", "(all) => all.map((one) => one.dataset.stage)") == STAGES
        assert {label.text for label in seen.cols(kind="cross")} <= set(said(tab, "tokens"))
        shares = [text for text in said(tab, "softmax") if text.endswith("%")]
        assert shares == [as_percent(float(weight)) for weight in weights]
        values = said(tab, "mix")
        assert len(values) == min(4, int((weights > 0.005).sum())) + 2, "the largest, all others, their sum"
        assert values[-2] in ("+ all others", "+ 나머지 모두")
        best = seen.next(row, k=6)
        assert [text for text in said(tab, "end") if text.endswith("%")] == [as_percent(x.probability) for x in best]
        assert as_percent(best[0].probability) in tab.page.inner_text('[data-stage="end"] > p')

    tab.in_both_languages(("Story", "이야기"), check)
    boxes = tab.page.eval_on_selector_all(".map svg text", "(all) => all.map((one) => one.textContent)")
    assert {"크로스 어텐션", "마스크 어텐션", "원문", "다음 단어"} <= set(boxes), "encoder and decoder"
    table = tab.files()
    shown = {name: float(value) for stage, name, value in table[1:] if stage == "softmax"}
    assert shown == pytest.approx(
        {label.text: float(w) for label, w in zip(seen.cols(kind="cross"), weights, strict=True)}, abs=1e-6
    )


def test_a_bias_of_the_position_is_part_of_the_sum(tab: Tab) -> None:
    tab.open(model="sloping", text="the cat sat on the mat", view="story", layer=1, head=0, row=4)
    sums = [text for text in said(tab, "scores") if " = " in text]
    assert any(" − " in text for text in sums), "ALiBi lowers the scores of keys that are far away"
    for text in sums:
        left, right = text.replace(" − ", " + −").replace("−", "-").split(" = ")
        product, _, bias = left.partition(" + ")
        dot, factor = map(float, product.split(" × "))
        assert dot * factor + float(bias or 0) == pytest.approx(float(right), abs=0.03 + 0.005 * abs(dot))
    assert "divided by √d" not in tab.page.inner_text('[data-stage="scores"] > p')


def test_every_stage_opens_its_view_at_the_right_place(tab: Tab, seen: Look) -> None:
    weights = seen.weights(layer=1, head=2, kind="cross")[1]
    for stage, view in (
        ("tokens", "align"),
        ("scores", "walk"),
        ("softmax", "heatmap"),
        ("heads", "grid"),
        ("end", "next"),
    ):
        tab.open(model="en-ko", text=TEXT, view="story", kind="cross", layer=1, head=2, row=1)
        tab.page.click(f'[data-stage="{stage}"] .open')
        tab.settled()
        assert tab.page.get_attribute("nav [aria-selected=true]", "data-view") == view
        if view in ("walk", "heatmap"):
            where = [tab.state[name] for name in ("kind", "layer", "head", "row", "col")]
            assert where == ["cross", "1", "2", "1", str(int(weights.argmax()))]
    assert tab.state["position"] == "1"


def test_the_mean_of_heads_is_told_by_one_of_them(tab: Tab) -> None:
    for head, is_mean in ((-1, True), (0, False)):
        tab.open(model="speaker", text="the cat sat", view="story", head=head)
        words = tab.page.inner_text('[data-stage="qkv"] > p')
        assert words.startswith("Head 1 of layer")
        assert ("The mean of heads has no computation of its own: this is head 1." in words) == is_mean


def test_terms_are_explained_and_the_tour_can_be_paused(tab: Tab) -> None:
    tab.open(model="speaker", text="the cat sat")
    assert tab.page.locator(".terms details[open]").count() == 0
    tab.page.click('[data-stage="softmax"] summary')
    assert "add up to 1" in tab.page.inner_text('[data-stage="softmax"] details p')
    assert "chapter 2" in tab.page.inner_text('[data-stage="softmax"] details p a')
    tour = tab.page.locator('[data-do="tour"]')
    tour.click()
    assert tour.get_attribute("aria-pressed") == "true"
    tour.click()
    assert tour.get_attribute("aria-pressed") == "false"


@pytest.fixture
def scene(tmp_path: Path) -> Path:
    file = tmp_path / "scene.png"
    open_corpus("shapes").example("valid", 3).pillow().save(file)
    return file


@pytest.mark.parametrize("size", [{"width": 1440, "height": 900}, PHONE], ids=["wide", "phone"])
@pytest.mark.parametrize(
    ("model", "kind"), [("en-ko", "cross"), ("speaker", "self"), ("critic", "encoder"), ("shapes", "cross")]
)
def test_in_every_size_language_and_theme(
    tab: Tab, told: dict[str, Model], scene: Path, model: str, kind: str, size: dict[str, int]
) -> None:
    """The same shares as `regard.look` finds, and nothing wider than the screen."""
    tab.page.set_viewport_size(size)
    at = {"model": model, "view": "story", "kind": kind, "layer": 1, "head": 2, "row": 1}
    text = {"en-ko": TEXT}.get(model, "the cat sat on the mat")
    if model == "shapes":
        tab.show(scene, **at)
        found = look(told[model], scene)
    else:
        tab.open(text=text, **at)
        found = look(told[model], text)
    row = int(tab.page.input_value('select[data-axis="row"]'))  # a new image is followed where the model was least sure
    weights = found.weights(layer=1, head=2, kind=kind)[row]
    best = list(found.classes().values()) if model == "critic" else [x.probability for x in found.next(row, k=6)]
    for _ in tab.languages():  # English in one theme, Korean in the other
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        rows = [(stage, float(value)) for stage, _, value in tab.table()[1:]]
        shares = [value for stage, value in rows if stage == "softmax"]
        largest = weights.topk(min(len(shares), int((weights > 0).sum()))).values.tolist()
        assert sorted(shares)[::-1][: len(largest)] == pytest.approx(largest, abs=1e-5)
        assert [value for stage, value in rows if stage == "end"] == pytest.approx(best, abs=1e-5)
        assert [text for text in said(tab, "end") if text.endswith("%")] == [as_percent(share) for share in best]
        assert [stage for stage in STAGES if not said(tab, stage)] == []
        tab.page.click('[data-do="theme"]')
        tab.settled()
    tab.speak_korean()  # back to English
    assert ("every class" in tab.page.inner_text('[data-stage="end"] > p')) == (model == "critic")


def test_a_captioner_reads_patches(tab: Tab, models: dict[str, Model], scene: Path) -> None:
    tab.show(scene, model="shapes", view="story")
    found = look(models["shapes"], scene)
    assert "patches" in tab.page.inner_text('[data-stage="tokens"] h3')
    n_patches = sum(label.box is not None for label in found.cols(kind="cross"))  # without the class token
    assert f"{n_patches} patches" in tab.page.inner_text('[data-stage="tokens"] > p')
    for stage in ("tokens", "softmax"):  # the image itself, cut into its patches
        tab.page.wait_for_selector(f'[data-stage="{stage}"] svg image')
    assert not [text for text in said(tab, "tokens") if text.startswith("patch")]
    row = int(tab.page.input_value('select[data-axis="row"]'))
    assert as_percent(found.next(row, k=1)[0].probability) in said(tab, "end")


def test_every_term_leads_to_its_chapter(tab: Tab) -> None:
    """In every view and both languages an ⓘ opens a sentence and a link, and behind the link is the chapter."""
    tab.open(model="en-ko", text=TEXT, beam=2)
    words, chapters = set(), set()
    for language in tab.languages():
        for view in tab.tabs():
            tab.to(view)
            found = tab.page.eval_on_selector_all(
                "details[data-term]", "(all) => all.map((one) => [one.dataset.term, one.querySelector('a')?.href])"
            )
            assert found, view
            assert all(f"/learn/{language}/" in address for _, address in found)
            words |= {word for word, _ in found}
            chapters |= {address for _, address in found}
    assert words == {
        key[5:-6] for key, _ in tab.page.evaluate(EVERY_SENTENCE) if re.fullmatch(r"term\.\w+\.about", key)
    }
    tab.page.click(".terms summary >> nth=0")
    with tab.page.expect_popup() as opened:
        tab.page.click(".terms details[open] a")
    page = opened.value
    page.wait_for_load_state()
    assert page.eval_on_selector("html", "(one) => one.lang") == "ko"
    assert page.locator("article h1").count() == 1
    page.close()
    for address in chapters:
        answer = tab.page.request.get(address)
        number = urlsplit(address).path.rpartition("/")[2]
        assert answer.status == 200
        assert f"<h1>{number} · " in answer.text()
