"""Long texts through the running server: what it takes in memory, how large an answer is. Times are in benchmarks/."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

import regard
from generation.spoken import LINES
from regard.text.processor import Processor
from regard.text.tokenizer_training import train_tokenizer

from .test_serve import serving

pytestmark = pytest.mark.serial
MB = 1_000_000


def long_model(folder: Path, length: int, n_layers: int, n_heads: int) -> Path:
    """A language model of characters with heads of 64; what a look keeps does not depend on d_ff."""
    tokenizer = train_tokenizer(LINES, "chars", None)
    torch.manual_seed(0)
    width = 64 * n_heads
    sizes: dict[str, Any] = {"d_model": width, "d_ff": width // 4, "n_layers": n_layers, "n_heads": n_heads}
    model = regard.build("gpt2", vocab_size=tokenizer.size, max_len=length, pad_id=0, bos_id=1, eos_id=2, **sizes)
    model.processor = Processor(source=tokenizer)
    return model.save(folder)


class Asking:
    """One connection to a server, as a browser keeps it; every answer is weighed."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=300)
        self.largest = 0

    def __call__(self, path: str, body: Any = None) -> bytes:
        content = None if body is None else json.dumps(body)
        self._connection.request("GET" if body is None else "POST", path, content, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        found = answer.read()
        assert answer.status == 200, found
        self.largest = max(self.largest, len(found))
        return found


def resident(pid: int, what: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) * 1024 / MB


def test_4096_tokens_of_12_layers_and_12_heads(tmp_path: Path) -> None:
    folder = long_model(tmp_path / "long", 4096, 12, 12)
    text = ("the cat sat on the mat. " * 200)[:4096]
    with serving(folder) as (process, url):
        ask = Asking(url)
        ask("/api/looks", {"model": "long", "text": text[:40]})
        growths = []
        for shift in (0, 4):  # twice: what the allocator has just handed back would count as growth
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # the peak is counted from here
            before = resident(process.pid, "VmRSS")
            sent = json.loads(ask("/api/looks", {"model": "long", "text": text[shift:] + text[:shift]}))
            sizes = {"layers": 12, "heads": 12, "n_rows": 4096, "n_cols": 4096}
            assert sent["kinds"]["self"] == {**sizes, "normalised": True}
            growths.append(resident(process.pid, "VmHWM") - before)
        assert min(growths) < 400, f"opening a look took {growths} MB"
        at = f"/api/looks/{sent['id']}"
        for layer, head in ((0, 0), (5, 7), (11, 11), (3, "mean")):
            ask(f"{at}/pooled?kind=self&layer={layer}&head={head}&h=320&w=320")
            ask(f"{at}/tile?kind=self&layer={layer}&head={head}&r0=3840&r1=4096&c0=0&c1=256")
        ask(f"{at}/thumbnails?kind=self&layer=8&size=32")
        for start in (0, 2048):
            ask(f"{at}/labels?kind=self&axis=rows&start={start}&stop={start + 2048}")
        ask(f"{at}/top?kind=self&layer=11&head=2&row=4095&k=20")
        ask(f"{at}/walk?kind=self&layer=11&head=2&row=4095&col=17")
        ask(f"{at}/next?k=200")
        ask(f"{at}/html?kind=self&layer=2&head=1")
        assert ask.largest <= MB
        grown = resident(process.pid, "VmHWM") - before
        assert grown < 500, f"looking around took {grown:.0f} MB"


def test_16384_tokens(tmp_path: Path) -> None:
    folder = long_model(tmp_path / "long", 16_384, 1, 2)
    text = ("the cat sat on the mat. " * 700)[:16_384]
    with serving(folder) as (_, url):
        ask = Asking(url)
        sent = json.loads(ask("/api/looks", {"model": "long", "text": text}))
        at = f"/api/looks/{sent['id']}"
        for row, col in ((0, 0), (16_128, 0), (15_000, 14_000)):
            found = ask(f"{at}/tile?kind=self&layer=0&head=0&r0={row}&r1={row + 256}&c0={col}&c1={col + 256}")
            assert len(found) == 256 * 256 * 4
        assert len(ask(f"{at}/pooled?kind=self&layer=0&head=1&h=500&w=500")) == 500 * 500 * 4
        assert ask.largest <= MB
