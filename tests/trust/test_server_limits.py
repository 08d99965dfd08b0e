"""A server among clients that mean no good: what they cost is bounded, and others are answered meanwhile."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from PIL import Image
from starlette.testclient import TestClient

from generation.spoken import image_classifier, language_model
from regard import cli
from regard.models import Model
from regard.web import explorer
from regard.web import server as web_server
from regard.web.requests import Limits, RequestGuard
from web.served import HOME, TEXT, asking, opened, refusal


@pytest.fixture(scope="module")
def model() -> Model:
    return language_model(max_len=1024)


@pytest.fixture(scope="module")
def client(model: Model) -> Iterator[TestClient]:
    with asking({"speaker": model}) as client:
        yield client


@contextmanager
def serving(app: Any, limits: Limits) -> Iterator[tuple[str, int]]:
    """The address of a server with the settings of `regard serve`."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = uvicorn.Server(web_server.server_config(app, limits))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    try:
        yield listening.getsockname()
    finally:
        server.should_exit = True
        thread.join(60)
        listening.close()


def solid_image(side: int) -> str:
    out = io.BytesIO()
    Image.new("RGB", (side, side), "red").save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


# ---- memory


def test_images_and_thumbnails_are_counted() -> None:
    """A solid image is small as a file, and large when it is decoded."""
    app = explorer({"images": image_classifier()}, limits := Limits(kept_bytes=50_000_000))
    sessions = app.app.state.explorer.sessions  # type: ignore[attr-defined]
    with TestClient(app, base_url=HOME) as client:
        sent = opened(client, "images", image=solid_image(1500))
        session = sessions.get(sent["id"])
        assert max(session.look.image.size) <= 640, "as large as the page shows it"
        before = session.n_bytes
        assert before > 640 * 640 * 3
        kind, sizes = next(iter(sent["kinds"].items()))
        for size in range(1, 5):
            answer = client.get(f"/api/looks/{sent['id']}/thumbnails?kind={kind}&layer=0&size={size}")
            assert answer.status_code == 200
        assert session.n_bytes >= before + sum(sizes["heads"] * n * n * 4 for n in range(1, 5))
        session.look_bytes = limits.kept_bytes  # of results about one look, another goes
        opened(client, "images")
        assert len(sessions) == 1


def test_results_about_a_look_are_forgotten_where_they_grow(model: Model) -> None:
    app = explorer({"speaker": model})
    with TestClient(app, base_url=HOME) as client:
        session = app.app.state.explorer.sessions.get(opened(client, "speaker")["id"])  # type: ignore[attr-defined]
    before = session.look_bytes
    for n in range(40):
        assert len(session.cache(n, lambda: b"x" * 1_000_000)) == 1_000_000
        assert session.n_bytes <= before + 16_000_000
    assert session.cache(39, lambda: b"") != b"", "the last one is still there"


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"{" + b",".join(b'"%d":1' % n for n in range(700_000)) + b"}", "strings"),
        (b'{"model": "speaker", "more": [' + b",".join([b"[]"] * 1_000_000) + b"]}", "lists"),
    ],
    ids=["keys", "lists"],
)
def test_a_body_of_very_many_values_is_not_parsed(client: TestClient, content: bytes, what: str) -> None:
    start = time.process_time()
    told = refusal(client.post("/api/looks", content=content, headers={"Content-Type": "application/json"}), 413)
    assert f" {what} is more than" in told
    assert time.process_time() - start < 0.5


def test_texts_with_quotes_and_brackets_are_parsed(client: TestClient) -> None:
    text = '"[{' * 300
    assert client.post("/api/looks", json={"model": "speaker", "text": text}).status_code == 200


