"""One file of a look: the explorer's own pages without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from regard.lens import Look, look
from regard.models import Model

from .browsing import Tab
from .test_views import CLOSE


def test_a_page_without_a_server(browser: Any, seen: Look, tmp_path: Path) -> None:
    file = tmp_path / "look.html"
    seen.html(file, kind="cross", layer=1, head=2, language="ko", theme="dark")
    page = browser.new_page(viewport={"width": 1100, "height": 800}, offline=True)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    here = Tab(page, "")
    page.goto(f"{file.as_uri()}#row=1&col=3&kind=cross&layer=1&head=2&lang=ko")
    page.wait_for_selector('aside [data-weight="1,3"]')
    assert here.weight(1, 3) == pytest.approx(float(seen.weights(layer=1, head=2, kind="cross")[1, 3]), **CLOSE)
    assert here.tabs() == ["align", "sentence", "heatmap", "grid", "patterns"]
    for view in here.tabs():
        page.click(f'nav [data-view="{view}"]')
        here.settled()
    table = here.table()
    assert len(table) == 9
    assert here.complaints == []
    assert [url for url in asked if not url.startswith(("data:", "file:", "blob:"))] == []
    page.close()


def test_a_page_holds_one_head_or_an_overview_where_not_all_fit(
    browser: Any, models: dict[str, Model], tmp_path: Path
) -> None:
    found = look(models["speaker"], "the cat sat on the mat. " * 25)
    exact = found.weights(layer=1, head=2)
    sizes = []
    for limit, views in ((440_000, ["sentence", "heatmap"]), (290_000, ["heatmap"])):
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
