"""A server with small trained models, and a browser to look at it."""

from __future__ import annotations

import csv
import io
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
import torch
import uvicorn
from torch import Tensor

from generation.spoken import image_classifier, language_model, made
from regard.data.corpora import open_corpus
from regard.generation.prompts import image_pixels
from regard.models import Model
from regard.text.image_processor import ImageProcessor
from regard.text.processor import Processor
from regard.text.tokenizer_training import train_tokenizer
from regard.web.served_models import ServedModel
from regard.web.server import explorer

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
PAIRS = 48
STEPS = 70
# Nothing is on its way any more, and what came is drawn.
SETTLED = """() => new Promise((done, fail) => {
  setTimeout(() => fail(new Error("the page is still busy")), 120_000);
  const drawn = () => requestAnimationFrame(() => requestAnimationFrame(done));
  const look = () => document.getElementById("app").ariaBusy === "false" ? drawn() : requestAnimationFrame(look);
  look();
})"""
BOX = """(selector) => {
  const node = document.querySelector(selector);
  node.scrollIntoViewIfNeeded();
  const { x, y, width, height } = node.getBoundingClientRect();
  return { x, y, width, height };
}"""
TIP = """() => {
  const tip = document.querySelector(".tip");
  if (!tip?.checkVisibility()) return null;
  const about = [...tip.querySelectorAll(".of")].map((one) => one.innerText);
  return { number: tip.querySelector(".num").innerText, about };
}"""
EVERY_SENTENCE = "async () => (await import('/static/i18n.js')).everySentence()"


