"""A page that `regard export RUN web` wrote, as a visitor's browser gets it: bytes, seconds, equality with the model.

    make demo SERVE=0 && OMP_NUM_THREADS=2 python benchmarks/web_page.py runs/demo/run runs/demo/page

Bars: the translator's page under 10 MB, its first translation within 3 s of the last byte, the ids of 200 held-out
sentences equal and attention weights within 1e-4; a second visit without a network; nothing in the console and nothing
asked of another host; the same weights of a language model that reads 1,000 tokens. The host compresses nothing: the
graphs and the WebAssembly lie compressed in the folder. web-int8 is measured beside it.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import torch
from measuring import print_verdict

import regard
from regard.export.web_certificate import certify_page
from regard.export.web_runtime import find_browser
from regard.text.processor import Processor
from regard.text.tokenizer_training import train_tokenizer

SENTENCES = "[polite] Did the kind teacher read a new book yesterday?", "[plain] The cat slept."
LONG = 1000
Row = tuple[str, str, bool]  # what, the figure with its bar, whether it passes


class Host(SimpleHTTPRequestHandler):
    """A host of plain files that counts what it sends."""

    sent: list[int]

    def copyfile(self, source: Any, outputfile: Any) -> None:
        content = source.read()
        self.sent.append(len(content))
        outputfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are counted instead."""


