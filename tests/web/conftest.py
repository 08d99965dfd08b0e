"""A server with small trained models, and pages of a real browser that look at it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from find_browser import HOW_TO_INSTALL, find_browser
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


@pytest.fixture(scope="package")  # while it is open no other test may run an event loop in the main thread
def browser() -> Iterator[Any]:
    """The Chromium that ``find_browser`` finds; a machine without one fails and says how to install it."""
    chromium = find_browser()
    if chromium is None:
        pytest.fail(HOW_TO_INSTALL, pytrace=False)
    from playwright.sync_api import sync_playwright

    from .browsing import ARGUMENTS

    with sync_playwright() as engine:
        opened = engine.chromium.launch(executable_path=str(chromium), args=ARGUMENTS)
        new_page = opened.new_page
        opened.new_page = lambda **options: patient(new_page(**options))
        yield opened
        opened.close()


def patient(page: Any) -> Any:
    """The page, which waits for long: machines are busy at times."""
    page.set_default_timeout(120_000)
    return page


@pytest.fixture(scope="package")
def page(browser: Any) -> Any:
    """One page for all tests of a worker: a new one costs the browser more than most tests."""
    return browser.new_page(viewport=WIDE, locale="en-US", accept_downloads=True)


@pytest.fixture
def tab(page: Any, home: str) -> Iterator[Tab]:
    """The page; what it complains about in its console fails the test, and so does an answer that was not asked for."""
    from .browsing import Tab

    if page.viewport_size != WIDE:
        page.set_viewport_size(WIDE)
    here = Tab(page, home)
    yield here
    here.leave()
    assert here.complaints == []
    assert here.largest <= 1_000_000


@pytest.fixture(scope="session")
def seen(models: dict[str, Model]) -> Look:
    return look(models["en-ko"], TEXT)
