"""axe-core finds nothing serious or critical: explorer, the page that trains, a saved look, the documents."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docs_site
import pytest
from axe_playwright_python.sync_playwright import Axe

from docs.test_site import BUILDER
from regard.lens import Look

from .browsing import Tab
from .conftest import TEXT

# Each language and each theme once: rules of colour do not depend on words, nor rules of words on colour.
LOOKS = [("en", "light"), ("ko", "dark")]


def violations(page: Any, context: str | None = None) -> list[str]:
    """What is serious or critical: the rule, and the first elements that break it."""
    found = Axe().run(page, context).response["violations"]
    return [
        f"{one['id']}: {[node['html'][:120] for node in one['nodes'][:3]]} {one['nodes'][0]['failureSummary'][:300]}"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize(("language", "theme"), LOOKS)
def test_every_view_of_the_explorer(tab: Tab, language: str, theme: str) -> None:
    tab.open(model="en-ko", text=TEXT, beam=2, lang=language, theme=theme, row=1, col=1)
    found: dict[str, list[str]] = {}
    for view in tab.tabs():
        tab.to(view)
        found[view] = violations(tab.page)
    tab.page.keyboard.press("?")
    found["keys"] = violations(tab.page, "dialog")
    assert not any(found.values()), "\n".join(line for lines in found.values() for line in lines)


def test_tabs_by_keyboard(tab: Tab) -> None:
    tab.open(model="en-ko", text=TEXT)
    tab.page.focus("nav [aria-selected=true]")
    for key, view in (("ArrowRight", "align"), ("ArrowLeft", "story"), ("ArrowLeft", "variant"), ("Enter", "variant")):
        tab.page.keyboard.press(key)
        tab.settled()
        assert tab.page.evaluate("() => document.activeElement.dataset.view") == view
        assert tab.page.get_attribute("nav [aria-selected=true]", "data-view") == view


def test_the_keyboard(tab: Tab) -> None:
    """Arrows choose among segmented buttons, which keep the focus; an open dialog has the keyboard to itself."""
    focus = "() => document.activeElement.dataset.value ?? null"
    tab.open(model="en-ko", text=TEXT, view="heatmap", kind="encoder")
    tab.page.focus('.controls [role=radio][data-value="encoder"]')
    chosen = []
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
        tab.page.keyboard.press(key)
        tab.settled()
        chosen.append((tab.state["kind"], tab.page.evaluate(focus)))
    assert len({kind for kind, _ in chosen}) == 2
    assert all(kind == held for kind, held in chosen)
    tab.to("patterns")
    tab.page.focus('.stage [role=radio][aria-checked="true"]')
    tab.page.keyboard.press("ArrowRight")
    tab.settled()
    assert tab.state["pattern"] == tab.page.evaluate(focus) != ""
    view = tab.state["view"]
    for key in ("?", "?", "1"):
        tab.page.keyboard.press(key)
    tab.settled()
    assert tab.page.locator("dialog").count() == 1
    assert tab.state["view"] == view


@pytest.fixture
def page_of_its_own(browser: Any) -> Iterator[Any]:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    yield page
    page.close()


def test_a_saved_look(page_of_its_own: Any, seen: Look, tmp_path: Path) -> None:
    here = Tab(page_of_its_own, "")
    for language, theme in LOOKS:
        file = seen.html(tmp_path / "look.html", kind="cross", layer=1, head=2, language=language, theme=theme)
        page_of_its_own.goto(f"{file.as_uri()}#row=1&lang={language}&theme={theme}")
        page_of_its_own.wait_for_selector("nav button[aria-selected=true]")
        for view in here.tabs():
            here.to(view)
            assert violations(page_of_its_own) == [], view


def test_the_page_that_trains(page_of_its_own: Any, home: str) -> None:
    for language, theme in LOOKS:
        page_of_its_own.goto("about:blank")
        page_of_its_own.goto(f"{home}/static/watch/index.html#lang={language}&theme={theme}")
        page_of_its_own.wait_for_selector("figure canvas")
        page_of_its_own.click('[data-do="step"]')
        assert violations(page_of_its_own) == [], (language, theme)


@pytest.mark.slow
@pytest.mark.skipif(not BUILDER.is_dir(), reason="`make docs` installs what builds the site")
def test_pages_of_the_documents(browser: Any, tmp_path: Path) -> None:
    path = os.pathsep.join([str(BUILDER), os.environ.get("PYTHONPATH", "")])
    site = tmp_path / "site"
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, docs_site.__file__, str(site)], env=environment, check=True, capture_output=True)
    for scheme in ("light", "dark"):  # the site remembers the first that it was seen in
        page = browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme=scheme)
        for name in (
            "index.html",
            "ship.html",
            "learn/6-the-transformer.html",
            "ko/learn/2-the-formula.html",
            "ko/learn/watch.html",
        ):
            page.goto((site / name).as_uri())
            assert violations(page) == [], (scheme, name)
        page.close()