def learnt(model: Model, source: Tensor, target: Tensor, steps: int = STEPS) -> Model:
    """A few steps of Adam on a few examples: enough that heads differ and texts end."""
    optimiser = torch.optim.Adam(model.parameters(), lr=4e-3)
    model.train()
    for _ in range(steps):
        logits = model(source, target[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=0)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval()


def padded(rows: list[list[int]]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def english_korean() -> Model:
    """A translator of whole words that knows a few dozen sentences of the embedded corpus."""
    corpus = open_corpus("en-ko")
    pairs = sorted((corpus.example("train", n) for n in range(200)), key=lambda pair: len(pair.source))[:PAIRS]
    source = train_tokenizer([pair.source for pair in pairs], "words", None, "eos")
    target = train_tokenizer([pair.target for pair in pairs], "words", None, "eos")
    sizes = {"vocab_size": source.size, "target_vocab_size": target.size}
    model = made("transformer-base", Processor(source=source, target=target), **sizes)
    written = [[1, *target.encode(pair.target)] for pair in pairs]
    return learnt(model, padded([source.encode(pair.source) for pair in pairs]), padded(written))


def shapes() -> Model:
    corpus = open_corpus("shapes")
    pictures = [corpus.example("train", n) for n in range(8)]
    target = train_tokenizer([one.caption for one in pictures], "words", None, "eos")
    image = ImageProcessor((16, 16))
    sizes = {"vocab_size": target.size, "image_size": 16, "patch_size": 4, "max_target_len": 24}
    model = made("captioner", Processor(target=target, image=image), **sizes)
    pixels_of = torch.cat([image_pixels(model, one.pillow()) for one in pictures])
    return learnt(model, pixels_of, padded([[1, *target.encode(one.caption)] for one in pictures]), steps=12)


def small_models() -> dict[str, Model]:
    return {
        "en-ko": english_korean(),
        "shapes": shapes(),
        "speaker": language_model(max_len=4200),
        "images": image_classifier(),
        "routed": language_model(experts=4, shared_experts=0),
    }


@contextmanager
def serving(models: dict[str, Model] | list[ServedModel]) -> Iterator[str]:
    """The explorer at an address of its own, while the block runs."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(explorer(models), log_level="error", ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
        listening.close()


class Tab:
    """One page of the explorer; whatever it complains about in the console is kept."""

    def __init__(self, page: Any, home: str) -> None:
        self.page, self.home, self.largest = page, home, 0
        self.complaints: list[str] = []
        self._heard = {"console": self._hear, "pageerror": self._hear_error, "response": self._weigh}
        for event, listener in self._heard.items():
            page.on(event, listener)

    def complained(self, n: int) -> list[str]:
        """So many complaints, which may still be on their way; they are forgotten here."""
        end = time.monotonic() + 60
        while len(self.complaints) < n:
            assert time.monotonic() < end, self.complaints
            self.page.wait_for_timeout(20)
        expected, self.complaints[:] = self.complaints[:], []
        return expected

    def leave(self) -> None:
        """Nobody listens any more, and the next who comes finds nothing of what was done here."""
        for event, listener in self._heard.items():
            self.page.remove_listener(event, listener)
        self.page.evaluate("() => localStorage.clear()")
        self.page.mouse.move(0, 0)
        self.page.goto("about:blank")

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _hear_error(self, error: Any) -> None:
        self.complaints.append(str(error))

    def _weigh(self, answer: Any) -> None:
        if answer.status >= 400:
            self.complaints.append(f"{answer.status} {answer.url}")
        self.largest = max(self.largest, int(answer.headers.get("content-length", 0)))

    def open(self, **state: Any) -> Tab:
        """The page in a state, as a link would bring it."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.home}/#{urlencode({'lang': 'en', 'theme': 'light', **state})}")
        self.page.wait_for_selector("nav button[aria-selected=true]")
        self.settled()
        return self

    def settled(self) -> None:
        """Nothing is on its way any more, and what came is drawn."""
        self.page.evaluate(SETTLED)

    @property
    def state(self) -> dict[str, str]:
        return {name: values[0] for name, values in parse_qs(urlsplit(self.page.url).fragment).items()}

    def tabs(self) -> list[str]:
        return self.page.eval_on_selector_all("nav button", "(all) => all.map((one) => one.dataset.view)")

    def box(self, selector: str = ".stage .sheet") -> dict[str, float]:
        return self.page.evaluate(BOX, selector)

    def _place(self, selector: str, x: float, y: float) -> tuple[int, int]:
        """On a whole pixel: a browser moves the pointer in parts of one, but clicks on whole ones."""
        box = self.box(selector)
        return round(box["x"] + x), round(box["y"] + y)

    def over(self, x: float, y: float, selector: str = ".stage .sheet") -> None:
        """The pointer at a place of the sheet."""
        self.page.mouse.move(*self._place(selector, x, y))
        self.settled()

    def click(self, x: float, y: float, selector: str = ".stage .sheet") -> None:
        self.page.mouse.click(*self._place(selector, x, y))
        self.settled()

    def tip(self) -> tuple[float, list[str]]:
        """The note at the pointer: its number, and what it is about."""
        self.page.wait_for_selector(".tip:visible")
        shown = self.tip_now()
        assert shown is not None
        return shown

    def tip_now(self) -> tuple[float, list[str]] | None:
        """The note at the pointer, where there is one at this moment."""
        shown = self.page.evaluate(TIP)
        return None if shown is None else (as_number(shown["number"]), shown["about"])

    def weight(self, row: int, col: int) -> float:
        """A weight in the reading beside the picture."""
        return as_number(self.page.inner_text(f'aside [data-weight="{row},{col}"]'))

    def texts(self) -> list[str]:
        """What a drawing made of SVG says."""
        return self.page.eval_on_selector_all(".stage svg text", "(all) => all.map((one) => one.textContent)")

    def exported(self, kind: str) -> bytes:
        with self.page.expect_download() as waiting:
            self.page.click(f'[data-export="{kind}"]')
        return Path(waiting.value.path()).read_bytes()

    def speak_korean(self) -> None:
        self.page.click('[data-do="language"]')
        self.settled()

    def languages(self) -> Iterator[str]:
        """English, then the same page in Korean: switching needs no new look."""
        yield "en"
        self.speak_korean()
        yield "ko"

    def to(self, view: str) -> None:
        """To another view, as a click on its name brings it."""
        self.page.eval_on_selector(f'nav [data-view="{view}"]', "(button) => button.click()")
        self.settled()

    def every_view(self, *views: str) -> list[str]:
        """Open each view, or those named, put the pointer on it, and find nothing wrong."""
        for view in views or self.tabs():
            self.to(view)
            assert self.page.inner_text(".message") == "", view
            box = self.box()
            assert box["width"] > 100, view
            self.over(box["width"] * 0.3, min(box["height"] * 0.5, 200))
        return list(views) or self.tabs()

    def in_both_languages(self, name: tuple[str, str], check: Callable[[], None]) -> None:
        """The same numbers under English and under Korean names."""
        for language in name:
            if language != name[0]:
                self.speak_korean()
            assert self.page.inner_text("nav button[aria-selected=true]") == language
            check()

    def table(self) -> list[list[str]]:
        """What is on the screen as the button CSV gives it."""
        return list(csv.reader(io.StringIO(self.exported("csv").decode("utf-8-sig"))))

    def files(self) -> list[list[str]]:
        """What the export buttons give: pictures that are pictures, and the table."""
        assert self.exported("png").startswith(b"\x89PNG")
        assert self.exported("svg").startswith(b"<svg")
        return self.table()

    def show(self, file: Path, view: str = "image", **state: Any) -> None:
        """Give an image to a model that reads one."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.home}/#{urlencode({'lang': 'en', 'theme': 'light', 'view': view, **state})}")
        self.page.wait_for_selector('input[name="image"]')
        self.page.set_input_files('input[name="image"]', str(file))
        self.page.wait_for_selector("nav button[aria-selected=true]")
        self.settled()


def as_number(text: str) -> float:
    return float(text.replace("−", "-").replace("∞", "inf"))


def as_percent(share: float) -> str:
    """A probability as the page writes it."""
    if share < 1e-4:
        return "<0.01%" if share > 0 else "0%"
    if 0.9995 < share < 1:
        return ">99.9%"
    return f"{round(100 * share, 2 if share < 0.01 else 1):g}%"


def near(text: str, exact: float, rel: float = 2e-4) -> bool:
    try:
        return as_number(text) == pytest.approx(exact, abs=2e-6, rel=rel)
    except ValueError:
        return False


def numbers_in(texts: list[str], pattern: str) -> list[float]:
    """The numbers in the one text that is of this form."""
    found = next(match for text in texts if (match := re.fullmatch(pattern, text)))
    return [as_number(group) for group in found.groups()]
