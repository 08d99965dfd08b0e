"""What the server refuses, and that it does so before it works: hosts, bodies, texts, time, memory."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starlette.testclient import TestClient

import regard.web.served_models
from generation.spoken import language_model
from regard.models import Model
from regard.web import explorer
from regard.web.requests import Limits, RequestGuard, RequestRefused
from regard.web.served_models import name_models
from regard.web.sessions import WorkerPools

from .served import TEXT, asking, opened, refusal


def run_loop(work: Coroutine[Any, Any, None]) -> None:
    """In a thread of its own: in this one the browser of other tests keeps an event loop."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, work).result()


@pytest.fixture(scope="module")
def model() -> Model:
    return language_model()


@pytest.fixture(scope="module")
def client(model: Model) -> Iterator[TestClient]:
    with asking({"speaker": model}) as client:
        yield client


# ---- who asks


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8017", "localhost", "LOCALHOST:80", "[::1]", "[::1]:8017"])
def test_this_machine_is_answered(client: TestClient, host: str) -> None:
    assert client.get("/api/models", headers={"Host": host}).status_code == 200


@pytest.mark.promise(6, "forged Host (DNS rebinding) and Origin refused")
@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "127.0.0.1.evil.example", "evil.example:8017", "127.0.0.2", "10.0.0.1", "0.0.0.0"),
        *("", "localhost@evil.example", "127.0.0.1/evil", "[::1", "localhost, evil.example"),
    ],
)
def test_another_name_for_this_machine_is_not(client: TestClient, host: str) -> None:
    """A page of evil.example can have its name point here; its requests then say so."""
    assert "Host header" in refusal(client.get("/api/models", headers={"Host": host}), 403)
    assert "Host header" in refusal(client.get("/", headers={"Host": host}), 403)


def test_a_server_for_others_knows_addresses_but_no_names(model: Model) -> None:
    with asking({"speaker": model}, host="0.0.0.0") as client:
        for host, status in (("192.168.0.7:8017", 200), ("[fe80::1]", 200), ("evil.example", 403)):
            assert client.get("/api/models", headers={"Host": host}).status_code == status


@pytest.mark.promise(6, "forged Host (DNS rebinding) and Origin refused")
@pytest.mark.parametrize("origin", ["https://evil.example", "http://127.0.0.1:9999", "null", "http://localhost"])
def test_other_pages_may_not_ask(client: TestClient, origin: str) -> None:
    asked = {"model": "speaker", "text": TEXT}
    assert "may not call" in refusal(client.post("/api/looks", json=asked, headers={"Origin": origin}), 403)


def test_the_page_itself_may(client: TestClient) -> None:
    asked = {"model": "speaker", "text": TEXT}
    assert client.post("/api/looks", json=asked, headers={"Origin": "http://127.0.0.1"}).status_code == 200


def test_a_form_is_not_json(client: TestClient) -> None:
    """The one kind of body that another page could send without asking first."""
    content = json.dumps({"model": "speaker", "text": TEXT})
    refusal(client.post("/api/looks", content=content, headers={"Content-Type": "text/plain"}), 422)


# ---- how much


def test_a_large_body_is_refused_unread(client: TestClient) -> None:
    told = refusal(client.post("/api/looks", content=b" " * 8_000_001), 413)
    assert "8000001 bytes is more than the 8,000,000 allowed" in told
    for length in ("1" * 30, "-1", "1e3", "٣"):
        answer = client.post("/api/looks", content=b"{}", headers={b"Content-Length": length.encode()})
        assert answer.status_code in (400, 413)


def test_a_body_without_a_length_is_counted(client: TestClient) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(9):
            yield b" " * 1_000_000

    assert "is more than the 8,000,000 allowed" in refusal(client.post("/api/looks", content=pieces()), 413)


def ask_guard(guard: RequestGuard, *messages: dict[str, Any], wait: float = 0.0) -> list[dict[str, Any]]:
    """What a guard sends to a client that sends these messages and then, after ``wait`` seconds each, nothing."""
    sent: list[Any] = []

    async def talk() -> None:
        left = list(messages)

        async def receive() -> Any:
            if not left:
                await asyncio.sleep(wait)
                return {"type": "http.request", "body": b"", "more_body": True}
            return left.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "path": "/api/looks", "method": "POST", "headers": [(b"host", b"localhost")]}
        await guard(scope, receive, send)

    run_loop(talk())
    return sent


