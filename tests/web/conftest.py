"""A server with small trained models, and pages of Debian's chromium that look at it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from regard.lens import Look, look
from regard.models import Model

if TYPE_CHECKING:
    from .browsing import Tab

TEXT = "[formal] Did the ring shine?"
WIDE = {"width": 1180, "height": 900}


@pytest.fixture(scope="session")
def models() -> dict[str, Model]:
    from .browsing import small_models

    return small_models()


@pytest.fixture(scope="module")
def home(models: dict[str, Model]) -> Iterator[str]:
    from .browsing import serving

    with serving(models) as address:
        yield address


@pytest.fixture(scope="module")  # while it is open no other test of this process may run an event loop
def browser() -> Iterator[Any]:
    """Chromium; a machine without it skips, and says so."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="pages are tested with playwright: pip install playwright"
    )
    from .browsing import ARGUMENTS, CHROMIUM

    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}: apt-get install chromium")
    with playwright.sync_playwright() as engine:
        opened = engine.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture
def tab(browser: Any, home: str) -> Iterator[Tab]:
    """A page; what it complains about in its console fails the test, and so does an answer that was not asked for."""
    from .browsing import Tab

    page = browser.new_page(viewport=WIDE, locale="en-US", accept_downloads=True)
    page.set_default_timeout(60_000)  # machines are busy at times
    here = Tab(page, home)
    yield here
    page.close()
    assert here.complaints == []
    assert here.largest <= 1_000_000


@pytest.fixture(scope="session")
def seen(models: dict[str, Model]) -> Look:
    return look(models["en-ko"], TEXT)
