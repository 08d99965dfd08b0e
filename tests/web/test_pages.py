"""The explorer in a browser: numbers on the screen are those ``look`` gives in Python, in both languages.

A complaint in the browser's console fails a test, and so does an answer of 4xx or 5xx that was not asked for.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.lens import Look, look
from regard.models import Model

pytest.importorskip("uvicorn", reason="the explorer needs the extra `serve`")
playwright = pytest.importorskip(
    "playwright.sync_api", reason="pages are tested with playwright: pip install playwright"
)

from web.browsing import ARGUMENTS, CHROMIUM, Tab, as_number, serving, small_models  # noqa: E402

pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no {CHROMIUM}: apt-get install chromium")
TEXT = "[formal] Did the ring shine?"
CLOSE = {"abs": 2e-6, "rel": 2e-4}  # six decimals, or four digits of what is smaller


LISTEN = """() => {
  window.said = [];
  new MutationObserver(() => window.said.push(document.querySelector(".live")?.textContent))
    .observe(document.querySelector(".stage"), { subtree: true, childList: true, characterData: true });
}"""


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    return small_models()


@pytest.fixture(scope="module")
def home(models: dict[str, Model]) -> Iterator[str]:
    with serving(models) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as engine:
        opened = engine.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture
def tab(browser: Any, home: str) -> Iterator[Tab]:
    page = browser.new_page(viewport={"width": 1180, "height": 900}, locale="en-US", accept_downloads=True)
    page.set_default_timeout(60_000)  # machines are busy at times
    here = Tab(page, home)
    yield here
    page.close()
    assert here.complaints == []


@pytest.fixture(scope="module")
def seen(models: dict[str, Model]) -> Look:
    return look(models["en-ko"], TEXT)


def in_both_languages(tab: Tab, name: tuple[str, str], check: Callable[[], None]) -> None:
    """The same numbers under English and under Korean names."""
    for language in name:
        if language != name[0]:
            tab.speak_korean()
        assert tab.page.inner_text("nav button[aria-selected=true]") == language
        check()


def files_of(tab: Tab) -> list[list[str]]:
    """What the export buttons give: pictures that are pictures, and the table."""
    assert tab.exported("png").startswith(b"\x89PNG")
    assert tab.exported("svg").startswith(b"<svg")
    return list(csv.reader(io.StringIO(tab.exported("csv").decode("utf-8-sig"))))


# ---- the views


def test_heat_map(tab: Tab, seen: Look) -> None:
    weights = seen.weights(1, 2, kind="cross")
    tab.open(model="en-ko", text=TEXT, view="heatmap", kind="cross", layer=1, head=2, row=1, col=3)

    def check() -> None:
        assert tab.weight(1, 3) == pytest.approx(float(weights[1, 3]), **CLOSE)
        best = weights[1].topk(3)
        for index, weight in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            assert tab.weight(1, index) == pytest.approx(weight, **CLOSE)

    in_both_languages(tab, ("Heat map", "히트맵"), check)
    box = tab.box()
    for across, down in ((0.35, 0.4), (0.5, 0.55)):
        tab.over(box["width"] * across, box["height"] * down)
        shown, _ = tab.tip()
        tab.page.keyboard.press("Escape")
        tab.click(box["width"] * across, box["height"] * down)
        row, col = int(tab.state["row"]), int(tab.state["col"])
        assert shown == pytest.approx(float(weights[row, col]), **CLOSE)
    table = files_of(tab)
    assert [line[0] for line in table[1:]] == [label.text for label in seen.rows("cross")]
    opening = re.search(r'id="opening">(.*?)</script>', tab.exported("html").decode())
    assert opening is not None
    same = json.loads(opening[1])
    assert {name: same[name] for name in ("kind", "layer", "head", "row", "col", "view")} == {
        **{"kind": "cross", "layer": 1, "head": 2, "view": "heatmap"},
        **{"row": int(tab.state["row"]), "col": int(tab.state["col"])},
    }
    assert torch.allclose(torch.tensor([[float(x) for x in line[1:]] for line in table[1:]]), weights, atol=1e-7)


def test_sentence(tab: Tab, seen: Look) -> None:
    tab.open(model="en-ko", text=TEXT, view="sentence", kind="encoder", layer=0, head=1, row=3)
    weights = seen.weights(0, 1, kind="encoder")

    def check() -> None:
        tab.over(tab.box()["width"] * 0.75, 8 + 30 * 2.5)  # the third token of the right column
        shown, about = tab.tip()
        assert shown == pytest.approx(float(weights[3, 2]), **CLOSE)
        assert about == [f"{seen.rows('encoder')[3].text} → {seen.cols('encoder')[2].text}"]

    in_both_languages(tab, ("Sentence", "문장"), check)
    table = files_of(tab)
    assert float(table[4][3]) == pytest.approx(float(weights[3, 2]), abs=1e-7)
    tab.click(40, 8 + 30 * 1.5)
    assert tab.state["row"] == "1"
    tab.page.keyboard.press("Escape")
    tab.settled()
    assert "row" not in tab.state


def test_every_head_of_a_locked_token(tab: Tab, seen: Look) -> None:
    tab.open(model="en-ko", text=TEXT, view="sentence", kind="encoder", layer=1, row=2)
    box, found = tab.box(), set()
    for x in range(int(box["width"] * 0.6), int(box["width"]), 7):
        tab.page.mouse.move(box["x"] + x, box["y"] + 8 + 30 * 4.5)
        about = [each.inner_text() for each in tab.page.query_selector_all(".tip:not([hidden]) .of")]
        if about and about[-1].startswith("Head "):
            head = int(about[-1].split()[1])
            found.add(head)
            exact = float(seen.weights(1, head, kind="encoder")[2, 4])
            assert tab.tip()[0] == pytest.approx(exact, **CLOSE)
    assert found == {0, 1, 2, 3}


def test_grid_of_layers_and_heads(tab: Tab, seen: Look) -> None:
    tab.open(model="en-ko", text=TEXT, view="grid", kind="encoder")
    rows, cols = ([label.text for label in labels] for labels in (seen.rows("encoder"), seen.cols("encoder")))

    def check() -> None:
        box = tab.box()
        for across, down in ((60, 60), (220, box["height"] - 60)):
            tab.over(across, down)
            shown, (pair, place) = tab.tip()
            layer, head = map(int, re.findall(r"\d+", place))
            row, col = pair.split(" → ")
            weights = seen.weights(layer, head, kind="encoder")
            assert shown == pytest.approx(float(weights[rows.index(row), cols.index(col)]), **CLOSE)

    in_both_languages(tab, ("Layers × heads", "층 × 헤드"), check)
    assert len(files_of(tab)) == 1 + 2 * 4 * 9 * 9
    tab.click(60, 60)
    assert (tab.state["view"], tab.state["head"]) == ("heatmap", "0")


def test_arithmetic(tab: Tab, seen: Look) -> None:
    tab.open(model="en-ko", text=TEXT, view="walk", kind="cross", layer=1, head=3, row=1, col=4)

    def check() -> None:
        texts = tab.texts()
        exact = float(seen.weights(1, 3, kind="cross")[1, 4])
        weight = next(as_number(text) for text in texts if re.fullmatch(r"[\d.e−]+", text) and _near(text, exact))
        assert weight == pytest.approx(exact, **CLOSE)
        score, lse = _one(texts, r"exp\((\S+) − (\S+)\) =")
        assert torch.tensor(score - lse).exp().item() == pytest.approx(exact, rel=1e-4)
        dot, factor = _one(texts, r"(\S+) × (\S+) =")
        assert factor == pytest.approx(6**-0.5, abs=1e-6)
        assert dot * factor == pytest.approx(score, abs=1e-4)

    in_both_languages(tab, ("Arithmetic", "계산 과정"), check)
    table = dict(line[:2] for line in files_of(tab)[1:])
    values = [[float(table[f"{name}[{i}]"]) for i in range(6)] for name in ("q", "k", "v", "contribution")]
    assert sum(a * b for a, b in zip(values[0], values[1], strict=True)) == pytest.approx(float(table["dot"]), abs=1e-4)
    assert [float(table["weight"]) * v for v in values[2]] == pytest.approx(values[3], abs=1e-5)


def _near(text: str, exact: float) -> bool:
    try:
        return as_number(text) == pytest.approx(exact, **CLOSE)
    except ValueError:
        return False


def _one(texts: list[str], pattern: str) -> list[float]:
    """The numbers in the one text that is of this form."""
    found = next(match for text in texts if (match := re.fullmatch(pattern, text)))
    return [as_number(group) for group in found.groups()]


def test_alignment_is_drawn_and_written_again(tab: Tab, seen: Look) -> None:
    tab.open(model="en-ko", text=TEXT, view="align", layer=1, head=0, row=0, col=2)
    exact = float(seen.weights(1, 0, kind="cross")[0, 2])

    def check() -> None:
        assert tab.weight(0, 2) == pytest.approx(exact, **CLOSE)

    in_both_languages(tab, ("Alignment", "단어 정렬"), check)
    assert float(files_of(tab)[1][3]) == pytest.approx(exact, abs=1e-7)
    tab.page.evaluate(LISTEN)
    with tab.page.expect_response("**/api/stream"):
        tab.page.click('[data-do="write"]')
    tab.page.wait_for_function("() => window.said.filter(Boolean).length > 0")
    tab.settled()
    longest = max((text for text in tab.page.evaluate("() => window.said") if text), key=len)
    assert (seen.target_text or "").startswith(longest.strip())
    assert tab.page.get_attribute('textarea[name="target"]', "placeholder") == seen.target_text
    check()


def test_next_token(tab: Tab, seen: Look) -> None:
    tab.open(model="en-ko", text=TEXT, view="next", position=1)

    def check() -> None:
        texts = tab.texts()
        for one in seen.next(1, k=5):
            assert any(_near(text, one.probability) for text in texts), one

    in_both_languages(tab, ("Next token", "다음 토큰"), check)
    tab.open(model="en-ko", text=TEXT, view="next", position=1, temperature=0.5, topk=4, topp=0.9)
    texts = tab.texts()
    for one in seen.next(1, k=4, temperature=0.5, top_k=4, top_p=0.9):
        assert any(_near(text, one.probability) for text in texts), one
    assert texts.count("cut off") >= 12
    before = files_of(tab)
    tab.page.locator('input[name="temperature"]').fill("2")
    tab.page.wait_for_timeout(150)
    tab.settled()
    assert tab.state["temperature"] == "2"
    assert list(csv.reader(io.StringIO(tab.exported("csv").decode("utf-8-sig")))) != before


def test_head_patterns(tab: Tab, seen: Look) -> None:
    from regard.lens.patterns import patterns

    tab.open(model="en-ko", text=TEXT, view="patterns", kind="encoder", pattern="previous")
    exact = patterns(seen, "encoder").previous
    # What B's number means, from the weights themselves: the mean of A[i, i - 1].
    weights = torch.stack([torch.stack([seen.weights(n, h, kind="encoder") for h in range(4)]) for n in range(2)])
    assert torch.allclose(exact, weights.diagonal(-1, 2, 3).mean(-1), atol=1e-6)

    def check() -> None:
        texts = tab.texts()
        for value in exact.flatten().tolist():
            assert f"{value:.3f}" in texts

    in_both_languages(tab, ("Head patterns", "헤드 유형"), check)
    table = files_of(tab)
    assert float(table[6][table[0].index("previous")]) == pytest.approx(float(exact[1, 1]), abs=1e-6)
    tab.page.click('.stage [data-value=""]')
    tab.settled()
    assert "pattern" not in tab.state


def test_beam_tree(tab: Tab, models: dict[str, Model]) -> None:
    tab.open(model="en-ko", text=TEXT, view="beams", beam=4)
    found = look(models["en-ko"], TEXT, generate={"beam": 4, "n_best": 4})
    assert found.generated is not None
    best = found.generated.hypotheses[0][0]

    def check() -> None:
        tab.page.wait_for_selector(".stage svg text")
        assert len(tab.texts()) >= len(best.tokens)

    in_both_languages(tab, ("Beam tree", "빔 트리"), check)
    nodes = files_of(tab)[1:]
    winner = [line for line in nodes if line[4] == "true"]
    assert len(winner) == 1 + len(best.tokens)
    chances = [
        one.probability for n in range(len(best.tokens)) for one in found.next(n, k=1000) if one.token == best.tokens[n]
    ]
    exact = float(torch.tensor(chances).log().sum())
    assert float(winner[-1][3]) == pytest.approx(exact, abs=1e-3)
    assert any(_near(text, float(winner[-1][3])) for text in tab.texts())


def test_what_if(tab: Tab, models: dict[str, Model]) -> None:
    from regard.lens import interventions

    text = "the cat sat on the mat"
    plain = look(models["speaker"], text)
    tab.open(model="speaker", text=text, view="variant", layer=1, head=2, causal=0, off="self.0.1")
    with interventions.no_causal_mask(models["speaker"]), interventions.switch_off(models["speaker"], [("self", 0, 1)]):
        changed = look(models["speaker"], text)

    def check() -> None:
        assert any(_near(each, plain.next(k=1)[0].probability) for each in tab.texts())

    in_both_languages(tab, ("What if", "바꿔 보기"), check)
    table = files_of(tab)[1:]
    n = len(plain.rows())
    for at, found in ((2, plain), (3, changed)):
        shown = torch.tensor([float(line[at]) for line in table]).view(n, n)
        assert torch.allclose(shown, found.weights(1, 2), atol=1e-6)
    assert changed.weights(1, 2)[0, -1] > 0
    tab.page.click('[data-do="reset"]')
    tab.settled()
    assert "off" not in tab.state
    assert "causal" not in tab.state


def test_image_overlay(tab: Tab, models: dict[str, Model], tmp_path: Path) -> None:
    from regard.data.corpora import open_corpus

    file = tmp_path / "scene.png"
    open_corpus("shapes").example("valid", 3).pillow().save(file)
    tab.page.goto(f"{tab.home}/#lang=en&theme=light&model=shapes&view=image&kind=cross")
    tab.page.wait_for_selector('input[name="image"]')
    tab.page.set_input_files('input[name="image"]', str(file))
    tab.page.wait_for_selector(".chips button")
    tab.settled()
    found = look(models["shapes"], file)
    weights = found.weights(0, None, kind="cross")

    def check() -> None:
        tab.page.click('.chips [data-row="1"]')
        tab.settled()
        tab.over(520 * 0.3, 520 * 0.6)
        shown, about = tab.tip()
        inside = [
            n
            for n, each in enumerate(found.cols("cross"))
            if each.box and each.box[0] <= 0.3 < each.box[2] and each.box[1] <= 0.6 < each.box[3]
        ]
        assert about[0].endswith(found.cols("cross")[inside[0]].text)
        assert shown == pytest.approx(float(weights[1, inside[0]]), **CLOSE)

    in_both_languages(tab, ("Image", "이미지"), check)
    assert float(files_of(tab)[1][5]) == pytest.approx(float(weights[1, 0]), abs=1e-6)


# ---- what else a page must survive


def test_a_link_brings_the_same_picture_back(tab: Tab, seen: Look) -> None:
    tab.open(model="en-ko", text=TEXT, view="heatmap", kind="encoder", layer=0, head=0)
    tab.page.keyboard.press("ArrowRight")
    tab.page.keyboard.press("ArrowDown")
    tab.page.keyboard.press("2")
    tab.settled()
    assert (tab.state["head"], tab.state["layer"], tab.state["view"]) == ("1", "1", "sentence")
    tab.page.keyboard.press("/")
    tab.page.keyboard.type("ring")
    assert tab.state["find"] == "ring"
    tab.page.keyboard.press("Escape")
    address = tab.page.url
    tab.page.goto("about:blank")
    tab.page.goto(address)
    tab.page.wait_for_selector("nav button[aria-selected=true]")
    tab.settled()
    assert tab.page.input_value(".find") == "ring"
    tab.page.evaluate("() => { location.hash = location.hash.replace('ring', 'tiger').replace('find=tiger', ''); }")
    tab.page.wait_for_function("() => document.querySelector('textarea').value.includes('tiger')")
    tab.settled()
    assert (tab.state["head"], tab.state["layer"]) == ("1", "1")
    assert tab.page.inner_text(".stepper >> nth=1 >> output") == "1 / 3"
    tab.page.keyboard.press("?")
    assert tab.page.is_visible("dialog")
    tab.page.keyboard.press("Escape")
    assert tab.tabs() == ["heatmap", "sentence", "grid", "walk", "align", "next", "patterns", "variant"]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_phone_width(tab: Tab, theme: str) -> None:
    tab.page.set_viewport_size({"width": 360, "height": 740})
    tab.open(model="en-ko", text=TEXT, theme=theme)
    for view in tab.tabs():
        tab.page.click(f'nav [data-view="{view}"]')
        tab.settled()
        assert tab.page.evaluate("() => document.documentElement.scrollWidth") <= 360, view


def test_one_token(tab: Tab, models: dict[str, Model]) -> None:
    tab.open(model="speaker", text="t", row=0, col=0)
    assert len(look(models["speaker"], "t").rows()) == 1
    assert tab.weight(0, 0) == 1
    for view in tab.tabs():
        tab.page.click(f'nav [data-view="{view}"]')
        tab.settled()
        assert tab.page.inner_text(".message") == ""


def test_a_long_text_is_an_overview_until_zoomed_into(tab: Tab, models: dict[str, Model]) -> None:
    text = "the cat sat on the mat. " * 300
    found = look(models["speaker"], text)
    n = len(found.rows())
    assert n > 1500
    tab.open(model="speaker", text=text, layer=1, head=0, lang="en")
    assert tab.page.inner_text(".caption").startswith("Each cell is the mean of")
    box = tab.box()
    tab.over(60, box["height"] * 0.6)
    shown, about = tab.tip()
    r0, r1, c0, c1 = (int(x.replace("\u202f", "")) for x in re.findall(r"[\d\u202f]+", about[0]))
    block = found.weights(1, 0, slice(r0, r1 + 1), slice(c0, c1 + 1))
    assert shown == pytest.approx(float(block.mean()), **CLOSE)
    tab.open(model="speaker", text=text, layer=1, head=0, zoom="1000,1020,980,1000", row=1010, col=990)
    assert tab.weight(1010, 990) == pytest.approx(float(found.weights(1, 0, [1010], [990])), **CLOSE)
    for view in ("sentence", "grid", "patterns"):
        tab.page.click(f'nav [data-view="{view}"]')
        tab.settled()
        assert tab.page.inner_text(".message") == ""


@pytest.mark.parametrize("text", ["שלום עולם", "مرحبا بالعالم", "👩‍👩‍👧 and 🐈 sat", "고양이가 앉았다"])
def test_writing_of_other_kinds(tab: Tab, models: dict[str, Model], text: str) -> None:
    found = look(models["speaker"], text)
    tab.open(model="speaker", text=text, layer=1, head=1, row=2, col=1)
    assert tab.weight(2, 1) == pytest.approx(float(found.weights(1, 1)[2, 1]), **CLOSE)
    assert tab.page.inner_text("aside .who").strip() == found.rows()[2].text.strip()
    for view in tab.tabs():
        tab.page.click(f'nav [data-view="{view}"]')
        tab.settled()
        assert tab.page.inner_text(".message") == ""


def test_what_is_wrong_is_one_sentence(tab: Tab) -> None:
    tab.open(model="speaker", text="the cat")
    tab.page.fill('textarea[name="text"]', "the cat sat " * 30_000)
    tab.page.click(".primary")
    tab.page.wait_for_function("() => document.querySelector('.message').textContent.length > 10")
    assert "characters" in tab.page.inner_text(".message")
    assert len(tab.complaints) == 2  # the browser's own line about the status, and ours
    tab.complaints.clear()


def test_every_sentence_in_both_languages(tab: Tab) -> None:
    tab.open(model="speaker", text="the cat")
    english, korean = tab.page.evaluate(
        "async () => { const { keys } = await import('/static/i18n.js'); return [keys('en'), keys('ko')]; }"
    )
    assert english == korean


# ---- one file without a server


def test_a_page_without_a_server(browser: Any, seen: Look, tmp_path: Path) -> None:
    file = tmp_path / "look.html"
    seen.html(file, kind="cross", layer=1, head=2, language="ko", theme="dark")
    page = browser.new_page(viewport={"width": 1100, "height": 800}, offline=True)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    here = Tab(page, "")
    page.goto(f"{file.as_uri()}#row=1&col=3&kind=cross&layer=1&head=2&lang=ko")
    page.wait_for_selector('aside [data-weight="1,3"]')
    assert here.weight(1, 3) == pytest.approx(float(seen.weights(1, 2, kind="cross")[1, 3]), **CLOSE)
    assert here.tabs() == ["heatmap", "sentence", "grid", "align", "patterns"]
    for view in here.tabs():
        page.click(f'nav [data-view="{view}"]')
        here.settled()
    table = list(csv.reader(io.StringIO(here.exported("csv").decode("utf-8-sig"))))
    assert len(table) == 9
    assert here.complaints == []
    assert [url for url in asked if not url.startswith(("data:", "file:", "blob:"))] == []
    page.close()


def test_a_page_holds_one_head_or_an_overview_where_not_all_fit(
    browser: Any, models: dict[str, Model], tmp_path: Path
) -> None:
    found = look(models["speaker"], "the cat sat on the mat. " * 25)
    exact = found.weights(1, 2)
    sizes = []
    for limit, views in ((420_000, ["heatmap", "sentence"]), (290_000, ["heatmap"])):
        file = found.html(tmp_path / "look.html", layer=1, head=2, limit=limit)
        sizes.append(file.stat().st_size)
        assert sizes[-1] <= limit
        page = browser.new_page(viewport={"width": 1100, "height": 800})
        here = Tab(page, "")
        page.goto(f"{file.as_uri()}#lang=en")
        page.wait_for_selector("nav button[aria-selected=true]")
        here.settled()
        assert here.tabs() == views
        if "sentence" in views:
            page.goto(f"{file.as_uri()}#lang=en&row=9&col=4")
            page.reload()
            page.wait_for_selector('aside [data-weight="9,4"]')
            assert here.weight(9, 4) == pytest.approx(float(exact[9, 4]), **CLOSE)
        assert here.complaints == []
        page.close()
    with pytest.raises(ValueError, match=r"more than limit=1,000$"):
        found.html(tmp_path / "none.html", limit=1000)
