"""A server with many clients: none of them changes another's text, leaves work behind, or is forgotten at the end.

`make trust` runs these at full size; alone: python tests/trust/promises.py tests/serving/test_under_load.py
"""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import httpx2 as httpx
import pytest
import torch

import regard
from generation.spoken import LINES, language_model, translator
from regard.models import Model
from regard.web.requests import Limits
from trust.promises import IS_FULL, Tally, size

from .served_api import TEXT, ServedApi, serving_api
from .test_batching import int8

WORDS = " ".join(LINES).split()
NO_END = {"logit_bias": {"2": -100}}  # a text is as long as it may be


@pytest.fixture(scope="module")
def loaded() -> Iterator[ServedApi]:
    models = {"speaker": language_model(max_len=1024), "translator": translator(), "int8": int8(translator())}
    with serving_api(models, Limits(waiting=1024)) as served:
        yield served


def send(api: ServedApi, body: dict[str, Any]) -> socket.socket:
    """A request on a connection of its own, whose response nobody reads yet."""
    host, port = api.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)), timeout=60)
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    client.sendall(f"{head}Connection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
    return client


def read_events(client: socket.socket) -> list[str]:
    """The lines of a stream up to its end."""
    client.settimeout(120)
    received = b""
    while piece := client.recv(65_536):
        received += piece
    client.close()
    return [line for line in received.decode().splitlines() if line.startswith("data: ")]


def wait_until(is_so: Any, seconds: float) -> float:
    """How long it took."""
    start = time.monotonic()
    while not is_so() and time.monotonic() < start + seconds:
        time.sleep(0.002)
    assert is_so(), f"not within {seconds} s"
    return time.monotonic() - start


# ---- neighbours


def greedy_body(number: int) -> dict[str, Any]:
    """Prompts of 1 to 12 words, every eighth of several hundred tokens, for one of three models."""
    draw = random.Random(number)
    model = ("speaker", "translator", "int8")[number % 3]
    n_words = draw.randrange(60, 100) if number % 8 == 0 and model == "speaker" else draw.randrange(1, 13)
    prompt = " ".join(draw.choice(WORDS) for _ in range(n_words))
    return {"model": model, "prompt": prompt, "max_tokens": draw.randrange(1, 24), "temperature": 0}


def hostile_body(number: int) -> dict[str, Any]:
    """What disturbs most: many draws, wide searches, long prompts and texts, formats, wrong fields."""
    body = greedy_body(number)
    more: list[dict[str, Any]] = [
        {"temperature": 3.0, "n": 8, "max_tokens": 60, "seed": number},
        {"beams": 2 + number % 12, "temperature": None, "max_tokens": 40},
        {"model": "speaker", "prompt": TEXT * 40, "max_tokens": 200, **NO_END},
        {"model": "speaker", "response_format": {"type": "regex", "pattern": "[0-9]{30}"}, "max_tokens": 40},
        {"max_tokens": 40, "logit_bias": {"5": 100, "6": 99}},
        {"model": "speaker", "prompt": [TEXT] * 20, "max_tokens": 5},
        {"temperature": -1},
    ]
    return body | more[number % len(more)]


def complete(client: Any, body: dict[str, Any]) -> str:
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


@contextmanager
def hostile_clients(api: ServedApi, n: int) -> Iterator[None]:
    """So many of them ask one thing after the other while the block runs; every third hangs up."""
    over = threading.Event()

    def ask(first: int) -> None:
        number = first
        with httpx.Client(base_url=api.url, timeout=60) as client:
            while not over.is_set():
                number += n
                with suppress(httpx.TimeoutException):  # who asks for too much may wait for long
                    if number % 3:
                        client.post("/v1/completions", json=hostile_body(number))
                    else:
                        send(api, hostile_body(number)).close()

    with ThreadPoolExecutor(n) as pool:
        asked = [pool.submit(ask, number) for number in range(n)]
        try:
            yield
        finally:
            over.set()
    for future in asked:
        future.result()


@pytest.mark.slow
@pytest.mark.promise(6, "the API: requests alone and among hostile neighbours, the same greedy text")
def test_a_text_is_the_same_among_hostile_neighbours(loaded: ServedApi, tally: Tally) -> None:
    bodies = [greedy_body(number) for number in range(size(24, 1000))]
    with httpx.Client(base_url=loaded.url, timeout=120) as client:
        alone = [complete(client, body) for body in bodies]
        with hostile_clients(loaded, 8), ThreadPoolExecutor(8) as pool:
            futures = [pool.submit(complete, client, body) for body in bodies]
            for body, wanted, future in zip(bodies, alone, futures, strict=True):
                with tally.attempt(body):
                    assert future.result() == wanted
    assert len(set(alone)) > len(alone) / 4  # texts that are all alike would show nothing


# ---- who leaves, and the end


@pytest.mark.slow
@pytest.mark.promise(6, "the API: clients that hang up, nothing is running 2 s later")
def test_who_hangs_up_leaves_nothing_running(tally: Tally) -> None:
    with serving_api({"speaker": language_model(max_len=4000)}) as api:
        scheduler, slowest = api.scheduler("speaker"), 0.0
        body = {"model": "speaker", "prompt": TEXT, "max_tokens": 3900, "temperature": 0, **NO_END}
        n_at_once, n_left = size(10, 100), size(20, 300)
        for start in range(0, n_left, n_at_once):  # more than can run: some are waiting when they hang up
            before = scheduler.statistics.accepted
            clients = [send(api, body | {"stream": number % 2 == 0}) for number in range(start, start + n_at_once)]
            wait_until(lambda n=before + n_at_once: scheduler.statistics.accepted == n, 60)
            clients[0].recv(10)
            for client in clients:
                client.close()
            for number in range(n_at_once):
                with tally.attempt(start + number):
                    slowest = max(slowest, wait_until(lambda: scheduler.is_idle, 2 if IS_FULL else 60))
        assert not scheduler.batches.n_rows
        assert scheduler.statistics.cancelled == n_left
        assert httpx.post(f"{api.url}/v1/completions", json=body | {"max_tokens": 2}).status_code == 200
    tally.measured = f"after {slowest:.2f} s"


@pytest.mark.slow
@pytest.mark.promise(6, "the API: streams through a SIGTERM, all finish")
def test_streams_finish_when_the_server_ends(tally: Tally) -> None:
    """Those that run, and those that were accepted and wait."""
    n_streams, n_tokens = size(40, 200), 60
    with serving_api({"speaker": language_model(max_len=400)}) as api:
        body = {"model": "speaker", "prompt": TEXT, "max_tokens": n_tokens, "temperature": 0, "stream": True, **NO_END}
        clients = [send(api, body) for _ in range(n_streams)]
        statistics = api.scheduler("speaker").statistics
        wait_until(lambda: statistics.accepted == n_streams, 60)
        n_finished = statistics.finished
        api.server.handle_exit(15, None)  # what SIGTERM calls
        with ThreadPoolExecutor(n_streams) as pool:
            for number, lines in enumerate(pool.map(read_events, clients)):
                with tally.attempt(number):
                    assert lines[-1] == "data: [DONE]"
                    assert json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "length"
        api.thread.join(20)
        assert not api.thread.is_alive()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{api.url}/v1/models")
    tally.measured = f"{n_finished} had finished before it"


@pytest.mark.serial  # it measures milliseconds
@pytest.mark.promise(6, "the API: a full queue, 429 within 50 ms")
def test_a_full_queue_is_429_with_a_time(models: dict[str, Model], tally: Tally) -> None:
    with serving_api({"speaker": models["speaker"]}, Limits(waiting=1)) as api:
        gate, scheduler = threading.Event(), api.scheduler("speaker")
        scheduler.run(gate.wait)
        body = {"model": "speaker", "prompt": TEXT, "max_tokens": 2}
        held = send(api, body)
        wait_until(lambda: scheduler.statistics.accepted == 1, 60)
        seconds = []
        with httpx.Client(base_url=api.url, timeout=60) as client:
            client.get("/v1/models")  # the connection is there
            for number in range(size(5, 200)):
                with tally.attempt(number):
                    start = time.perf_counter()
                    answer = client.post("/v1/completions", json=body)
                    seconds.append(time.perf_counter() - start)
                    assert answer.status_code == 429
                    assert int(answer.headers["Retry-After"]) >= 1
                    assert answer.json()["error"]["code"] == "queue_full"
                    assert seconds[-1] < 0.05 or not IS_FULL  # other tests run beside the short version
        gate.set()
        with held:
            assert held.recv(20).startswith(b"HTTP/1.1 200")
    assert min(seconds) < 0.05
    tally.measured = f"at most {1e3 * max(seconds):.0f} ms"


# ---- attention


@pytest.mark.slow
@pytest.mark.promise(6, "the API: attention on request, within 1e-5 of regard.look")
def test_attention_under_load_is_that_of_look(loaded: ServedApi, tally: Tally) -> None:
    """Of texts and heads drawn by lot, while others write."""
    model, furthest = loaded.state.models["speaker"].model, 0.0
    tokenizer = model.processor.tokenizer

    def ask(number: int) -> tuple[dict[str, Any], Any]:
        body = greedy_body(3 * number) | {"attention": {"layers": [number % 2], "heads": [number % 4]}}
        answer = httpx.post(f"{loaded.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return body, answer.json()["choices"][0]["attention"]

    with hostile_clients(loaded, 2), ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ask, range(size(8, 200))))
    for body, seen in found:
        with tally.attempt(body):
            prompt = tokenizer.encode(body["prompt"], special=False)
            written = regard.generate(model, body["prompt"], max_new_tokens=body["max_tokens"]).tokens[0]
            look = regard.look(model, [*prompt, *(token for token in written if token != model.config.eos_id)])
            exact = look.weights(layer=seen["layers"][0], head=seen["heads"][0])
            off = float((torch.tensor(seen["weights"][0][0]) - exact).abs().max())
            furthest = max(furthest, off)
            assert off <= 1e-5
    tally.measured = f"at most {furthest:.1e} off"