def test_a_body_that_trickles_is_given_up() -> None:
    async def never(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("the application was asked")

    guard = RequestGuard(never, Limits(body_seconds=0.05))
    first = {"type": "http.request", "body": b"{", "more_body": True}
    start, body = ask_guard(guard, first, wait=0.02)
    assert start["status"] == 408
    assert "within 0.05 s" in json.loads(body["body"])["error"]
    assert (b"connection", b"close") in start["headers"]


def test_long_texts_are_refused_before_they_are_tokenised(
    client: TestClient, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokenised(*_: Any) -> Any:
        raise AssertionError("the text was tokenised")

    monkeypatch.setattr(type(model.processor.source), "encode", tokenised)
    told = refusal(client.post("/api/looks", json={"model": "speaker", "text": "a" * 6145}), 413)
    assert told == "text has 6,145 characters; model 'speaker' reads at most 6,144"
    told = refusal(client.post("/api/looks", json={"model": "speaker", "text": "a" * 200_001}), 422)
    assert "at most 200000 characters" in told


def test_a_text_of_too_many_tokens_is_refused(model: Model) -> None:
    with asking({"speaker": model}, Limits(tokens=5)) as client:
        told = refusal(client.post("/api/looks", json={"model": "speaker", "text": TEXT}), 413)
    assert "the limit is 5" in told


def test_a_picture_is_refused_by_its_size_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import ImageFile

    from .served import picture

    encoded = picture((300, 200))
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda *_: pytest.fail("the picture was decoded"))
    with pytest.raises(RequestRefused, match="300 × 200 pixels, more than the 50,000 allowed"):
        regard.web.served_models.decode_image(encoded, Limits(pixels=50_000))


# ---- numbers that are none, and text that is none


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ('"generate": {"temperature": NaN}', "generate.temperature: input should be a finite number"),
        ('"generate": {"temperature": 1e400}', "generate.temperature: input should be a finite number"),
        ('"generate": {"temperature": -Infinity}', "generate.temperature"),
        ('"generate": {"top_p": NaN}', "generate.top_p"),
        ('"generate": {"beam": 1e400}', "generate.beam"),
        ('"generate": {"beam": 1e3}', "generate.beam: input should be less than or equal to 16"),
        ('"generate": {"max_new_tokens": 99999999999999999999999999}', "generate.max_new_tokens"),
        ('"variant": {"scale": NaN}', "variant.scale: input should be a finite number"),
        ('"variant": {"scale": 1e400}', "variant.scale: input should be a finite number"),
        ('"variant": {"off": [["self", NaN, 0]]}', "variant.off.0.1"),
        ('"image": NaN', "image"),
        ('"more": 1e400', "more: extra inputs are not permitted"),
    ],
)
def test_no_number_is_no_answer(client: TestClient, fields: str, words: str) -> None:
    content = f'{{"model": "speaker", "text": "the cat", {fields}}}'
    answer = client.post("/api/looks", content=content, headers={"Content-Type": "application/json"})
    assert words in refusal(answer, 422)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[", b"null", b"NaN", b"[1, 2]", b'"text"', b"\xff\xfe", b'{"model": "speaker", "text": "\\ud800"}'),
        *(b'{"model": "speaker", "text": "\xed\xa0\x80"}', b"[" * 100_000, b"1" * 10_000, b'{"model": {}}'),
    ],
)
def test_a_body_that_is_no_question(client: TestClient, content: bytes) -> None:
    answer = client.post("/api/looks", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422)
    refusal(answer, answer.status_code)


@pytest.mark.parametrize("text", ["\0", "🐈‍⬛ 👩‍👩‍👧 한글 שלום مرحبا", "\u202e\u200b", "a\r\n\tb", "é" * 40])
def test_any_text_is_a_text(client: TestClient, text: str) -> None:
    answer = client.post("/api/looks", json={"model": "speaker", "text": text})
    assert answer.status_code == 200, answer.text
    found = client.get(f"/api/looks/{answer.json()['id']}/labels?kind=self&axis=rows")
    assert found.status_code == 200
    assert len(found.json()) == answer.json()["kinds"]["self"]["n_rows"]


