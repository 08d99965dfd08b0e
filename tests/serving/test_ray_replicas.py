"""Replicas: what the front does where one is lost, and three of them on a Ray cluster of this machine."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import uvicorn

from child_process import child_process
from regard.cli import main
from regard.models import Model
from regard.serving import ray_replicas
from regard.serving.app import new_application, refusal_body
from regard.serving.operations import with_operations
from regard.serving.ray_replicas import ReplicaApp, open_replicas
from regard.serving.reloadable_app import ReloadableApp
from regard.serving.resumed_stream import ResumedStream
from regard.serving.serve_config import OperationsConfig
from regard.web.requests import Limits
from regard.web.server import server_config
from trust.promises import Tally, size

START = {"type": "http.response.start", "status": 200, "headers": []}
STREAM = {**START, "headers": [(b"content-type", b"text/event-stream; charset=utf-8")]}


class Lost(Exception):
    """As Ray says that an actor died."""


class FakeReplicas:
    """Each call answers with the next script: messages, and where a replica is lost, Lost."""

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts, self.bodies, self.n_cancelled = list(scripts), list[bytes](), 0

    def ask(self, scope: dict[str, Any], body: bytes) -> FakeReplicas:
        self.bodies.append(body)
        return self

    async def __aiter__(self) -> AsyncIterator[Any]:
        for message in self.scripts.pop(0):
            if message is Lost:
                raise Lost
            yield dict(message)

    def cancel(self) -> None:
        self.n_cancelled += 1


def bodies_of(*events: bytes) -> list[dict[str, Any]]:
    return [{"type": "http.response.body", "body": event, "more_body": True} for event in events]


def parts(*texts: str) -> list[dict[str, Any]]:
    """A whole response in pieces."""
    return bodies_of(*(text.encode() for text in texts))


def chunk(text: str, replica: int = 1, **fields: Any) -> bytes:
    """An event of a stream; every replica has an id of its own."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None, **fields}
    return b"data: " + json.dumps({"id": f"cmpl-{replica}", "created": replica, "choices": [choice]}).encode() + b"\n\n"


def chunks(*texts: str, replica: int = 1) -> list[dict[str, Any]]:
    return bodies_of(*(chunk(text, replica) for text in texts))


def asked(replicas: FakeReplicas, monkeypatch: pytest.MonkeyPatch, body: bytes = b"{}") -> list[Any]:
    monkeypatch.setattr(ray_replicas, "_PAUSE_SECONDS", 0)
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/x", "headers": [(b"content-length", b"2")], "app": object()}
    asyncio.run(ReplicaApp(replicas.ask, Lost)(scope, receive, send))
    return sent


def test_a_whole_response_comes_from_one_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = FakeReplicas([START, Lost], [Lost], [START, *parts("a"), Lost], [START, *parts("b")])
    assert asked(replicas, monkeypatch) == [START, *parts("b")]
    assert replicas.n_cancelled == 4


