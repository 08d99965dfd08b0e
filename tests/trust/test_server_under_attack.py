"""`regard serve` as a process, among clients that send too much, too slowly, too often, or under another's name."""

from __future__ import annotations

import json
import os
import random
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from generation.spoken import language_model

from .promises import IS_FULL, ROOT, Tally, size

TEXT = "the cat sat on the mat."
BODY_SECONDS = 1.0
PROGRAM = f"""
import os, sys
print(os.getpid(), file=sys.stderr, flush=True)
from regard.web.requests import Limits
from regard.web.server import serve
sys.exit(serve([sys.argv[1]], port=0, limits=Limits(body_seconds={BODY_SECONDS}, kept_looks=16)))
"""
# How long a refusal may take. A machine that runs other tests beside this one stretches the time on the clock, not
# the server's own.
SECONDS, CPU_SECONDS = (0.1 if IS_FULL else 60.0), 0.15
MORE_BYTES = 20_000_000


class Answer(NamedTuple):
    status: int
    body: bytes
    seconds: float

    def refused(self) -> None:
        assert 400 <= self.status < 500, self
        assert list(json.loads(self.body)) == ["error"]


class Server:
    """A running server, what it says, and what it costs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        self.pid, said = int(process.stderr.readline()), process.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", said)
        assert found, said
        self.process, self.address = process, ("127.0.0.1", int(found[1]))

    def ask(self, head: str, body: Iterator[bytes] | bytes = b"", path: str = "/api/looks") -> Answer:
        """Send a request until an answer comes, and read that to its end."""
        pieces = iter([body]) if isinstance(body, bytes) else body
        with socket.create_connection(self.address, 120) as connection:
            start = time.monotonic()
            connection.sendall(head.format(path=path).replace("\n", "\r\n").encode("latin-1") + b"\r\n\r\n")
            with suppress(ConnectionResetError, BrokenPipeError):
                for piece in pieces:
                    connection.sendall(piece)
                    if select.select([connection], [], [], 0)[0]:
                        break
            return read_answer(connection, start)

    def post(self, path: str, body: bytes, kind: str = "application/json") -> Answer:
        head = "POST {path} HTTP/1.1\nHost: 127.0.0.1\nConnection: close"
        return self.ask(f"{head}\nContent-Type: {kind}\nContent-Length: {len(body)}", body, path)

    def get(self, path: str, host: str = "127.0.0.1") -> Answer:
        return self.ask(f"GET {{path}} HTTP/1.1\nHost: {host}\nConnection: close", path=path)

    @property
    def cpu(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self, name: str = "VmRSS") -> int:
        """Bytes the process holds (`VmHWM`: held at most) without pages of files: a library's code is no request's."""
        said = Path(f"/proc/{self.pid}/status").read_text()
        total, of_files = (int(re.findall(rf"{field}:\s+(\d+)", said)[0]) for field in (name, "RssFile"))
        return 1024 * (total - of_files)

    def forget_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")


def read_answer(connection: socket.socket, start: float) -> Answer:
    received = b""
    with suppress(ConnectionResetError):
        while piece := connection.recv(1 << 20):
            received += piece
    assert received.startswith(b"HTTP/1.1 "), received[:100]
    return Answer(int(received[9:12]), received.partition(b"\r\n\r\n")[2], time.monotonic() - start)


@contextmanager
def start_server(program: str, folder: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """In the full version a process of its own; in the short one a fork, which need not import everything."""
    language_model(max_len=1024).save(folder)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    python = sys.executable if IS_FULL else request.getfixturevalue("bash").python
    process = subprocess.Popen([python, "-c", program, str(folder)], stderr=subprocess.PIPE, text=True, env=environment)
    try:
        yield Server(process)
        assert process.poll() is None, "it has ended"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Server]:
    with start_server(PROGRAM, tmp_path_factory.mktemp("served") / "speaker", request) as started:
        yield started
        assert started.get("/api/models").status == 200


# ---- any bytes


ODD = [None, True, -1, 0, 2**63, 1e308, 10**400, "", "\0", "\ud800", [], {}, [[[]]], {"a": {}}, "a" * 5000, [1, "x"]]


def raw_bodies(n: int) -> Iterator[tuple[str, bytes]]:
    """Requests with a field that is something else, a byte that has changed, an end that is missing; and any bytes."""
    draw = random.Random(17)
    whole: dict[str, Any] = {"model": "speaker", "text": TEXT, "generate": {"max_new_tokens": 3, "seed": 1}}
    fields = [*whole, "target", "image", "variant", "watch", "more"]
    for number in range(n):
        body = whole | {draw.choice(fields): draw.choice(ODD)}
        if number % 2:
            names = ("beam", "temperature", "top_k", "top_p", "max_new_tokens", "seed")
            body["generate"] = {"max_new_tokens": 2, draw.choice(names): draw.choice(ODD)}
        content = json.dumps(body).encode()
        match number % 5:
            case 0:
                content = draw.randbytes(draw.randrange(200))
            case 1:
                content = content[: draw.randrange(len(content))]
            case 2:
                changed = bytearray(content)
                for _ in range(draw.randrange(1, 4)):
                    changed[draw.randrange(len(changed))] = draw.randrange(256)
                content = bytes(changed)
        yield draw.choice(["/api/looks", "/api/stream"]), content


@pytest.mark.promise(6, "raw bodies, no server error")
def test_raw_bodies(server: Server, tally: Tally) -> None:
    kinds = [
        "application/json",
        "text/plain",
        "application/json; charset=utf-16",
        "multipart/form-data; boundary=x",
        "",
    ]
    for number, (path, body) in enumerate(raw_bodies(size(40, 1000))):
        with tally.attempt(body):
            answer = server.post(path, body, kinds[number % 7 if number % 7 < len(kinds) else 0])
            if answer.status != 200:
                answer.refused()


# ---- too much


def chunked(piece: bytes, n: int) -> Iterator[bytes]:
    for _ in range(n):
        yield b"%x\r\n%b\r\n" % (len(piece), piece)
    yield b"0\r\n\r\n"


def plain(piece: bytes, n: int) -> Iterator[bytes]:
    for _ in range(n):
        yield piece


JSON_HEAD = "POST {path} HTTP/1.1\nHost: 127.0.0.1\nConnection: close\nContent-Type: application/json"
PIECE = b" " * 100_000


def body_of(**fields: Any) -> bytes:
    return json.dumps({"model": "speaker", **fields}).encode()


TOO_MUCH: dict[str, Callable[[Server], Answer]] = {
    "300 MB": lambda server: server.ask(f"{JSON_HEAD}\nContent-Length: 300000000", plain(PIECE, 3000)),
    "300 MB in chunks": lambda server: server.ask(f"{JSON_HEAD}\nTransfer-Encoding: chunked", chunked(PIECE, 3000)),
    "100,000 prompts": lambda server: server.post("/api/looks", body_of(text=["the cat"] * 100_000)),
    "100,000 numbers": lambda server: server.post("/api/stream", body_of(text=[7] * 100_000)),
    "a prompt of 4 MB": lambda server: server.post("/api/looks", body_of(text="a" * 4_000_000)),
    "4 MB of brackets": lambda server: server.post("/api/stream", b"[" * 4_000_000),
    "4 MB of an image": lambda server: server.post("/api/looks", body_of(image="iVBO" * 1_000_000)),
    "a path of 1 MB": lambda server: server.ask("GET /{path} HTTP/1.1\nHost: 127.0.0.1", path="a" * 1_000_000),
    "headers of 1 MB": lambda server: server.ask(f"{JSON_HEAD}\n" + "\n".join(f"X-{n}: {n}" for n in range(80_000))),
    "a length of 30 digits": lambda server: server.ask(f"{JSON_HEAD}\nContent-Length: {'9' * 30}", b"{}"),
}


in_quiet = pytest.mark.serial if IS_FULL else lambda test: test  # where 100 ms are measured, nothing runs beside it


@pytest.mark.serial  # it measures memory
@pytest.mark.promise(6, "bodies of 300 MB, 100,000 prompts, a prompt of 4 MB: 4xx within 100 ms and 20 MB")
def test_too_much_is_refused_at_once(server: Server, tally: Tally) -> None:
    for body, status in ((body_of(text=TEXT), 200), (body_of(text=7), 422)):  # the first of each imports something
        assert server.post("/api/looks", body).status == status
    before, slowest, largest = server.memory(), 0.0, 0
    for name, ask in [case for case in TOO_MUCH.items() for _ in range(size(1, 20))]:
        server.forget_peak()
        cpu = server.cpu
        with tally.attempt(name):
            answer = ask(server)
            assert 400 <= answer.status < 500
            more, cpu = server.memory("VmHWM") - before, server.cpu - cpu
            slowest, largest = max(slowest, answer.seconds), max(largest, more)
            assert more < MORE_BYTES, f"{more / 1e6:.1f} MB more"
            assert cpu < CPU_SECONDS, f"{cpu:.2f} s of the processor"
            assert answer.seconds < SECONDS, f"{answer.seconds:.2f} s"
    tally.measured = f"at most {1000 * slowest:.0f} ms, {largest / 1e6:.0f} MB"


@in_quiet
@pytest.mark.promise(6, "slow and half-sent bodies: 408, others are answered meanwhile")
def test_slow_and_half_sent_bodies(server: Server, tally: Tally) -> None:
    n = size(10, 100)
    body = body_of(text=TEXT)
    head = f"{JSON_HEAD}\nContent-Length: {len(body)}\n\n".replace("\n", "\r\n").format(path="/api/looks").encode()
    start = time.monotonic()
    connections = [socket.create_connection(server.address, 30) for _ in range(n)]
    for connection in connections:
        connection.sendall(head + body[: len(body) // 2])
    for number in range(8):
        time.sleep(0.05)
        answered = select.select(connections, [], [], 0)[0]  # on a busy machine the time may be over
        for connection in connections[::2]:  # a byte at a time; the others send nothing more
            if connection not in answered:
                connection.sendall(body[number : number + 1])
    for number, connection in enumerate(connections):
        with tally.attempt("slow" if number % 2 == 0 else "half"), connection:
            connection.settimeout(max(0.01, start + 2 * BODY_SECONDS + SECONDS - time.monotonic()))
            assert read_answer(connection, start).status == 408
        if number == 0:
            with tally.attempt("somebody else"):
                assert server.get("/api/models").seconds < SECONDS


# ---- too often


def stream(server: Server, new_tokens: int, seed: int) -> Answer:
    return server.post("/api/stream", body_of(text=TEXT, generate={"max_new_tokens": new_tokens, "seed": seed}))


@pytest.mark.promise(6, "streams at once, all answered to the end")
def test_many_streams_at_once(server: Server, tally: Tally) -> None:
    n = size(16, 200)
    with ThreadPoolExecutor(n) as threads:
        for answer in [threads.submit(stream, server, 6, number) for number in range(n)]:
            with tally.attempt():
                assert answer.result().status == 200
                *_, last = answer.result().body.replace(b"\r\n", b"\n").strip().splitlines()
                assert b'"error"' not in last
                assert b'"look"' in answer.result().body


@pytest.mark.promise(6, "clients that leave a stream: the model is free at once")
def test_disconnects(server: Server, tally: Tally) -> None:
    body = body_of(text=TEXT, generate={"max_new_tokens": 900})
    head = f"{JSON_HEAD}\nContent-Length: {len(body)}\n\n".replace("\n", "\r\n").format(path="/api/stream").encode()
    before, n = server.memory(), size(8, 200)
    for _ in range(n):
        with tally.attempt(), socket.create_connection(server.address, 30) as connection:
            connection.sendall(head + body)
            assert connection.recv(12) == b"HTTP/1.1 200"
    with tally.attempt("the next one"):
        assert server.post("/api/looks", body_of(text=TEXT)).seconds < (2 if IS_FULL else 60)
        assert server.memory() - before < MORE_BYTES


def mixed_request(server: Server, number: int, look: str) -> None:
    at = f"/api/looks/{look}"
    match number % 10:
        case 0:
            assert server.post("/api/looks", body_of(text=TEXT, target=None)).status == 200
        case 1:
            assert stream(server, 3, number).status == 200
        case 2:
            assert server.get(f"{at}/tile?kind=self&layer=0&head={number % 4}&r0=0&r1=5&c0=0&c1=5").status == 200
        case 3:
            assert server.get(f"{at}/labels?kind=self&axis=rows").status == 200
        case 4:
            assert server.get(f"{at}/next?k={1 + number % 50}").status == 200
        case 5:
            assert server.get(f"/api/looks/{number}").status == 404
        case 6:
            assert server.post("/api/looks", b"{" * (number % 1000)).status == 422
        case 7:
            assert server.get("/").status == 200
        case 8:
            assert server.get("/api/models", host=f"{number}.example").status == 403
        case 9:
            assert server.post("/api/looks", body_of(text="a" * 100_000)).status == 413


@pytest.mark.promise(6, "mixed requests, memory flat")
def test_memory_stays_flat(server: Server, tally: Tally) -> None:
    def ask(number: int) -> None:
        mixed_request(server, number, look)

    n, warm_up = size(100, 10_000), size(200, 2000)  # 16 looks are kept, then one goes for each that comes
    growth = []
    with ThreadPoolExecutor(4) as threads:
        for first, last in ((0, warm_up), (warm_up, warm_up + n)):
            before = server.memory()
            for start in range(first, last, 100):
                look = json.loads(server.post("/api/looks", body_of(text=TEXT)).body)["id"]
                for number, answer in [(k, threads.submit(ask, k)) for k in range(start, start + 100)]:
                    if first:
                        with tally.attempt(number):
                            answer.result()
                    else:
                        answer.result()
            growth.append(server.memory() - before)
    tally.measured = f"{growth[1] / 1e6:+.1f} MB in {n:,} requests"
    assert growth[1] < 6_000_000


# ---- under another's name


def forged_hosts() -> Iterator[str]:
    names = (
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "127.0.0.2",
        "0.0.0.0",
        "127.1",
        "2130706433",
    )
    names += ("0x7f.1", "[::ffff:127.0.0.1]", "localhost.", "169.254.169.254", "10.0.0.1", "", "localhost@evil.example")
    for name in names:
        for port in ("", ":80", ":8017", ":x", ":99999"):
            yield name + port
    yield from (
        "localhost evil.example",
        "localhost,evil.example",
        "evil.example#localhost",
        "evil.example/localhost",
        "*",
    )


@pytest.mark.promise(6, "forged Host (DNS rebinding) and Origin refused")
def test_other_names_and_origins_are_refused(server: Server, tally: Tally) -> None:
    port = server.address[1]
    for host in forged_hosts():
        with tally.attempt(f"Host: {host}"):
            assert server.get("/api/models", host).status in (400, 403)
    local = f"127.0.0.1:{port}"
    origins = (
        "https://evil.example",
        "null",
        "http://localhost",
        f"http://127.0.0.1:{port + 1}",
        "http://[",
        "file://",
    )
    for origin in (
        *origins,
        f"http://evil.example/{local}",
        f"http://{local}.evil.example",
        f"http://{local}@evil.example",
    ):
        with tally.attempt(f"Origin: {origin}"):
            head = f"POST /api/looks HTTP/1.1\nHost: {local}\nConnection: close\nOrigin: {origin}\nContent-Length: 2"
            assert server.ask(head, b"{}").status == 403
    for head in (
        f"GET http://evil.example/api/models HTTP/1.1\nHost: evil.example\nX-Forwarded-Host: {local}",
        f"GET /api/models HTTP/1.1\nHost: {local}\nHost: evil.example",
        "GET /api/models HTTP/1.0",
        "GET /api/models HTTP/1.1",
    ):
        with tally.attempt(head):
            assert server.ask(f"{head}\nConnection: close").status in (400, 403)


def traversals() -> Iterator[str]:
    up = (
        "../",
        "..%2f",
        "%2e%2e/",
        "%2e%2e%2f",
        "..%5c",
        "..\\",
        "%252e%252e%252f",
        "....//",
        "%c0%ae%c0%ae/",
        ".%00./",
        "..;/",
    )
    for prefix in ("/static/", "/static/views/", "/api/looks/", "/"):
        for step in up:
            for depth in (1, 2, 4, 12):
                for target in ("server.py", "etc/passwd", "pyproject.toml"):
                    yield prefix + step * depth + target
    yield from (
        "/static//etc/passwd",
        "/static/%2fetc%2fpasswd",
        "//etc/passwd",
        "/static/C:/Windows/win.ini",
        "/static/%00",
    )


@pytest.mark.promise(6, "path traversal refused")
def test_no_path_leads_out(server: Server, tally: Tally) -> None:
    paths = list(traversals())
    for path in paths if IS_FULL else random.Random(5).sample(paths, 40):
        with tally.attempt(path):
            server.get(path).refused()
