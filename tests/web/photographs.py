"""The pictures of the explorer in docs/images: which they are, and how they are taken.

Taken anew from trained runs:  python -m web.photographs EN-KO SHAPES STDLIB   (in tests/, runs of these corpora).
A test takes the same ones of small models, so that none of them is of a page that no longer is.
"""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from find_browser import HOW_TO_INSTALL, find_browser
from regard.data.corpora import open_corpus
from regard.io import load
from regard.models import Model

from .browsing import ARGUMENTS, Tab, serving

IMAGES = Path(__file__).parents[2] / "docs" / "images"
SENTENCE = "[polite] Did the kind teacher read a new book yesterday?"
CHANGED = SENTENCE.replace("polite", "formal")
CLAUSE = "[polite] The bread that the girl bought was soft."
CROSS_HEADS = " ".join(f"cross.{layer}.{head}" for layer in range(2) for head in range(4))
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
    Photograph("story", _of("en-ko", "story", SENTENCE, kind="cross", layer=1, head=1, row=1)),
    Photograph("contributions", _of("en-ko", "contributions", SENTENCE, position=1)),
    Photograph("why", _of("en-ko", "why", SENTENCE, kind="cross", layer=1, head=1, row=1, col=6)),
    Photograph("patching", _of("en-ko", "patching", SENTENCE, kind="encoder", corrupted=CHANGED)),
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
    Photograph("variant", _of("en-ko", "variant", SENTENCE, kind="cross", layer=1, off=CROSS_HEADS)),
]


def save(screenshot: bytes, file: Path) -> None:
    """Write a screenshot with its 256 most important colours: it looks the same and has 40 % of the bytes."""
    Image.open(io.BytesIO(screenshot)).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(file, optimize=True)


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
            save(page.screenshot(full_page=True), file)
            assert tab.complaints == [], tab.complaints
            yield file
        for page in pages.values():
            page.close()


STAGES = ("tokens", "qkv", "scores", "softmax", "mix", "layer", "end")
LARGEST = 1_000_000  # bytes of the moving picture


def film(model: Model, file: Path, browser: Any) -> Path:
    """A translator in the explorer as a moving picture: its story, what each word looked at, and heads switched off."""
    page = browser.new_page(viewport={"width": 1040, "height": 700}, reduced_motion="reduce")
    frames: list[tuple[Image.Image, int]] = []  # and milliseconds

    def expose(milliseconds: int) -> None:
        page.evaluate("() => document.fonts.ready")
        frames.append((Image.open(io.BytesIO(page.screenshot())).convert("RGB"), milliseconds))

    with serving({"en-ko": model}) as home:
        tab = Tab(page, home)
        tab.open(**_of("en-ko", "story", SENTENCE, kind="cross", layer=1, head=1, row=1))
        expose(2500)
        for stage in STAGES:
            page.eval_on_selector(f'[data-stage="{stage}"]', "(card) => card.scrollIntoView({ block: 'center' })")
            page.wait_for_timeout(300)  # until the map has seen which stage it is
            expose(1800)
        for row in range(5):
            tab.open(**_of("en-ko", "align", SENTENCE, layer=1, row=row))
            expose(900)
        tab.open(**_of("en-ko", "variant", SENTENCE, kind="cross", layer=1, off=CROSS_HEADS))
        expose(4000)
        assert tab.complaints == [], tab.complaints
    page.close()
    pictures, durations = zip(*frames, strict=True)
    pictures[0].save(file, save_all=True, append_images=pictures[1:], duration=list(durations), loop=0, quality=70)
    return file


def watch(model: Model, file: Path, browser: Any) -> Path:
    """The page that trains, paused when the model in it has learned its task."""
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    with serving({"en-ko": model}) as home:
        tab = Tab(page, home)
        page.goto(f"{home}/static/watch/index.html#lang=en&theme=light")
        page.click('[data-do="play"]')
        page.wait_for_function(
            "() => Number(document.querySelector('[data-figure=loss] dd')?.textContent) < 0.05", timeout=120_000
        )
        page.click('[data-do="play"]')
        page.wait_for_function("() => document.querySelector('[data-do=play]')?.textContent === 'Play'")
        page.evaluate("() => document.fonts.ready")
        save(page.screenshot(), file)
        assert tab.complaints == [], tab.complaints
    page.close()
    return file


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
        print(film(models["en-ko"], IMAGES / "explorer.webp", browser))
        print(watch(models["en-ko"], IMAGES / "watch.png", browser))
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1:])