@contextmanager
def host_folder(folder: Path) -> Iterator[tuple[str, list[int]]]:
    """The address of a folder, and the bytes of each file sent from it so far."""
    sent: list[int] = []
    handler = functools.partial(type("CountingHost", (Host,), {"sent": sent}), directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/", sent
        finally:
            server.shutdown()


@dataclass
class Visit:
    """Times, texts and errors of a visit to the page, and the bytes that the host sent."""

    sent: int = 0
    loading: float = 0.0
    """Seconds until the last byte that the page needs is there."""
    first: float = 0.0
    """Seconds from then until the first answer is on the screen."""
    texts: list[str] = field(default_factory=list)
    """What the model wrote: of the first text, and of a second one without a network."""
    console_errors: list[str] = field(default_factory=list)
    other_hosts: list[str] = field(default_factory=list)
    """Addresses on other hosts that the page asked for."""


# The page's clock when its first look is drawn, and when the last file that the model is made of had come.
_DRAWN = """() => new Promise((done) => {
  const app = document.getElementById("app");
  const files = () => performance.getEntriesByType("resource").filter(({ name }) => /[/](model|runtime)[/]/.test(name));
  const look = () => app.ariaBusy === "false" && document.querySelector("nav [aria-selected=true]")
    ? done([performance.now(), Math.max(...files().map((file) => file.responseEnd))]) : requestAnimationFrame(look);
  look();
})"""
_SETTLED = """() => new Promise((done) => {
  const look = () => document.getElementById("app").ariaBusy === "false" ? done() : requestAnimationFrame(look);
  setTimeout(look, 50);
})"""
_KEPT = """async () => {
  await navigator.serviceWorker.ready;
  while (!navigator.serviceWorker.controller) await new Promise((done) => setTimeout(done, 50));
}"""


def visit_page(browser: Any, folder: Path, texts: tuple[str, str]) -> Visit:
    """Open a page with one text; then, with the host gone, open it again with another."""
    seen = Visit()
    context = browser.new_context(viewport={"width": 1440, "height": 900}, locale="en-US")
    page = context.new_page()
    page.set_default_timeout(120_000)
    page.on("console", lambda said: said.type in ("error", "warning") and seen.console_errors.append(said.text))
    page.on("pageerror", lambda error: seen.console_errors.append(str(error)))
    with host_folder(folder) as (address, sent):
        page.on("request", lambda asked: _is_own(asked.url, address) or seen.other_hosts.append(asked.url))
        open_text(page, address, texts[0])
        drawn, loaded = (x / 1000 for x in page.evaluate(_DRAWN))
        seen.loading, seen.first = loaded, drawn - loaded
        seen.texts.append(written_text(page))
        page.evaluate(_KEPT)
        seen.sent = sum(sent)
    context.set_offline(True)
    open_text(page, address, texts[1])
    page.evaluate(_DRAWN)
    seen.texts.append(written_text(page))
    context.close()
    return seen


def _is_own(url: str, address: str) -> bool:
    return url.startswith((address, "data:", f"blob:{address}"))


def open_text(page: Any, address: str, text: str) -> None:
    """The page as a link with a text in it brings it."""
    page.goto("about:blank")
    page.goto(f"{address}#{urlencode({'lang': 'en', 'text': text})}")


def written_text(page: Any) -> str:
    """What a translator wrote; it stands where a translation of one's own would."""
    page.evaluate(_SETTLED)
    found = page.query_selector('textarea[name="target"]')
    return found.get_attribute("placeholder") if found else ""


def folder_size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def translator_rows(browser: Any, run: Path, page: Path) -> list[Row]:
    model = regard.load(run)
    seen = visit_page(browser, page, SENTENCES)
    expected = regard.translate(model, list(SENTENCES), beam=1)
    found = {row["name"]: row for row in certify_page(model, page, n_inputs=200)["comparisons"]}
    tokens, texts, weights = found["page tokens"], found["page"], found["page weights"]
    return [
        ("bytes sent, first visit", f"{seen.sent / 1e6:.2f} MB, bar 10 MB", seen.sent < 10e6),
        ("first translation after the last byte", f"{seen.first:.2f} s, bar 3 s", seen.first < 3),
        ("…, and the last byte after the click", f"{seen.loading:.2f} s", True),
        ("ids equal to Python's", f"{tokens['same_text']:.1%} of {tokens['shapes']} texts", tokens["same_text"] == 1),
        ("translations equal to Python's", f"{texts['same_text']:.1%} of {texts['shapes']}", texts["same_text"] == 1),
        ("attention weights", f"within {weights['max_abs']:.1e}, bar 1e-4", weights["max_abs"] < 1e-4),
        ("the second visit, offline", repr(seen.texts[1]), seen.texts == expected),
        ("errors in the console", f"{len(seen.console_errors)} {seen.console_errors[:2]}", not seen.console_errors),
        ("requests to other hosts", f"{len(seen.other_hosts)} {seen.other_hosts[:2]}", not seen.other_hosts),
    ]


def rounded_rows(run: Path, folder: Path) -> list[Row]:
    """The same translator with int8 weights."""
    model = regard.load(run)
    regard.export(model, "web-int8", folder, n_shapes=200)
    certificate = certify_page(model, folder, n_inputs=200, int8=True)
    found = {row["name"]: row for row in certificate["comparisons"]}
    return [
        ("web-int8, on disk", f"{folder_size(folder) / 1e6:.2f} MB", True),
        ("web-int8, translations equal", f"{found['page']['same_text']:.1%} of {found['page']['shapes']}", True),
        ("web-int8, its certificate", "passes" if certificate["passes"] else "does not", certificate["passes"]),
    ]


def long_model() -> regard.Model:
    """A language model of characters with random weights that reads 1,024 of them."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer(["the cat sat on the mat. a dog saw it"], "chars", None)
    sizes: dict[str, Any] = {"d_model": 128, "d_ff": 512, "n_layers": 4, "n_heads": 4, "max_len": 1024, "init_std": 0.1}
    model = regard.build("gpt2", vocab_size=tokenizer.size, pad_id=0, bos_id=1, eos_id=2, **sizes).eval()
    model.processor = Processor(source=tokenizer)
    return model


def long_rows(browser: Any, folder: Path, length: int = LONG) -> list[Row]:
    """A text of many tokens: its weights, and how long its first look takes."""
    model, text = long_model(), ("the cat sat on the mat. " * (length // 24 + 1))[:length]
    regard.export(model, "web", folder, n_shapes=4)
    found = {row["name"]: row for row in certify_page(model, folder, inputs=[text])["comparisons"]}
    seen, n = visit_page(browser, folder, (text, text[:-1])), f"{length:,} tokens"
    tokens, weights = found["page tokens"], found["page weights"]
    wrong, equal = [*seen.console_errors, *seen.other_hosts], tokens["same_text"] == 1
    return [
        (f"{n}, ids equal to Python's", f"{tokens['same_text']:.1%} of {tokens['shapes']} texts", equal),
        (f"{n}, attention weights", f"within {weights['max_abs']:.1e}, bar 1e-4", weights["max_abs"] < 1e-4),
        (f"{n}, first look after the last byte", f"{seen.first:.2f} s", True),
        (f"{n}, errors and other hosts", f"{len(wrong)} {wrong[:2]}", not wrong),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("page", type=Path)
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as engine, tempfile.TemporaryDirectory() as name:
        browser = engine.chromium.launch(executable_path=str(find_browser()), args=["--no-sandbox", "--disable-gpu"])
        parts = [
            lambda: translator_rows(browser, options.run, options.page),
            lambda: long_rows(browser, Path(name) / "long"),
            lambda: rounded_rows(options.run, Path(name) / "int8"),
        ]
        passed = [print_verdict(good, f"{what}: {figure}") for part in parts for what, figure, good in part()]
        browser.close()
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
