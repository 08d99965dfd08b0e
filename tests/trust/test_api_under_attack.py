"""`regard serve --api` as a process, among clients with wrong keys, too much, and numbers that are none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .promises import Tally, size
from .test_server_under_attack import (
    CPU_SECONDS,
    JSON_HEAD,
    MORE_BYTES,
    PIECE,
    SECONDS,
    TEXT,
    Answer,
    Server,
    chunked,
    plain,
    start_server,
)

KEY = "a-key-of-the-test"
PROGRAM = f"""
import os, sys
print(os.getpid(), file=sys.stderr, flush=True)
from regard.serving import serve_api
sys.exit(serve_api([sys.argv[1]], port=0, api_key={KEY!r}))
"""


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Server]:
    with start_server(PROGRAM, tmp_path_factory.mktemp("api") / "speaker", request) as started:
        yield started
        assert complete(started, {"prompt": TEXT}).status == 200


def ask(server: Server, path: str, body: bytes, key: str = KEY) -> Answer:
    head = f"{JSON_HEAD}\nAuthorization: Bearer {key}\nContent-Length: {len(body)}"
    return server.ask(head, body, path)


def complete(server: Server, fields: dict[str, Any]) -> Answer:
    """Python writes NaN and Infinity as JSON does not."""
    body = json.dumps({"model": "speaker", "max_tokens": 2, **fields}).encode()
    return ask(server, "/v1/completions", body)


KEYED = f"{JSON_HEAD}\nAuthorization: Bearer {KEY}"
REFUSED: dict[str, Callable[[Server], Answer]] = {
    "a wrong key": lambda api: ask(api, "/v1/completions", b"{}", key="guessed-by-somebody"),
    "a key of 60 kB": lambda api: ask(api, "/v1/completions", b"{}", key="k" * 60_000),
    "no key, 300 MB": lambda api: api.ask(f"{JSON_HEAD}\nContent-Length: 300000000", plain(PIECE, 3000)),
    "300 MB": lambda api: api.ask(f"{KEYED}\nContent-Length: 300000000", plain(PIECE, 3000), "/v1/completions"),
    "in chunks": lambda api: api.ask(f"{KEYED}\nTransfer-Encoding: chunked", chunked(PIECE, 3000), "/v1/completions"),
    "100,000 prompts": lambda api: complete(api, {"prompt": ["the cat"] * 100_000}),
    "100,000 token ids": lambda api: complete(api, {"prompt": [7] * 100_000}),
    "100,000 lists of ids": lambda api: complete(api, {"prompt": [[7]] * 100_000}),
    "a prompt of 4 MB": lambda api: complete(api, {"prompt": "a" * 4_000_000}),
    "100,000 stop strings": lambda api: complete(api, {"prompt": TEXT, "stop": ["x"] * 100_000}),
    "100,000 biases": lambda api: complete(api, {"prompt": TEXT, "logit_bias": {str(n): 1 for n in range(100_000)}}),
    "100,000 messages": lambda api: ask(
        api,
        "/v1/chat/completions",
        json.dumps({"model": "speaker", "messages": [{"role": "user", "content": "a"}] * 100_000}).encode(),
    ),
    "4 MB of brackets": lambda api: ask(api, "/v1/completions", b"[" * 4_000_000),
    "deep objects": lambda api: ask(api, "/v1/completions", b'{"a":' * 200_000),
    "a deep schema": lambda api: complete(api, {"prompt": TEXT, "response_format": _nested(400)}),
    "NaN": lambda api: complete(api, {"prompt": TEXT, "temperature": float("nan")}),
    "infinity": lambda api: complete(api, {"prompt": TEXT, "top_p": float("inf")}),
    "NaN in a bias": lambda api: complete(api, {"prompt": TEXT, "logit_bias": {"5": float("nan")}}),
    "a length of 30 digits": lambda api: api.ask(f"{KEYED}\nContent-Length: {'9' * 30}", b"{}", "/v1/completions"),
}


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return {"type": "json_schema", "json_schema": {"name": "deep", "schema": schema}}


@pytest.mark.serial  # it measures memory
@pytest.mark.promise(6, "the API: wrong keys, 300 MB, 100,000 prompts, deep JSON, NaN: 4xx within 100 ms and 20 MB")
def test_the_api_refuses_at_once(api: Server, tally: Tally) -> None:
    assert complete(api, {"prompt": TEXT}).status == 200  # the first of each imports something
    for ask_once in REFUSED.values():
        ask_once(api)
    before, slowest, largest = api.memory(), 0.0, 0
    for name, ask_again in [case for case in REFUSED.items() for _ in range(size(1, 20))]:
        api.forget_peak()
        cpu = api.cpu
        with tally.attempt(name):
            answer = ask_again(api)
            assert 400 <= answer.status < 500, f"{name}: {answer.status}"
            more, cpu = api.memory("VmHWM") - before, api.cpu - cpu
            slowest, largest = max(slowest, answer.seconds), max(largest, more)
            assert more < MORE_BYTES, f"{name}: {more / 1e6:.1f} MB more"
            assert cpu < CPU_SECONDS, f"{name}: {cpu:.2f} s of the processor"
            assert answer.seconds < SECONDS, f"{name}: {answer.seconds:.2f} s"
    tally.measured = f"at most {1000 * slowest:.0f} ms, {largest / 1e6:.0f} MB"


@pytest.mark.promise(6, "the API: refusals by the thousand, memory flat")
def test_refusals_leave_nothing_behind(api: Server, tally: Tally) -> None:
    small = [name for name in REFUSED if "MB" not in name and name != "in chunks" and "100,000" not in name]
    growth = []
    for n in (size(30, 500), size(60, 2000)):
        before = api.memory()
        for number in range(n):
            with tally.attempt(name := small[number % len(small)]):
                assert 400 <= REFUSED[name](api).status < 500
        growth.append(api.memory() - before)
    tally.measured = f"{growth[1] / 1e6:+.1f} MB"
    assert growth[1] < 6_000_000
