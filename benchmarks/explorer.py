"""The explorer with long texts, asked as a browser asks it: how long each answer takes.

    OMP_NUM_THREADS=2 python benchmarks/explorer.py

Bars: of 4,096 tokens through 12 layers × 12 heads any head in under 1 s; of 16,384 tokens any 256 × 256 tile in 50 ms
and the pooled overview in 3 s. Every head and every row is one that nobody has asked for before. What it takes in
memory and how large an answer is are tests (tests/web/test_size.py).
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import regard
from regard.text.processor import Processor
from regard.text.tokenizer_training import train_tokenizer

SENTENCE = "the cat sat on the mat. "


def long_model(folder: Path, length: int, n_layers: int, n_heads: int) -> Path:
    """A language model of characters with heads of 64 and random weights."""
    tokenizer = train_tokenizer([SENTENCE], "chars", None)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 64 * n_heads, "d_ff": 256 * n_heads, "n_layers": n_layers, "n_heads": n_heads}
    model = regard.build("gpt2", vocab_size=tokenizer.size, max_len=length, pad_id=0, bos_id=1, eos_id=2, **sizes)
    model.processor = Processor(source=tokenizer)
    return model.save(folder)


class Browser:
    """One connection; calling it asks, and gives the answer and its seconds."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)

    def __call__(self, path: str, body: Any = None) -> tuple[bytes, float]:
        start = time.perf_counter()
        method, content = ("GET", None) if body is None else ("POST", json.dumps(body))
        self._connection.request(method, path, content, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        found = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {found[:200]!r}")
        return found, time.perf_counter() - start


@contextmanager
def opened(length: int, n_layers: int, n_heads: int) -> Iterator[tuple[Browser, str, float]]:
    """A server with a look of so many tokens; its browser, the look's address, and the seconds it took to open."""
    with tempfile.TemporaryDirectory() as name:
        folder = long_model(Path(name) / "long", length, n_layers, n_heads)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "regard", "serve", str(folder), "--port", str(port), "--no-open"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            browser = waited_for(port)
            text = (SENTENCE * (length // len(SENTENCE) + 1))[:length]
            made, seconds = browser("/api/looks", {"model": "long", "text": text})
            yield browser, f"/api/looks/{json.loads(made)['id']}", seconds
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(20)


def waited_for(port: int) -> Browser:
    for _ in range(600):
        try:
            browser = Browser(port)
            browser("/api/models")
            return browser
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("the server did not come up within a minute")


def heads() -> dict[str, tuple[float, float]]:
    """Of 4,096 tokens: opening, and what a browser asks to show a head."""
    with opened(4096, 12, 12) as (ask, look, seconds):
        print(f"4,096 tokens, 12 × 12: opened in {seconds:.1f} s", flush=True)
        taken = []
        for layer, head in ((0, 0), (5, 7), (11, 11), (3, 2), (8, 9)):
            _, overview = ask(f"{look}/pooled?kind=self&layer={layer}&head={head}&h=320&w=320")
            _, tile = ask(f"{look}/tile?kind=self&layer={layer}&head={head}&r0=3840&r1=4096&c0=0&c1=256")
            taken.append(overview + tile)
        return {"any head of 4,096 tokens (the slowest of five)": (max(taken), 1.0)}


def tiles() -> dict[str, tuple[float, float]]:
    """Of 16,384 tokens."""
    with opened(16_384, 1, 2) as (ask, look, seconds):
        print(f"16,384 tokens, 1 × 2: opened in {seconds:.1f} s", flush=True)
        address = look + "/tile?kind=self&layer=0&head=0&r0={0}&r1={1}&c0={2}&c1={3}"
        ask(address.format(0, 256, 0, 256))
        taken = []
        for row, col in ((16_128, 0), (15_000, 14_000), (12_345, 111), (9_000, 8_900), (14_500, 7_000)):
            taken.append(ask(address.format(row, row + 256, col, col + 256))[1])
        print("tiles: " + ", ".join(f"{1e3 * one:.0f} ms" for one in taken), flush=True)
        _, overview = ask(f"{look}/pooled?kind=self&layer=0&head=1&h=500&w=500")
        return {
            "a 256 × 256 tile of 16,384 tokens (median)": (statistics.median(taken), 0.05),
            "the overview of 16,384 tokens": (overview, 3.0),
        }


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    found = heads() | tiles()
    for name, (seconds, bar) in found.items():
        print(f"{'PASS' if seconds < bar else 'FAIL'}  {name}: {seconds:.3f} s, bar {bar} s")
    return 0 if all(seconds < bar for seconds, bar in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