# ---- how long, and how many


def test_work_that_takes_too_long_is_given_up() -> None:
    async def work() -> None:
        workers, going_on = WorkerPools(Limits(model_seconds=0.05)), threading.Event()
        with pytest.raises(RequestRefused, match=r"longer than 0\.05 s"):
            await workers.run(going_on.wait)
        assert workers.is_busy
        never = asyncio.create_task(workers.run(lambda: pytest.fail("it was to be cancelled")))
        with pytest.raises(RequestRefused, match=r"longer than 0\.05 s"):  # it waited behind the first
            await never
        assert await workers.read(lambda: 7) == 7  # maps are read meanwhile
        workers._limits = Limits()
        going_on.set()
        assert await workers.run(lambda: 8) == 8
        workers.close()

    run_loop(work())


def test_only_so_many_may_wait() -> None:
    async def work() -> None:
        workers, going_on = WorkerPools(Limits(waiting=2)), threading.Event()
        tasks = [asyncio.create_task(workers.run(going_on.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(RequestRefused, match="2 requests are already waiting") as refused:
            await workers.read(lambda: 7)
        assert refused.value.status == 429
        going_on.set()
        await asyncio.gather(*tasks)
        assert await workers.read(lambda: 7) == 7
        assert not workers.is_busy
        workers.close()

    run_loop(work())


def test_a_stream_stops_when_nobody_listens() -> None:
    async def work() -> None:
        workers, made, heard = WorkerPools(Limits()), [], threading.Event()

        def pieces() -> Iterator[int]:
            for n in range(10_000):
                made.append(n)
                yield n
                heard.wait(0.01)

        stream = workers.stream(pieces)
        assert [await anext(stream) for _ in range(3)] == [0, 1, 2]
        await stream.aclose()
        heard.set()
        assert await workers.run(lambda: len(made)) < 5_000  # behind the stream in the same thread
        workers.close()

    run_loop(work())


def test_a_failure_that_nobody_foresaw_is_still_one_sentence(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("a secret")

    monkeypatch.setattr("regard.lens.look", broken)
    with TestClient(
        explorer(name_models([("speaker", model)])), "http://127.0.0.1", raise_server_exceptions=False
    ) as client:
        told = refusal(client.post("/api/looks", json={"model": "speaker", "text": TEXT}), 500)
    assert told == "internal error (KeyError); see the server's log"


# ---- how large an answer is


def test_no_answer_is_larger_than_a_megabyte() -> None:
    model = language_model(kind="chars", max_len=600)
    text = (TEXT * 30)[:600]
    with asking({"speaker": model}) as client:
        sent = opened(client, "speaker", text=text)
        size = sent["kinds"]["self"]["n_rows"]
        assert size == 600
        at = f"/api/looks/{sent['id']}"
        for path in (
            "tile?kind=self&layer=0&head=mean&r0=0&r1=256&c0=0&c1=256",
            "pooled?kind=self&layer=0&head=0&h=500&w=500",
            "pooled?kind=self&layer=0&head=0&h=512&w=512",
            "thumbnails?kind=self&layer=0&size=512",
            "labels?kind=self&axis=rows",
            "csv?kind=self&layer=0&head=0&r0=300&r1=556&c0=0&c1=256",
            "patterns?kind=self",
            "next?k=200",
            "walk?kind=self&layer=0&head=0&row=9&col=2",
        ):
            answer = client.get(f"{at}/{path}")
            assert answer.status_code == 200, (path, answer.text)
            assert len(answer.content) <= 1_000_000
        for path, words in (
            ("pooled?kind=self&layer=0&head=0&h=512&w=513", "w: input should be less than or equal to 512"),
            ("tile?kind=self&layer=0&head=0&r0=0&r1=257&c0=0&c1=1", "one response has at most 256"),
            ("csv?kind=self&layer=0&head=0&r0=0&r1=257&c0=0&c1=1", "one response has at most 256"),
        ):
            assert words in refusal(client.get(f"{at}/{path}"), 422)
