"""Response times of the explorer with long texts, for the requests that a browser sends.

    OMP_NUM_THREADS=2 python benchmarks/explorer.py

Bars: with 4,096 tokens through 12 layers × 12 heads any head in under 1 s; with 16,384 tokens any 256 × 256 tile in
50 ms and the pooled overview in 3 s. No head and no row is requested twice. tests/web/test_size.py tests the memory and
the sizes of responses.
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
from measuring import print_verdict

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


class Client:
    """One connection to the server; a call sends a request and returns the body of its response and the seconds."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)

    def __call__(self, path: str, body: Any = None) -> tuple[bytes, float]:
        start = time.perf_counter()
        method, data = ("GET", None) if body is None else ("POST", json.dumps(body))
        self._connection.request(method, path, data, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        content = response.read()
        if response.status != 200:
            raise RuntimeError(f"{path}: {response.status} {content[:200]!r}")
        return content, time.perf_counter() - start


@contextmanager
def open_look(length: int, n_layers: int, n_heads: int) -> Iterator[tuple[Client, str, float]]:
    """A server with a look at so many tokens: its client, the address of the look, and the seconds it took to open."""
    with tempfile.TemporaryDirectory() as name:
        folder = long_model(Path(name) / "long", length, n_layers, n_heads)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "regard", "serve", str(folder), "--port", str(port), "--no-open"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            client = wait_for_server(port)
            text = (SENTENCE * (length // len(SENTENCE) + 1))[:length]
            made, seconds = client("/api/looks", {"model": "long", "text": text})
            yield client, f"/api/looks/{json.loads(made)['id']}", seconds
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(20)


def wait_for_server(port: int) -> Client:
    for _ in range(600):
        try:
            client = Client(port)
            client("/api/models")
            return client
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("the server did not come up within a minute")


def time_heads() -> dict[str, tuple[float, float]]:
    """The requests with which a browser shows a head, for 4,096 tokens."""
    with open_look(4096, 12, 12) as (ask, look, seconds):
        print(f"4,096 tokens, 12 × 12: opened in {seconds:.1f} s", flush=True)
        times = []
        for layer, head in ((0, 0), (5, 7), (11, 11), (3, 2), (8, 9)):
            _, overview = ask(f"{look}/pooled?kind=self&layer={layer}&head={head}&h=320&w=320")
            _, tile = ask(f"{look}/tile?kind=self&layer={layer}&head={head}&r0=3840&r1=4096&c0=0&c1=256")
            times.append(overview + tile)
        return {"any head of 4,096 tokens (the slowest of five)": (max(times), 1.0)}


def time_tiles() -> dict[str, tuple[float, float]]:
    """A tile and the overview, for 16,384 tokens."""
    with open_look(16_384, 1, 2) as (ask, look, seconds):
        print(f"16,384 tokens, 1 × 2: opened in {seconds:.1f} s", flush=True)
        address = look + "/tile?kind=self&layer=0&head=0&r0={0}&r1={1}&c0={2}&c1={3}"
        ask(address.format(0, 256, 0, 256))
        times = []
        for row, col in ((16_128, 0), (15_000, 14_000), (12_345, 111), (9_000, 8_900), (14_500, 7_000)):
            times.append(ask(address.format(row, row + 256, col, col + 256))[1])
        print("tiles: " + ", ".join(f"{1e3 * x:.0f} ms" for x in times), flush=True)
        _, overview = ask(f"{look}/pooled?kind=self&layer=0&head=1&h=500&w=500")
        return {
            "a 256 × 256 tile of 16,384 tokens (median)": (statistics.median(times), 0.05),
            "the overview of 16,384 tokens": (overview, 3.0),
        }


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    times = time_heads() | time_tiles()
    passed = [print_verdict(s < bar, f"{name}: {s:.3f} s, bar {bar} s") for name, (s, bar) in times.items()]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
