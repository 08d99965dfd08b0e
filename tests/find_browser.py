"""Where the Chromium for the explorer's tests is: the only place that decides. As a script, print it or exit with 1."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
HOW_TO_INSTALL = "no Chromium was found for the explorer's tests: run `make browser`, or set REGARD_BROWSER to one"


def find_browser() -> Path | None:
    """REGARD_BROWSER, a Chromium or Chrome on PATH, or the build that playwright installed; None without any."""
    if named := os.environ.get("REGARD_BROWSER"):
        return Path(named) if Path(named).exists() else None
    for name in NAMES:
        if path := shutil.which(name):
            return Path(path)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    with sync_playwright() as engine:
        path = Path(engine.chromium.executable_path)
    return path if path.exists() else None


if __name__ == "__main__":
    browser = find_browser()
    print(browser or HOW_TO_INSTALL, file=sys.stdout if browser else sys.stderr)
    sys.exit(browser is None)