def test_bodies_of_all_requests_together_are_limited(model: Model) -> None:
    body = json.dumps({"model": "speaker", "text": TEXT})
    with asking({"speaker": model}, Limits(held_bytes=len(body))) as client:
        for _ in range(3):  # what was answered is no longer counted
            answer = client.post("/api/looks", content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == 200
    with asking({"speaker": model}, Limits(held_bytes=len(body) - 1)) as client:
        assert "try again" in refusal(client.post("/api/looks", content=body), 429)


# ---- values


@pytest.mark.parametrize("origin", ["http://[", "http://[::1", "//[x]", "http://]"])
def test_an_origin_that_is_no_address(client: TestClient, origin: str) -> None:
    told = refusal(client.post("/api/looks", json={"model": "speaker"}, headers={"Origin": origin}), 403)
    assert "may not call" in told


@pytest.mark.parametrize("temperature", [1e-40, 5e-324, 1e-31])
def test_a_temperature_of_almost_nothing(client: TestClient, temperature: float) -> None:
    body = {"model": "speaker", "text": TEXT, "generate": {"temperature": temperature, "max_new_tokens": 2}}
    assert "at least 1e-30" in refusal(client.post("/api/looks", json=body), 422)
    body["generate"] = {"temperature": 1e-30, "max_new_tokens": 2}
    assert client.post("/api/looks", json=body).status_code == 200


class Panic(BaseException):
    """As a panic in Rust reaches Python."""


def test_a_stream_ends_also_where_rust_panics(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*_: Any) -> Any:
        raise Panic("index out of bounds")
        yield

    monkeypatch.setattr("regard.web.stream_writing._tokens_with_text", panic)
    app = explorer({"speaker": model})
    with TestClient(app, base_url=HOME, raise_server_exceptions=False) as client:
        answer = client.post("/api/stream", json={"model": "speaker", "text": TEXT})
    assert answer.status_code == 500


def test_a_damaged_tokenizer_ends_a_stream_with_a_sentence(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    class Backend:
        def __init__(self, backend: Any) -> None:
            self.backend = backend

        def __getattr__(self, name: str) -> Any:
            return getattr(self.backend, name)

        def decode(self, ids: list[int]) -> str:
            if len(ids) > 60:
                raise Panic("no such token")
            return str(self.backend.decode(ids))

    tokenizer = model.processor.source
    monkeypatch.setattr(tokenizer, "_backend", Backend(tokenizer._backend))
    with asking({"speaker": model}) as client:
        body = {"model": "speaker", "text": "the", "generate": {"max_new_tokens": 90}}
        answer = client.post("/api/stream", json=body)
        assert answer.status_code == 200
        *_, last = answer.text.splitlines()
        assert "no such token" in json.loads(last)["error"]


# ---- time


@pytest.mark.promise(6, "idle connections and half-sent headers closed")
def test_a_connection_must_begin_a_request_in_time(model: Model) -> None:
    limits = Limits(header_seconds=1.0)
    with serving(explorer({"speaker": model}, limits), limits) as address, ExitStack() as stack:
        kept = stack.enter_context(socket.create_connection(address, 60))
        kept.sendall(b"GET /api/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert kept.recv(12) == b"HTTP/1.1 200"
        half, idle = (stack.enter_context(socket.create_connection(address, 60)) for _ in range(2))
        half.sendall(b"GET /api/models HTTP/1.1\r\nHost: 127.0.0.1\r\nX-")
        kept.sendall(b"GET / HTTP")  # half of another request: uvicorn's own limit ends with the first byte
        for connection in (half, idle, kept):
            try:
                while connection.recv(65536):
                    pass
            except ConnectionResetError:
                pass


@pytest.mark.promise(6, "idle connections and half-sent headers closed")
def test_idle_connections_at_few_descriptors(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    n_open = len(list(Path("/proc/self/fd").iterdir()))
    with ExitStack() as stack, caplog.at_level(logging.WARNING):
        clients = [stack.enter_context(socket.socket()) for _ in range(60)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (n_open + 60 + 40, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        limits = Limits(header_seconds=5)
        address = stack.enter_context(serving(explorer({"speaker": model}, limits), limits))
        for connection in clients[:-1]:
            connection.connect(address)
        time.sleep(0.3)
        assert len(caplog.records) < 10
        for connection in clients[:-1]:
            connection.close()
        time.sleep(0.1)
        clients[-1].connect(address)
        clients[-1].sendall(b"GET /api/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert clients[-1].recv(12) == b"HTTP/1.1 200"


def test_who_reads_nothing_is_disconnected() -> None:
    """Else the rest of the response would be kept as long as the client likes."""
    has_ended, limits = threading.Event(), Limits(stream_seconds=2.0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        await send({"type": "http.response.start", "status": 200})
        try:
            while True:
                await send({"type": "http.response.body", "body": bytes(65_536), "more_body": True})
                await asyncio.sleep(0)
        finally:
            has_ended.set()

    with serving(RequestGuard(app, limits), limits) as address, socket.create_connection(address, 60) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        for _ in range(12):  # who reads slowly is not
            assert client.recv(1 << 20)
            assert not has_ended.wait(0.2)
        assert has_ended.wait(60)


@pytest.mark.promise(6, "clients that leave a stream: the model is free at once")
def test_a_look_whose_client_has_gone_ends(model: Model) -> None:
    """Both what computes and what waits in the queue."""
    app = explorer({"speaker": model}, limits := Limits())
    workers = app.app.state.explorer.workers  # type: ignore[attr-defined]
    body = {"model": "speaker", "text": TEXT, "generate": {"beam": 8, "max_new_tokens": 1000}}
    content = json.dumps(body).encode()
    head = "POST /api/looks HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json"
    head += f"\r\nContent-Length: {len(content)}"
    with serving(app, limits) as address:
        gone = [socket.create_connection(address, 60) for _ in range(3)]
        for connection in gone:
            connection.sendall(f"{head}\r\n\r\n".encode() + content)
        until = time.monotonic() + 60
        while workers._n_waiting < 3 and time.monotonic() < until:
            time.sleep(0.01)
        assert workers._n_waiting == 3
        for connection in gone:
            connection.close()
        start = time.monotonic()
        while workers.is_busy and time.monotonic() < start + 20:
            time.sleep(0.01)
        assert time.monotonic() - start < 2


def test_how_many_may_wait_is_an_option(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr("regard.web.serve", lambda paths, **options: given.update(options) or 0)
    assert Limits().waiting >= 200
    assert cli.main(["serve", "run", "--waiting", "7", "--no-open"]) == 0
    assert given["limits"].waiting == 7


# ---- who may ask


@pytest.mark.promise(6, "no key, no other machines: --host 0.0.0.0 and requests without the key refused")
def test_a_server_with_a_key_answers_those_who_have_it(model: Model) -> None:
    with TestClient(explorer({"speaker": model}, api_key="open sesame"), base_url=HOME) as client:
        for path in (
            "/",
            "/api/models",
            "/static/style.css",
            "/api/openapi.json",
            "/?key=wrong",
            "/api/models?key=open+sesame",
        ):
            assert "needs a key" in refusal(client.get(path), 401)
        for key in ("open sesame ", "Open Sesame", "", "open", "é"):
            answer = client.get("/api/models", headers={"Authorization": b"Bearer " + key.strip().encode() + b"x"})
            refusal(answer, 401)
        assert client.get("/api/models", headers={"Authorization": "Bearer open sesame"}).status_code == 200
        answer = client.get("/?key=open+sesame", follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert "sesame" not in cookie
        assert client.get("/").status_code == 200, "the cookie lets it in"
        assert client.get("/api/models").status_code == 200
        client.cookies.set("regard-key", "0" * 64)
        client.cookies.clear()
        refusal(client.get("/api/models", headers={"Cookie": "regard-key=" + "0" * 64}), 401)


@pytest.mark.promise(6, "no key, no other machines: --host 0.0.0.0 and requests without the key refused")
def test_other_machines_need_a_key(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REGARD_API_KEY", raising=False)
    assert cli.main(["serve", "nothing", "--host", "0.0.0.0", "--port", "0", "--no-open"]) == 2
    assert "--api-key KEY (or REGARD_API_KEY)" in capsys.readouterr().err
    for words in (["--no-api-key"], ["--api-key", "12345678"]):
        assert cli.main(["serve", "nothing", "--host", "0.0.0.0", "--port", "0", "--no-open", *words]) == 3
    monkeypatch.setenv("REGARD_API_KEY", "12345678")
    assert cli.main(["serve", "nothing", "--host", "0.0.0.0", "--port", "0", "--no-open"]) == 3
    monkeypatch.setenv("REGARD_API_KEY", "1234567")
    assert cli.main(["serve", "nothing", "--port", "0", "--no-open"]) == 2
    assert "too easy to guess" in capsys.readouterr().err
