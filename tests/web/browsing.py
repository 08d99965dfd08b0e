"""A server with small trained models, and Debian's chromium to look at it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import torch
import uvicorn
from torch import Tensor

from generation.spoken import image_classifier, language_model, made
from regard.data.corpora import open_corpus
from regard.data.tokenizers import train_tokenizer
from regard.generation.pictures import pixels
from regard.hub import ImageProcessor, Processor
from regard.models import Model
from regard.web.server import explorer

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
PAIRS = 48
STEPS = 70


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
    pixels_of = torch.cat([pixels(model, one.pillow()) for one in pictures])
    return learnt(model, pixels_of, padded([[1, *target.encode(one.caption)] for one in pictures]), steps=12)


def small_models() -> dict[str, Model]:
    return {
        "en-ko": english_korean(),
        "shapes": shapes(),
        "speaker": language_model(max_len=4200),
        "images": image_classifier(),
    }


@contextmanager
def serving(models: dict[str, Model]) -> Iterator[str]:
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
        thread.join(10)
        listening.close()


class Tab:
    """One page of the explorer; whatever it complains about in the console is kept."""

    def __init__(self, page: Any, home: str) -> None:
        self.page, self.home, self.complaints = page, home, []  # type: ignore[var-annotated]
        page.on(
            "console", lambda message: message.type in ("error", "warning") and self.complaints.append(message.text)
        )
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on(
            "response", lambda answer: answer.status >= 400 and self.complaints.append(f"{answer.status} {answer.url}")
        )

    def open(self, **state: Any) -> Tab:
        """The page in a state, as a link would bring it."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.home}/#{urlencode({'lang': 'en', 'theme': 'light', **state})}")
        self.page.wait_for_selector("nav button[aria-selected=true]")
        self.settled()
        return self

    def settled(self) -> None:
        """Nothing is on its way any more, and what came is drawn."""
        self.page.wait_for_selector('#app[aria-busy="false"]')
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    @property
    def state(self) -> dict[str, str]:
        return {name: values[0] for name, values in parse_qs(urlsplit(self.page.url).fragment).items()}

    def tabs(self) -> list[str]:
        return [each.get_attribute("data-view") for each in self.page.query_selector_all("nav button")]

    def box(self, selector: str = ".stage .sheet") -> dict[str, float]:
        node = self.page.locator(selector).first
        node.scroll_into_view_if_needed()
        return node.bounding_box()

    def over(self, x: float, y: float, selector: str = ".stage .sheet") -> None:
        """The pointer at a place of the sheet."""
        box = self.box(selector)
        self.page.mouse.move(box["x"] + x, box["y"] + y)
        self.settled()

    def click(self, x: float, y: float, selector: str = ".stage .sheet") -> None:
        box = self.box(selector)
        self.page.mouse.click(box["x"] + x, box["y"] + y)
        self.settled()

    def tip(self) -> tuple[float, list[str]]:
        """The note at the pointer: its number, and what it is about."""
        self.page.wait_for_selector(".tip:visible")
        about = [each.inner_text() for each in self.page.query_selector_all(".tip .of")]
        return as_number(self.page.inner_text(".tip .num")), about

    def weight(self, row: int, col: int) -> float:
        """A weight in the reading beside the picture."""
        return as_number(self.page.inner_text(f'aside [data-weight="{row},{col}"]'))

    def texts(self) -> list[str]:
        """What a drawing made of SVG says."""
        return [each.text_content() for each in self.page.query_selector_all(".stage svg text")]

    def exported(self, kind: str) -> bytes:
        with self.page.expect_download() as waiting:
            self.page.click(f'[data-export="{kind}"]')
        return Path(waiting.value.path()).read_bytes()

    def speak_korean(self) -> None:
        self.page.click('[data-do="language"]')
        self.settled()


def as_number(text: str) -> float:
    return float(text.replace("−", "-").replace("∞", "inf"))