def test_a_stream_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the events of the next replica are cut into; one that shuts down says so within the stream."""
    ending = bodies_of(b'data: {"error": {"message": "the server is shutting down", "code": "shutting_down"}}\n\n')
    done = bodies_of(b"data: [DONE]\n\n")
    replicas = FakeReplicas(
        [STREAM, *chunks("ab", "c"), Lost],
        [STREAM, *chunks("a", replica=2), *ending],
        [STREAM, *chunks("a", "bcde", "f", replica=3), *done],
    )
    assert asked(replicas, monkeypatch, b'{"stream": true, "n": 1}') == [STREAM, *chunks("ab", "c", "de", "f"), *done]
    assert len(set(replicas.bodies)) == 1
    assert "seed" in json.loads(replicas.bodies[0])  # so that what is drawn comes out the same


@pytest.mark.parametrize("start", [START, STREAM])
def test_a_response_that_is_complete_needs_its_replica_no_longer(
    start: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    end = {"type": "http.response.body", "body": b"", "more_body": False}
    replicas = FakeReplicas([start, *chunks("a"), end, Lost], [start, *chunks("a"), end])
    assert asked(replicas, monkeypatch, b'{"stream": true}') == [start, *chunks("a"), end]
    assert len(replicas.bodies) == 1


def test_an_accepted_request_is_not_refused_later(monkeypatch: pytest.MonkeyPatch) -> None:
    full, ending = {**START, "status": 429}, {**START, "status": 503}
    assert asked(FakeReplicas([full, *parts("full")]), monkeypatch)[0]["status"] == 429
    replicas = FakeReplicas([ending], [full], [Lost], [START, *parts("b")])
    assert asked(replicas, monkeypatch) == [START, *parts("b")]
    replicas = FakeReplicas([STREAM, *chunks("a"), Lost], [full, *parts("no")], [STREAM, *chunks("a", "b")])
    assert asked(replicas, monkeypatch) == [STREAM, *chunks("a", "b")]


class Written:
    """A stream of several choices as one replica cuts it into events."""

    def __init__(self, texts: list[str], is_chat: bool, seed: int) -> None:
        self._draw, self._is_chat, self._frame = random.Random(seed), is_chat, {"id": f"x-{seed}", "created": seed}
        self.events = [self._event(n, "", role="assistant") for n in range(len(texts))] if is_chat else []
        left = [(n, text) for n, text in enumerate(texts)]
        while left:
            n, text = left.pop(self._draw.randrange(len(left)))
            length = self._draw.randrange(1, 4)
            self.events.append(self._event(n, text[:length], is_end=length >= len(text)))
            left += [(n, text[length:])] if length < len(text) else []
        self.events += [self._event(n, "", is_end=True, attention=[n]) for n in range(len(texts))]
        self.events += [json.dumps({**self._frame, "choices": [], "usage": {"total_tokens": 9}}), "[DONE]"]

    def _event(self, index: int, text: str, is_end: bool = False, role: str = "", **more: Any) -> str:
        logs: dict[str, Any] = {"content": [{"token": x} for x in text]} if self._is_chat else {"tokens": list(text)}
        said = {"delta": ({"role": role} if role else {}) | {"content": text}} if self._is_chat else {"text": text}
        choice = {"index": index, **said, "logprobs": logs, "finish_reason": "stop" if is_end else None, **more}
        return json.dumps({**self._frame, "choices": [choice]})

    def to_bytes(self) -> list[bytes]:
        return [f"data: {event}\n\n".encode() for event in self.events]


def read_stream(body: bytes) -> dict[str, Any]:
    """What a client makes of it."""
    *events, last = [event.removeprefix(b"data: ") for event in body.split(b"\n\n")[:-1]]
    documents = [json.loads(event) for event in events]
    choices = [choice for document in documents for choice in document["choices"]]
    texts = [(x["index"], x["text"] if "text" in x else x["delta"].get("content", "")) for x in choices]
    lists = [(x["index"], x["logprobs"]["tokens" if "tokens" in x["logprobs"] else "content"]) for x in choices]
    logs = [(index, str(entry)) for index, entries in lists for entry in entries]
    return {
        "texts": {n: "".join(text for index, text in texts if index == n) for n, _ in texts},
        "log probs": {n: [entry for index, entry in logs if index == n] for n, _ in logs},
        "once": sorted(
            (x["index"], "role" in x.get("delta", {}), x.get("attention") or [])
            for x in choices
            if "role" in x.get("delta", {}) or "attention" in x
        ),
        "ends": sorted(x["index"] for x in choices if x["finish_reason"] and "attention" not in x),
        "usage": [document["usage"] for document in documents if "usage" in document],
        "frames": len({(document["id"], document["created"]) for document in documents}),
        "last": last,
    }


@pytest.mark.parametrize("is_chat", [False, True])
def test_streams_cut_differently_are_one_stream(is_chat: bool) -> None:
    texts = ["the cat sat on the mat", "고양이가 앉았다", "x"]
    wanted = read_stream(b"".join(Written(texts, is_chat, 0).to_bytes()))
    for seed in range(1, 60):
        sent = Written(texts, is_chat, 0).to_bytes()
        client = b"".join(sent[: random.Random(seed).randrange(1, len(sent))])
        for turn in range(3):  # two more are lost on the way
            resumed, again = ResumedStream(client), Written(texts, is_chat, 10 * seed + turn).to_bytes()
            until = len(again) if turn == 2 else random.Random(seed + turn).randrange(len(again))
            client += b"".join(map(resumed.rest_of, again[:until]))
            if client.endswith(b"[DONE]\n\n"):
                break
        assert read_stream(client) == wanted, seed


def test_where_no_replica_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = asked(FakeReplicas(*([Lost] for _ in range(20))), monkeypatch)
    assert sent[0]["status"] == 503


def test_deploy_needs_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "runs/a", "--on", "local"]) == 2
    assert "regard serve --api" in capsys.readouterr().err
    assert main(["deploy", "runs/a", "--on", "moon"]) == 2


# ---- on Ray


@pytest.fixture(scope="module")
def front(models: dict[str, Model], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Three replicas of two models on a cluster of two nodes, and the address of the front."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'regard[cluster]'")
    serve = pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'regard[cluster]'")
    from ray.cluster_utils import Cluster

    folder = tmp_path_factory.mktemp("runs")
    paths = [models[name].save(folder / name) for name in ("speaker", "translator")]
    node: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80 << 20}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        nodes = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        try:
            nodes.add_node(**node)
            nodes.wait_for_nodes()
            patch.setenv("RAY_ADDRESS", nodes.address)
            ray.init(nodes.address, log_to_driver=False, logging_level="error")
            app = open_replicas(paths, replicas=3, device="cpu")
            yield from serving(app)
        finally:
            serve.shutdown()
            ray.shutdown()
            nodes.shutdown()


def serving(app: Any) -> Iterator[str]:
    reloadable = ReloadableApp(app, lambda: app, print)
    layers = with_operations(reloadable, Limits(), "127.0.0.1", None, OperationsConfig(), refusal_body)
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(256)
    server = uvicorn.Server(server_config(layers, Limits(), 20))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)


@pytest.mark.slow
@pytest.mark.promise(1, "requests while one of three replicas is killed, all answered as by one process")
def test_a_replica_that_is_killed_loses_no_request(front: str, models: dict[str, Model], tally: Tally) -> None:
    n_requests = size(60, 1000)
    bodies = [{"prompt": f"the cat {n}", "model": "speaker", "temperature": 0, "max_tokens": 40} for n in range(10)]
    bodies += [{**body, "stream": True} for body in bodies]
    pids: dict[str, int] = {}

    with httpx.Client(base_url=front, timeout=300) as client:
        assert {model["id"] for model in client.get("/v1/models").json()["data"]} == {"speaker", "translator"}
        answer = client.post("/v1/translate", json={"model": "translator", "text": "the cat", "max_tokens": 5})
        assert answer.status_code == 200

        def ask(number: int) -> tuple[int, str]:
            body = bodies[number % len(bodies)]
            answer = client.post("/v1/completions", json=body)
            pids[answer.headers.get("x-replica", "")] = 1
            if answer.status_code != 200:
                return answer.status_code, answer.text
            if not body.get("stream"):
                return 200, answer.json()["choices"][0]["text"]
            assert answer.text.rstrip().endswith("data: [DONE]")
            lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
            return 200, "".join(json.loads(line)["choices"][0]["text"] for line in lines)

        with ThreadPoolExecutor(16) as pool:
            futures = [pool.submit(ask, number) for number in range(n_requests)]
            while sum(future.done() for future in futures) < n_requests // 4:
                time.sleep(0.05)
            os.kill(int(next(iter(pids))), signal.SIGKILL)
    expected = written_alone(models["speaker"], bodies[:10])
    for number, future in enumerate(futures):
        with tally.attempt(number):
            assert future.result() == (200, expected[number % 10])


@pytest.mark.slow
def test_the_command_serves_reloads_and_ends(front: str, models: dict[str, Model], tmp_path: Path) -> None:
    """Beside what another one deployed, which it neither replaces nor stops."""
    run = models["speaker"].save(tmp_path / "speaker")
    words = [sys.executable, "-m", "regard", "deploy", str(run), "--replicas", "1", "--port", "0", "--device", "cpu"]
    with child_process(words, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        url = next(found[0] for line in lines if (found := re.search(r"http://\S+?/", line)))
        body = {"model": "speaker", "prompt": "the cat", "temperature": 0, "max_tokens": 3}
        assert httpx.post(f"{url}v1/completions", json=body, timeout=60).status_code == 200
        assert httpx.get(f"{url}ready").status_code == 200
        os.kill(process.pid, signal.SIGHUP)
        assert any("models reloaded" in line for line in lines)
        assert httpx.post(f"{url}v1/completions", json=body, timeout=60).status_code == 200
        assert httpx.get(f"{front}/v1/models/translator", timeout=60).status_code == 200
        process.terminate()
        assert process.wait(60) == 143
    assert httpx.get(f"{front}/v1/models/translator", timeout=60).status_code == 200


def written_alone(model: Model, bodies: list[dict[str, Any]]) -> list[str]:
    from fastapi.testclient import TestClient

    with TestClient(new_application({"speaker": model}, Limits())) as client:
        return [client.post("/v1/completions", json=body).json()["choices"][0]["text"] for body in bodies]
