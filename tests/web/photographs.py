"""The pictures of the explorer in docs/images: which they are, and how they are taken.

Taken anew from trained runs:  python -m web.photographs EN-KO SHAPES STDLIB   (in tests/, runs of these corpora).
A test takes the same ones of small models, so that none of them is of a page that no longer is.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from find_browser import HOW_TO_INSTALL, find_browser
from regard.data.corpora import open_corpus
from regard.io import load
from regard.models import Model

from .browsing import ARGUMENTS, Tab, serving

IMAGES = Path(__file__).parents[2] / "docs" / "images"
SENTENCE = "[polite] Did the kind teacher read a new book yesterday?"
CLAUSE = "[polite] The bread that the girl bought was soft."
CODE = "for line in file: print(line) for line in"
WIDE, PHONE = {"width": 1180, "height": 900}, {"width": 390, "height": 844}


@dataclass(frozen=True)
class Photograph:
    """One picture: its name, and the state of the page."""

    name: str
    state: dict[str, Any]
    phone: bool = False
    scene: bool = False
    """Whether it is of an image."""


def _of(model: str, view: str, text: str = "", **state: Any) -> dict[str, Any]:
    return {"model": model, "view": view, **({"text": text} if text else {}), **state}


PHOTOGRAPHS = [
    Photograph("heatmap", _of("en-ko", "heatmap", SENTENCE, kind="cross", layer=1, row=1, col=6)),
    Photograph("heatmap-words", _of("en-ko", "heatmap", SENTENCE, kind="cross", layer=1, row=1, words=1, specials=0)),
    Photograph("sentence", _of("en-ko", "sentence", SENTENCE, kind="cross", layer=1, head=1, row=1, theme="dark")),
    Photograph("grid", _of("stdlib", "grid", CODE)),
    Photograph("walk", _of("en-ko", "walk", SENTENCE, kind="cross", layer=1, head=1, row=1, col=6)),
    Photograph("align", _of("en-ko", "align", SENTENCE, layer=1)),
    Photograph("align-ko", _of("en-ko", "align", SENTENCE, layer=1, lang="ko", theme="dark", row=1)),
    Photograph("align-ko-phone", _of("en-ko", "align", SENTENCE, layer=1, lang="ko", theme="dark"), phone=True),
    Photograph("next", _of("stdlib", "next", CODE, temperature=0.7, topk=12)),
    Photograph("patterns", _of("stdlib", "patterns", CODE, lang="ko")),
    Photograph("image", _of("shapes", "image", kind="cross", layer=2), scene=True),
    Photograph("beams", _of("en-ko", "beams", CLAUSE, beam=3)),
    Photograph("variant", _of("stdlib", "variant", CODE, layer=1, causal=0, off="self.0.1")),
]


def take(models: dict[str, Model], folder: Path, browser: Any) -> Iterator[Path]:
    """Take every picture; a page that complains is none to be shown."""
    folder.mkdir(parents=True, exist_ok=True)
    with serving(models) as home, tempfile.TemporaryDirectory() as place:
        scene = Path(place) / "scene.png"
        open_corpus("shapes").example("valid", 5).pillow().save(scene)
        pages = {
            phone: browser.new_page(viewport=PHONE if phone else WIDE, device_scale_factor=2 if phone else 1)
            for phone in (False, True)
        }
        tabs = {phone: Tab(page, home) for phone, page in pages.items()}
        for each in PHOTOGRAPHS:
            page, tab = pages[each.phone], tabs[each.phone]
            state = {"lang": "en", "theme": "light", **each.state}
            if each.scene:
                tab.show(scene, **state)
                named = page.locator(".chips button", has_text="star")
                (named if named.count() else page.locator(".chips button")).first.click()
                tab.settled()
            else:
                tab.open(**state)
            page.evaluate("() => document.fonts.ready.then(() => scrollTo(0, 0))")
            file = folder / f"explorer-{each.name}.png"
            page.screenshot(path=file, full_page=True)
            assert tab.complaints == [], tab.complaints
            yield file
        for page in pages.values():
            page.close()


def main(runs: list[str]) -> None:
    from playwright.sync_api import sync_playwright

    chromium = find_browser()
    if chromium is None:
        sys.exit(HOW_TO_INSTALL)
    models = {name: load(run) for name, run in zip(("en-ko", "shapes", "stdlib"), runs, strict=True)}
    with sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=str(chromium), args=ARGUMENTS)
        for file in take(models, IMAGES, browser):
            print(file)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1:])
