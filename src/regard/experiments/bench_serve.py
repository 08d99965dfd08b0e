"""``regard bench serve``: a server under load from several concurrent HTTP clients.

Every client waits for its response before it sends the next request. The time of the first token is that of the first
text in a stream; beam search sends everything at the end. The clients use only the standard library.
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from ..errors import RegardError
from .benchmarking import format_table

PROMPTS = ("The teacher read a book.", "It is cold.", "The children play in the garden and sing.", "We will see.")


@dataclass(frozen=True)
class Load:
    """The contents of each request."""

    model: str
    max_tokens: int = 32
    beams: int | None = None  # None: a greedy stream from /v1/completions; else beam search by /v1/translate

    @property
    def path(self) -> str:
        return "/v1/completions" if self.beams is None else "/v1/translate"

    def body(self, prompt: str) -> dict[str, Any]:
        fields: dict[str, Any] = {"model": self.model, "max_tokens": self.max_tokens}
        if self.beams is not None:
            return {**fields, "text": prompt, "beams": self.beams}
        return {**fields, "prompt": prompt, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Timing:
    """One request: seconds to the first text and to the end, and the number of tokens; or the error."""

    first_s: float = 0.0
    whole_s: float = 0.0
    tokens: int = 0
    error: str = ""


@dataclass(frozen=True)
class LoadResult:
    """The results with one number of concurrent clients."""

    clients: int
    requests: int
    seconds: float
    requests_per_s: float
    tokens_per_s: float
    first_p50_s: float
    first_p99_s: float
    whole_p50_s: float
    whole_p99_s: float
    errors: dict[str, int]


@dataclass(frozen=True)
class ServeBench:
    url: str
    load: Load
    results: list[LoadResult] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        rows = [["clients", "requests/s", "tokens/s", "first p50, ms", "p99", "whole p50, ms", "p99", "errors"]]
        for x in self.results:
            times = (f"{1e3 * s:,.0f}" for s in (x.first_p50_s, x.first_p99_s, x.whole_p50_s, x.whole_p99_s))
            errors = ", ".join(f"{name}: {n}" for name, n in x.errors.items()) or "0"
            rows.append([str(x.clients), f"{x.requests_per_s:,.1f}", f"{x.tokens_per_s:,.0f}", *times, errors])
        load = f"{self.load.path}, at most {self.load.max_tokens} tokens"
        return f"{self.load.model} at {self.url}: {load}\n\n{format_table(rows)}"


def bench_serve(
    url: str,
    *,
    clients: Sequence[int] = (1, 8, 32),
    requests: int = 64,
    prompts: Sequence[str] = PROMPTS,
    model: str | None = None,
    max_tokens: int = 32,
    beams: int | None = None,
    api_key: str | None = None,
    timeout: float = 120.0,
    processes: int = 1,
    progress: Callable[[str], None] = lambda line: None,
) -> ServeBench:
    """Send ``requests`` requests to the server at ``url`` with each number of ``clients``, after one to warm up.

    The clients share ``processes`` processes, since a single one may be slower than the server; a script that uses
    several needs ``if __name__ == "__main__"``, as always where Python starts processes.
    """
    headers = {"Content-Type": "application/json"} | ({} if api_key is None else {"Authorization": f"Bearer {api_key}"})
    target = LoadTarget.of(url, timeout, headers, processes)
    load = Load(model or _first_model(target.connect(), headers, url), max_tokens, beams)
    bench = ServeBench(url, load)
    warm_up = _request(target.connect(), headers, load, prompts[0])
    if warm_up.error:
        raise RegardError(f"{url} cannot serve these requests: {warm_up.error}")
    for n in clients:
        progress(f"{n} clients, {requests} requests")
        bench.results.append(_run_load(target, load, prompts, n, requests))
    return bench


def client_processes() -> int:
    """How many processes of clients this machine has cores for, beside a server."""
    return max(1, (os.cpu_count() or 1) // 4)


def _run_load(target: LoadTarget, load: Load, prompts: Sequence[str], n: int, requests: int) -> LoadResult:
    clients = _shares(n, min(n, target.processes))
    starts = [requests * before // n for before in itertools.accumulate(clients, initial=0)]  # in proportion to clients
    spans = zip(clients, itertools.pairwise(starts), strict=True)
    jobs = [(target, load, prompts, share, stop - start, start) for share, (start, stop) in spans]
    if len(jobs) == 1:
        runs = [_run_clients(*jobs[0])]
    else:
        context = multiprocessing.get_context("spawn")
        arguments = (context.Barrier(len(jobs)),)
        with ProcessPoolExecutor(len(jobs), context, initializer=_set_barrier, initargs=arguments) as pool:
            runs = list(pool.map(_run_clients, *zip(*jobs, strict=True)))
    timings = [timing for run in runs for timing in run[2]]
    seconds = max(run[1] for run in runs) - min(run[0] for run in runs)
    good = [timing for timing in timings if not timing.error]
    first, whole = sorted(t.first_s for t in good), sorted(t.whole_s for t in good)
    quantiles = (percentile(first, 0.5), percentile(first, 0.99), percentile(whole, 0.5), percentile(whole, 0.99))
    errors = dict(Counter(timing.error for timing in timings if timing.error))
    tokens = sum(timing.tokens for timing in good)
    return LoadResult(n, len(timings), seconds, len(good) / seconds, tokens / seconds, *quantiles, errors)


def _shares(total: int, parts: int) -> list[int]:
    """``total`` in ``parts`` numbers that differ by at most 1."""
    return [total // parts + (number < total % parts) for number in range(parts)]


_barrier: Any = None  # lets the processes of a load start together


def _set_barrier(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def _run_clients(
    target: LoadTarget, load: Load, prompts: Sequence[str], n: int, requests: int, first: int
) -> tuple[float, float, list[Timing]]:
    """Send ``requests`` requests from number ``first`` on with n clients; returns when they began and ended."""
    numbers = itertools.count()

    def run_client(_: int) -> list[Timing]:
        connection, timings = target.connect(), list[Timing]()
        while (number := next(numbers)) < requests:
            timings.append(_request(connection, target.headers, load, prompts[(first + number) % len(prompts)]))
            if timings[-1].error:
                connection.close()  # the rest of the response would be read as the next one
        connection.close()
        return timings

    if _barrier is not None:
        _barrier.wait()
    start = time.monotonic()
    with ThreadPoolExecutor(n) as pool:
        timings = [timing for client in pool.map(run_client, range(n)) for timing in client]
    return start, time.monotonic(), timings


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that a ``share`` of the values do not exceed; 0 if there are none."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


@dataclass(frozen=True)
class LoadTarget:
    """The server under load, and the number of processes that send requests."""

    scheme: str
    host: str
    port: int | None
    timeout: float
    headers: dict[str, str]
    processes: int = 1

    @classmethod
    def of(cls, url: str, timeout: float, headers: dict[str, str], processes: int) -> LoadTarget:
        try:
            parts = urlsplit(url)
            scheme, host, port = parts.scheme, parts.hostname, parts.port
        except ValueError:  # such as a port above 65535
            scheme, host, port = "", None, None
        if host is None or scheme not in ("http", "https"):
            raise RegardError(f"{url} is not the address of a server, such as http://127.0.0.1:8017")
        return cls(scheme, host, port, timeout, headers, processes)

    def connect(self) -> HTTPConnection:
        kind = HTTPSConnection if self.scheme == "https" else HTTPConnection
        return kind(self.host, self.port, timeout=self.timeout)


def _first_model(connection: HTTPConnection, headers: dict[str, str], url: str) -> str:
    try:
        connection.request("GET", "/v1/models", headers=headers)
        response = connection.getresponse()
        document = json.loads(response.read())
        if response.status != 200:
            raise RegardError(f"{url} refuses the request: {_message(document)}")
        return str(document["data"][0]["id"])
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        raise RegardError(f"{url} does not serve the API: {error}; start it with regard serve --api RUN") from None
    finally:
        connection.close()


def _request(connection: HTTPConnection, headers: dict[str, str], load: Load, prompt: str) -> Timing:
    start = time.perf_counter()
    try:
        connection.request("POST", load.path, json.dumps(load.body(prompt)), headers)
        response = connection.getresponse()
        if response.status != 200:
            return Timing(error=f"{response.status} {_message(json.loads(response.read()))}")
        first, tokens = _read_response(response, is_stream=load.beams is None)
    except (OSError, HTTPException, ValueError, LookupError) as error:
        return Timing(error=f"{type(error).__name__}: {error}")
    end = time.perf_counter()
    return Timing((first or end) - start, end - start, tokens)


def _read_response(response: HTTPResponse, is_stream: bool) -> tuple[float, int]:
    """The time at which the first text arrived, and the number of tokens. An error in a stream raises ValueError."""
    if not is_stream:
        return 0.0, json.loads(response.read())["usage"]["completion_tokens"]
    first, tokens, is_complete = 0.0, 0, False
    for line in response:
        if line.startswith(b"data: [DONE]"):
            is_complete = True
        elif line.startswith(b"data: "):
            event = json.loads(line[6:])
            if "error" in event:
                raise ValueError(_message(event))
            if not first and any(choice.get("text") for choice in event.get("choices", ())):
                first = time.perf_counter()
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    if not is_complete:
        raise ValueError("the stream ended early")
    return first, tokens


def _message(document: Any) -> str:
    error = document.get("error", document) if isinstance(document, dict) else document
    return str(error.get("message", error) if isinstance(error, dict) else error)[:200]


@contextmanager
def start_server(run: str, device: str = "auto", program: Sequence[str] = ("-m", "regard")) -> Iterator[str]:
    """Context in which a process of its own, Python with ``program``, serves a run; yields the server's address."""
    words = [sys.executable, *program, "serve", "--api", run, "--port", "0", "--device", device]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, encoding="utf-8") as process:
        assert process.stderr is not None
        try:
            url = _read_address(process.stderr, run)
            # Keep reading, because a full pipe would block the server.
            threading.Thread(target=deque, args=(process.stderr, 0), daemon=True).start()
            yield url
        finally:
            process.terminate()
            process.wait()


def _read_address(messages: Iterable[str], run: str) -> str:
    """The address that a server prints when it has started."""
    last = "it printed nothing"
    for last in map(str.strip, messages):
        if (address := next((word for word in last.split() if word.startswith("http://")), None)) is not None:
            return address.rstrip("/").removesuffix("/v1")
    raise RegardError(f"the server of {run} did not start: {last}")
