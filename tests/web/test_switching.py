"""What is on the screen after a switch: to another text, model, head or language while something is still on its way,
to a link in an open page, and from an input to the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode

import pytest

from regard.lens import Look, look
from regard.models import Model

from .browsing import Tab
from .conftest import TEXT
from .test_circuit_views import CHANGED, CLEAN

OTHER = "[formal] Did the tiger shine?"
PHONE = {"width": 390, "height": 844}
GROWTH = """() => {
  const stages = document.querySelector(".stages");
  window.heights = [];
  new MutationObserver(() => window.heights.push(stages.offsetHeight)).observe(stages, { childList: true });
}"""

FOLLOW = """(link) => new Promise((done) => {
  addEventListener("hashchange", done, { once: true }); // after the page's own listener
  location.hash = link;
}).then(() => null)"""


@contextmanager
def held(tab: Tab, pattern: str, word: str = "") -> Iterator[list[Any]]:
    """Requests to these addresses, with this word in their bodies, wait until the block is over."""
    waiting = list[Any]()
    tab.page.route(pattern, lambda it: waiting.append(it) if word in (it.request.post_data or "") else it.continue_())
    yield waiting
    for route in waiting:
        route.continue_()
    tab.page.unroute(pattern)
    tab.settled()


def ask(tab: Tab, text: str) -> None:
    tab.page.fill('textarea[name="text"]', text)
    with tab.page.expect_request("**/api/stream"):
        tab.page.press('textarea[name="text"]', "Enter")


def follow(tab: Tab, **state: Any) -> None:
    """A link in the open page."""
    tab.page.evaluate(FOLLOW, urlencode({"lang": "en", "theme": "light", **state}))
    tab.settled()


def tokens_of(tab: Tab) -> list[str]:
    tab.to("heatmap")
    return tab.table()[0][1:]


SWITCHES = {
    "layer": lambda tab: tab.page.click(".stepper button"),
    "view": lambda tab: tab.page.click('nav [data-view="heatmap"]'),
    "language": lambda tab: tab.page.click('[data-do="language"]'),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_text_is_looked_at_though_one_switches_while_it_is_written(
    tab: Tab, models: dict[str, Model], switch: str
) -> None:
    tab.open(model="en-ko", text=TEXT, view="align", head=1)
    with held(tab, "**/api/stream"):
        ask(tab, OTHER)
        SWITCHES[switch](tab)
    found = look(models["en-ko"], OTHER)
    assert tab.page.inner_text(".message") == ""
    assert tab.page.get_attribute('textarea[name="target"]', "placeholder") == found.target_text
    assert tokens_of(tab) == [label.text for label in found.cols(kind="cross")]


@pytest.mark.parametrize("view", ["variant", "heatmap", "next"])
def test_a_text_is_looked_at_from_every_view(tab: Tab, models: dict[str, Model], view: str) -> None:
    """Only the alignment shows a text while it is written."""
    tab.open(model="en-ko", text=TEXT, view=view)
    tab.page.fill('textarea[name="text"]', OTHER)
    tab.page.press('textarea[name="text"]', "Enter")
    tab.settled()
    assert tab.page.inner_text(".message") == ""
    assert tab.state["view"] == view
    assert tokens_of(tab) == [label.text for label in look(models["en-ko"], OTHER).cols(kind="cross")]


def test_heads_that_are_still_switched_off_when_one_leaves(tab: Tab) -> None:
    tab.open(model="en-ko", text=TEXT, view="variant")
    waiting = list[Any]()
    tab.page.route("**/heads*", lambda it: waiting.append(it))
    with tab.page.expect_request("**/heads*"):
        tab.page.click('[data-do="find"]')
    with held(tab, "**/api/looks"):  # the look at the next model is not there yet
        tab.page.select_option("header select", "speaker")
        with tab.page.expect_response("**/heads*"):
            waiting[0].continue_()
        tab.page.wait_for_timeout(100)
    tab.page.unroute("**/heads*")
    assert tab.page.inner_text(".message") == ""
    assert tab.complaints == []


def test_of_two_texts_that_are_written_the_last_is_shown(tab: Tab, models: dict[str, Model]) -> None:
    tab.open(model="en-ko", text=TEXT, view="align")
    with held(tab, "**/api/stream") as waiting:
        ask(tab, "[formal] Did the boy sing?")
        ask(tab, OTHER)
        waiting.reverse()
    tab.page.wait_for_selector('[data-do="write"]:visible')
    tab.settled()
    found = look(models["en-ko"], OTHER)
    assert [line[0] for line in tab.table()[1:]] == [label.text for label in found.rows(kind="cross")]
    assert tokens_of(tab) == [label.text for label in found.cols(kind="cross")]


def test_a_refusal_of_the_text_before_is_not_shown(tab: Tab) -> None:
    tab.open(model="en-ko", text=TEXT, view="heatmap")
    with held(tab, "**/api/looks", "shine shine"):
        tab.page.fill('textarea[name="text"]', "shine " * 1000)
        tab.page.press('textarea[name="text"]', "Enter")
        tab.page.fill('textarea[name="text"]', OTHER)
        with tab.page.expect_response("**/api/looks"):
            tab.page.press('textarea[name="text"]', "Enter")
    assert len(tab.complained(2)) == 2, "it came, late"
    assert tab.page.inner_text(".message") == ""


def test_an_empty_text_does_not_keep_the_button_waiting(tab: Tab) -> None:
    tab.open(model="en-ko", text=TEXT, view="heatmap")
    with held(tab, "**/api/looks"):
        tab.page.fill('textarea[name="text"]', OTHER)
        tab.page.press('textarea[name="text"]', "Enter")
        assert tab.page.inner_text(".primary") == "Looking…"
        tab.page.fill('textarea[name="text"]', " ")
        tab.page.press('textarea[name="text"]', "Enter")
    assert tab.page.inner_text(".primary") == "Look"
    for sentence in ("Enter a text first.", "먼저 문장을 입력해 주세요."):
        tab.page.fill('textarea[name="text"]', " ")
        tab.page.press('textarea[name="text"]', "Enter")
        tab.settled()
        assert tab.page.inner_text(".message") == sentence
        tab.speak_korean()


def test_a_link_without_a_text_opens_an_example(tab: Tab) -> None:
    """Also in a page that is open already, whose model and text it replaces."""
    tab.open(model="en-ko", text=TEXT, view="heatmap")
    follow(tab, model="speaker", view="heatmap")
    assert tab.page.inner_text(".message") == ""
    assert tab.page.eval_on_selector("header select", "(one) => one.value") == "speaker"
    assert tab.page.input_value('textarea[name="text"]')[:3] == "".join(tokens_of(tab)[:3])


def test_an_image_is_asked_for_in_both_languages(tab: Tab) -> None:
    tab.page.goto("about:blank")
    tab.page.goto(f"{tab.home}/#model=shapes&lang=en")
    tab.page.wait_for_selector(".stage .caption")
    assert tab.page.inner_text(".stage") == "Choose an image first."
    tab.speak_korean()
    assert tab.page.inner_text(".stage") == "먼저 이미지를 골라 주세요."


def test_a_link_sets_the_controls_of_the_open_view(tab: Tab) -> None:
    tab.open(model="speaker", text="the cat sat", view="next")
    follow(tab, model="speaker", text="the cat sat", view="next", temperature=0.5)
    assert tab.page.input_value('input[name="temperature"]') == "0.5"
    follow(tab, model="speaker", text="the cat sat", view="variant")
    follow(tab, model="speaker", text="the cat sat", view="variant", causal=0)
    assert not tab.page.is_checked('input[name="causal"]')


def test_what_was_chosen_in_one_text_is_not_asked_of_the_next(tab: Tab) -> None:
    tab.open(model="speaker", text=CLEAN, view="patching", corrupted=CHANGED, position=12)
    tab.page.fill('textarea[name="text"]', "a bird sang to me")
    tab.page.click(".primary")
    tab.settled()
    assert tab.page.inner_text(".message") == ""
    assert tab.page.input_value('textarea[name="corrupted"]') == "a bird sang to me"
    tab.open(model="speaker", text=CLEAN, view="patching", corrupted=CHANGED, position=12)
    tab.page.select_option("header select", "routed")
    tab.settled()
    assert not {"corrupted", "position"} & set(tab.state)


def test_a_table_is_saved_when_its_numbers_are_there(tab: Tab, seen: Look) -> None:
    tab.open(model="en-ko", text=TEXT, view="heatmap")
    with tab.page.expect_download() as saved, held(tab, "**/next?*"):
        tab.page.click('nav [data-view="next"]')
        tab.page.click('[data-export="csv"]')
    assert saved.value.path().read_text("utf-8").count("\n") == 17
    assert tab.page.inner_text(".message") == ""


def test_the_story_keeps_its_height_when_the_layer_changes(tab: Tab) -> None:
    tab.open(model="en-ko", text=TEXT, view="story", layer=0)
    tab.page.evaluate(GROWTH)
    tab.page.press("body", "ArrowDown")
    tab.settled()
    heights = tab.page.evaluate("() => [window.heights.at(-1), document.querySelector('.stages').offsetHeight]")
    assert heights[0] == heights[1]


def test_a_long_name_does_not_widen_a_phone(tab: Tab) -> None:
    tab.page.set_viewport_size(PHONE)
    tab.open(model="speaker", text="the cat sat", view="contributions")
    tab.page.evaluate("() => { document.querySelector('.row option').textContent = 'a class '.repeat(20); }")
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_patches_can_be_told_apart_on_a_phone(tab: Tab, tmp_path: Any) -> None:
    from PIL import Image

    Image.new("RGB", (16, 16), "red").save(tmp_path / "red.png")
    tab.page.set_viewport_size(PHONE)
    tab.show(tmp_path / "red.png", view="sentence", model="shapes")
    assert b">patch 4,4<" in tab.exported("svg")
