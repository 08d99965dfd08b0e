"""What is around a served model: keys and their limits, other origins, health, metrics, the log, reloads, the end."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import uvicorn
from starlette.applications import Starlette

from child_process import child_process
from generation.spoken import language_model
from regard.cli import main
from regard.errors import RegardError, UsageError
from regard.models import Model
from regard.serving.app import new_application, refusal_body, serve_api
from regard.serving.metrics import RequestMetrics
from regard.serving.operations import with_operations
from regard.serving.reloadable_app import ReloadableApp
from regard.serving.serve_config import OperationsConfig, ServeConfig
from regard.web.api_keys import ApiKey, ApiKeys, add_key, digest, read_keys
from regard.web.requests import Limits
from regard.web.server import server_config

Said = pytest.CaptureFixture[str]
BODY = {"model": "speaker", "prompt": "the cat", "temperature": 0, "max_tokens": 3}


class Operated:
    """A server with everything around it, and a client of it."""

    def __init__(self, url: str, app: ReloadableApp, server: Any, thread: threading.Thread) -> None:
        self.app, self.server, self.thread, self.log = app, server, thread, list[dict[str, Any]]()
        self.client = httpx.Client(base_url=url, timeout=60, verify=False)

    def ask(self, key: str | None = None, **fields: Any) -> Any:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return self.client.post("/v1/completions", json=BODY | fields, headers=headers)

    def metrics_of(self, n_requests: int) -> Any:
        """The answer of /metrics once it counts ``n_requests``: one is counted just after its last byte has left."""
        end = time.monotonic() + 60
        while True:
            answer = self.client.get("/metrics")
            counts = re.findall(r'^regard_requests_total\{(?!.*route="/metrics").*\} ([0-9]+)$', answer.text, re.M)
            if sum(map(int, counts)) >= n_requests:
                return answer
            assert time.monotonic() < end, answer.text
            time.sleep(0.01)


@contextmanager
def operating(models: dict[str, Model], keys: ApiKeys | None = None, **fields: Any) -> Iterator[Operated]:
    config, limits = OperationsConfig(**fields), Limits()
    reloadable = ReloadableApp(new_application(models, limits), lambda: new_application(models, limits), print)
    app: Any = with_operations(reloadable, limits, "127.0.0.1", keys, config, refusal_body)
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    server = uvicorn.Server(server_config(app, limits, config.drain_seconds, config.tls))
    reloadable.is_shutting_down = lambda: bool(server.should_exit)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    scheme = "http" if config.tls is None else "https"
    served = Operated(f"{scheme}://127.0.0.1:{listening.getsockname()[1]}", reloadable, server, thread)
    app.write_log = (lambda line: served.log.append(json.loads(line))) if config.access_log else None
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.02)
    try:
        yield served
    finally:
        served.client.close()
        server.should_exit = True
        thread.join(20)
        listening.close()


@pytest.fixture(scope="module")
def speaker(models: dict[str, Model]) -> dict[str, Model]:
    return {"speaker": models["speaker"]}


# ---- keys


def test_a_key_is_shown_once_and_kept_as_its_digest(tmp_path: Path, capsys: Said) -> None:
    file = tmp_path / "keys.yaml"
    assert main(["serve", "--new-key", "web", "--keys", str(file), "--per-minute", "60"]) == 0
    web = capsys.readouterr().out.strip()
    assert main(["serve", "--new-key", "boss", "--keys", str(file), "--admin"]) == 0
    boss = capsys.readouterr().out.strip()
    text = file.read_text()
    assert web not in text
    assert boss not in text
    assert file.stat().st_mode & 0o077 == 0
    assert [(key.name, key.per_minute, key.admin) for key in read_keys(file)] == [
        ("web", 60, False),
        ("boss", None, True),
    ]
    keys = ApiKeys.read(file)
    found = keys.find([web])
    assert found is not None
    assert found.name == "web"
    assert keys.find([web + "x", ""], [digest(web)]) is None  # the digest itself opens nothing
    assert main(["serve", "--new-key", "web", "--keys", str(file)]) == 2
    assert "already has a key 'web'" in capsys.readouterr().err
    assert main(["serve", "--new-key", "a b", "--keys", str(file)]) == 2
    assert main(["serve", "--new-key", "web"]) == 2
    assert "needs the file to add it to: --keys F" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "lists no keys"),
        ("- name: a\n  sha256: 12", "0.sha256"),
        ("- name: a\n  sha256: " + "0" * 64 + "\n  may: all", "0.may"),
        ("a: [", "is not YAML"),
        ("- {name: a, sha256: " + "0" * 64 + "}\n- {name: a, sha256: " + "1" * 64 + "}", "the same name"),
    ],
)
def test_a_keys_file_that_is_wrong_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "keys.yaml").write_text(text)
    with pytest.raises(RegardError, match=words):
        ApiKeys.read(tmp_path / "keys.yaml")


def test_a_key_may_ask_so_often_a_minute() -> None:
    now = [0.0]
    key = ApiKey(name="slow", sha256=digest("slow"), per_minute=2)
    keys = ApiKeys([key], now=lambda: now[0])
    assert [keys.take(key) for _ in range(3)] == [0, 0, 30]
    now[0] = 29.0
    assert keys.take(key) == 1
    now[0] = 30.0
    assert keys.take(key) == 0
    now[0] = 3000.0
    assert [keys.take(key) for _ in range(3)] == [0, 0, 30]  # nothing is saved up beyond a minute


def test_keys_at_the_server(speaker: dict[str, Model], tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    slow, boss = add_key(file, "slow", per_minute=2), add_key(file, "boss", admin=True)
    with operating(speaker, ApiKeys.read(file), access_log="-") as served:
        assert served.ask().status_code == served.ask("wrong").status_code == 401
        assert served.ask().json()["error"]["type"] == "authentication_error"
        assert served.client.get("/metrics").status_code == 401
        assert served.client.get("/health").status_code == served.client.get("/ready").status_code == 200
        assert [served.ask(slow).status_code for _ in range(3)] == [200, 200, 429]
        answer = served.ask(slow)
        assert 1 <= int(answer.headers["retry-after"]) <= 30
        assert "is limited to 2 requests a minute" in answer.json()["error"]["message"]
        assert all(served.ask(boss).status_code == 200 for _ in range(4))
        # Only a key that may reloads.
        reload = {"url": "/admin/reload"}
        assert served.client.post(**reload).status_code == 401
        before = served.app.state.serving
        bearer = {"Authorization": f"Bearer {boss}"}
        assert served.client.get("/admin/reload", headers=bearer).status_code == 405
        assert served.app.state.serving is before
        assert served.client.post("/admin/reload", headers=bearer).json() == {"models": ["speaker"]}
        assert served.app.state.serving is not before
        assert served.ask(boss).status_code == 200
        text = served.client.get("/metrics", headers=bearer).text
        assert "regard_reloads_total 1" in text
        assert 'regard_key_requests_total{key="slow",status="429"} 2' in text
    assert {entry["key"] for entry in served.log} == {"", "slow", "boss"}


# ---- metrics and the log


def test_metrics_are_what_prometheus_reads(speaker: dict[str, Model]) -> None:
    with operating(speaker) as served:
        for _ in range(2):
            assert served.ask().status_code == 200
        served.ask(model="nobody")
        served.client.get("/nowhere/at/all")
        answer = served.metrics_of(4)
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    sample = re.compile(r'^[a-z_]+(\{[a-z]+="[^"]*"(,[a-z]+="[^"]*")*\})? [0-9.e+-]+$')
    assert all(sample.match(line) for line in answer.text.splitlines() if not line.startswith("# "))
    assert 'regard_requests_total{method="POST",route="/v1/completions",status="200"} 2' in answer.text
    assert 'regard_requests_total{method="POST",route="/v1/completions",status="404"} 1' in answer.text
    assert 'route="other",status="404"' in answer.text  # as many routes as there are, whatever is asked
    assert 'regard_request_seconds_count{route="/v1/completions"} 3' in answer.text
    assert 'regard_request_seconds_bucket{route="/v1/completions",le="+Inf"} 3' in answer.text
    assert 'regard_scheduler_finished_total{model="speaker"} 2' in answer.text
    assert 'regard_scheduler_waiting{model="speaker"} 0' in answer.text


def test_what_clients_make_up_is_counted_as_one() -> None:
    metrics = RequestMetrics()
    for number in range(3):
        metrics.observe(f"MADEUP{number}", "/v1/models", 405, "", 0.1, 0.1)
    assert 'regard_requests_total{method="other",route="/v1/models",status="405"} 3' in metrics.to_text({})


@pytest.mark.parametrize("log_texts", [False, True])
def test_the_log_holds_no_texts_unless_it_should(speaker: dict[str, Model], log_texts: bool) -> None:
    with operating(speaker, access_log="-", log_texts=log_texts) as served:
        given = served.client.post("/v1/completions?key=secret", json=BODY, headers={"X-Request-Id": "abc-1"})
        made = served.client.get("/v1/models", headers={"X-Request-Id": "no good"})
    assert given.headers["x-request-id"] == "abc-1"
    assert re.fullmatch("[0-9a-f]{16}", made.headers["x-request-id"])
    first = served.log[0]
    assert (first["id"], first["method"], first["path"], first["status"]) == ("abc-1", "POST", "/v1/completions", 200)
    assert first["client"] == "127.0.0.1"
    assert first["ms"] >= first["first_byte_ms"] > 0
    assert first["sent_bytes"] == len(given.content)
    written = json.dumps(served.log)
    assert ("the cat" in written) == log_texts
    assert ("secret" in written) is False


def test_a_request_that_is_cut_off_is_not_the_clients_error(speaker: dict[str, Model]) -> None:
    """Nobody hears an answer to half a body: it counts as one whose client has left, 499."""
    with operating(speaker, access_log="-") as served:
        with socket.create_connection((served.client.base_url.host, served.client.base_url.port)) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99\r\n\r\n{")
            while not served.app.metrics.in_progress:
                time.sleep(0.001)
        assert 'status="499"} 1' in served.metrics_of(1).text
        assert (served.log[0]["status"], served.log[0]["sent_bytes"]) == (499, 0)


def test_a_full_disk_costs_the_log_alone(speaker: dict[str, Model], capsys: Said) -> None:
    def write_log(line: str) -> None:
        raise OSError(28, "No space left on device")

    with operating(speaker) as served:
        served.server.config.app.write_log = write_log
        assert [served.ask().status_code for _ in range(2)] == [200, 200]
        served.metrics_of(2)
    errors = capsys.readouterr().err
    assert "the access log cannot be written: No space left on device" in errors
    assert "Traceback" not in errors


# ---- other origins and names, TLS


def test_other_pages_may_ask_only_where_it_is_allowed(speaker: dict[str, Model]) -> None:
    page = {"Origin": "https://app.example"}
    preflight = {**page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    with operating(speaker) as served:
        assert served.client.post("/v1/completions", json=BODY, headers=page).status_code == 403
        assert "access-control-allow-origin" not in served.client.options("/v1/completions", headers=preflight).headers
        assert served.client.get("/v1/models", headers={"Host": "api.example"}).status_code == 403
    with operating(speaker, allow_origin=["https://app.example"], allow_host=["api.example"]) as served:
        answer = served.client.post("/v1/completions", json=BODY, headers=page)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://app.example")
        assert served.client.options("/v1/completions", headers=preflight).status_code == 200
        other = {"Origin": "https://evil.example"}
        assert served.client.post("/v1/completions", json=BODY, headers=other).status_code == 403
        assert served.client.get("/v1/models", headers={"Host": "api.example"}).status_code == 200
    # An origin as people write it, and the headers that OpenAI's client for JavaScript sends from a page.
    preflight["Access-Control-Request-Headers"] = "authorization,content-type,x-stainless-lang,x-stainless-retry-count"
    with operating(speaker, allow_origin=["https://App.example/"]) as served:
        assert served.client.options("/v1/completions", headers=preflight).status_code == 200
        answer = served.client.post("/v1/completions", json=BODY, headers=page)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://app.example")
        assert answer.headers["access-control-expose-headers"] == "x-request-id, retry-after"


def test_tls(speaker: dict[str, Model], tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    try:
        subprocess.run([*words.split(), "-keyout", key, "-out", cert], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl makes the certificate, and is not installed")
    with operating(speaker, ApiKeys.single("a-secret"), tls_cert=cert, tls_key=key) as served:
        assert served.ask("a-secret").status_code == 200
        cookie = served.client.get("/?key=a-secret").headers["set-cookie"]
        assert cookie.endswith("; Secure")  # a browser sends it over TLS only
        address = (served.client.base_url.host, served.client.base_url.port)
        with (
            socket.create_connection(address) as raw,
            ssl.create_default_context(cafile=cert).wrap_socket(raw, server_hostname="localhost") as wrapped,
        ):
            assert wrapped.version() in ("TLSv1.2", "TLSv1.3")
    with pytest.raises(UsageError, match="--tls-cert F --tls-key F"):
        _ = OperationsConfig(tls_cert=cert).tls
    key.write_text("no key")
    with pytest.raises(UsageError, match="are not a certificate and its unencrypted key in PEM"):
        _ = OperationsConfig(tls_cert=cert, tls_key=key).tls


# ---- reload and the end


def test_a_reload_and_the_end_let_streams_finish(speaker: dict[str, Model]) -> None:
    with operating(speaker) as served:
        body = BODY | {"stream": True, "max_tokens": 300, "logit_bias": {"2": -100}}
        with served.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            old = served.app.state.serving
            asyncio.run_coroutine_threadsafe(served.app.reload(), loop_of(served)).result(60)
            assert served.app.state.serving is not old
            assert served.ask().status_code == 200
            served.server.should_exit = True
            rest = list(lines)
        assert "data: [DONE]" in rest
        served.thread.join(20)
        assert not served.thread.is_alive()
        assert not served.app.is_ready
        assert old.models["speaker"].scheduler.is_idle


def test_requests_that_the_end_cuts_off_leave_no_traceback(speaker: dict[str, Model], capsys: Said) -> None:
    with operating(speaker, drain_seconds=0) as served, ThreadPoolExecutor(1) as pool:
        gate, scheduler = threading.Event(), served.app.state.serving.models["speaker"].scheduler
        scheduler.run(gate.wait)
        asked = pool.submit(served.ask)
        while not scheduler.statistics.accepted:
            time.sleep(0.001)
        try:
            served.server.should_exit = True
            assert asked.result(60).status_code == 500
        finally:
            gate.set()  # or the scheduler would not end either
    errors = capsys.readouterr().err
    assert "Cancel 1 running task(s)" in errors
    assert "Traceback" not in errors


def loop_of(served: Operated) -> Any:
    """The event loop of a server in a thread: the one that its scheduler posts to."""
    return served.app.state.serving.models["speaker"].scheduler.post.__self__


def test_a_reload_that_fails_changes_nothing(speaker: dict[str, Model], tmp_path: Path) -> None:
    key = add_key(tmp_path / "keys.yaml", "boss", admin=True)
    with operating(speaker, ApiKeys.read(tmp_path / "keys.yaml")) as served:

        def fail() -> Any:
            raise RegardError("runs/a is damaged")

        served.app._open_app = fail
        answer = served.client.post("/admin/reload", headers={"Authorization": f"Bearer {key}"})
        assert (answer.status_code, answer.json()["error"]) == (
            422,
            "reload failed, the old models stay: runs/a is damaged",
        )
        assert served.ask(key).status_code == 200


def test_a_reload_frees_the_old_models() -> None:
    opened: list[weakref.ref[Any]] = []

    def open_app() -> Any:
        app = new_application({"speaker": language_model()}, Limits())
        opened.append(weakref.ref(app.state.serving.models["speaker"].model))
        return app

    async def reload_twice() -> list[bool]:
        messages, started = asyncio.Queue[Any](), asyncio.Event()

        async def send(message: Any) -> None:
            started.set()

        reloadable = ReloadableApp(open_app(), open_app, print)
        living = asyncio.create_task(reloadable({"type": "lifespan"}, messages.get, send))
        messages.put_nowait({"type": "lifespan.startup"})
        await started.wait()
        for _ in range(2):
            await reloadable.reload()
            await asyncio.gather(*reloadable._tasks)
        gc.collect()
        is_kept = [reference() is not None for reference in opened]
        messages.put_nowait({"type": "lifespan.shutdown"})
        await living
        return is_kept

    assert asyncio.run(reload_twice()) == [False, False, True]


def test_a_connection_that_stays_open_keeps_no_old_model(speaker: dict[str, Model]) -> None:
    opened: list[weakref.ref[Any]] = []

    def open_app() -> Any:
        app = new_application({"speaker": language_model()}, Limits())
        opened.append(weakref.ref(app.state.serving.models["speaker"].model))
        return app

    with operating(speaker) as served:
        served.app._open_app = open_app
        for _ in range(2):
            asyncio.run_coroutine_threadsafe(served.app.reload(), loop_of(served)).result(60)
            assert served.ask().status_code == 200
        while served.app._tasks:
            time.sleep(0.01)
        gc.collect()
        assert [reference() is not None for reference in opened] == [False, True]


def test_a_reload_that_fails_leaves_the_keys_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys.yaml"
    key = add_key(file, "old")
    keys, servers = ApiKeys.read(file), list[Any]()
    monkeypatch.setattr("regard.serving.app.run_until_signal", lambda server, listening: servers.append(server) or 0)
    is_damaged = False

    def open_app(paths: Any) -> Any:
        if is_damaged:
            raise RegardError("runs/a is damaged")
        app = Starlette()
        app.state.model_names = ["a"]
        return app

    serve_api(["runs/a"], port=0, api_key=keys, open_app=open_app, say=lambda line: None)
    reloadable = servers[0].config.app.app.app  # within the operations and the guard
    file.write_text(file.read_text().replace("name: old", "name: new"))
    is_damaged = True
    with pytest.raises(RegardError, match="damaged"):
        reloadable._open_app()
    assert keys.find([key]).name == "old"  # type: ignore[union-attr]
    is_damaged = False
    reloadable._open_app()
    assert keys.find([key]).name == "new"  # type: ignore[union-attr]


# ---- the config file and the command


def test_a_config_file_and_what_is_typed_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "models: [runs/a, runs/b]\napi: true\nport: 9000\nwaiting: 7\nallow_origin: ['https://a.example']\n"
    )
    given: dict[str, Any] = {}
    monkeypatch.setattr("regard.serving.serve_api", lambda paths, **options: given.update(options, paths=paths) or 0)
    monkeypatch.delenv("REGARD_API_KEY", raising=False)
    assert main(["serve", "--config", str(file), "--port", "0", "--drain-seconds", "5"]) == 0
    assert given["paths"] == ("runs/a", "runs/b")
    assert (given["port"], given["limits"].waiting, given["host"]) == (0, 7, "127.0.0.1")
    assert (given["operations"].allow_origin, given["operations"].drain_seconds) == (("https://a.example",), 5)
    file.write_text("models: [runs/c]\napi: true\n")
    assert given["operations"].models_now() == ("runs/c",)  # what a reload would open
    file.write_text("modles: [runs/c]\n")
    assert main(["serve", "--config", str(file)]) == 2
    assert f"{file}: there is no modles; did you mean models?" in capsys.readouterr().err
    file.write_text("models: [runs/c]\nport: many\n")
    assert main(["serve", "--config", str(file)]) == 2
    assert f"{file}: port='many': input should be a valid integer" in capsys.readouterr().err
    assert main(["serve", "runs/a", "--api", "--engine", "onxn"]) == 2
    assert "regard serve: engine='onxn': input should be 'torch', 'onnx' or 'ctranslate2'" in capsys.readouterr().err
    assert main(["serve"]) == 2
    assert "there is nothing to serve" in capsys.readouterr().err
    assert main(["serve", "runs/a", "--access-log", "-", "--no-open"]) == 2
    assert "--access-log needs --api" in capsys.readouterr().err
    with pytest.raises(UsageError, match="cannot be read"):
        ServeConfig.read(tmp_path / "none.yaml")


@pytest.mark.slow
def test_signals_of_a_whole_process(models: dict[str, Model], tmp_path: Path) -> None:
    """SIGHUP loads the run that stands there by now, SIGTERM ends it with 143."""
    run = models["speaker"].save(tmp_path / "speaker")
    words = [sys.executable, "-m", "regard", "serve", "--api", str(run), "--port", "0", "--access-log", "-"]
    with child_process(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        url = next(found[0] for line in lines if (found := re.search(r"http://\S+?/", line)))
        assert httpx.post(f"{url}v1/completions", json=BODY, timeout=60).status_code == 200
        os.kill(process.pid, signal.SIGHUP)
        assert any("models reloaded" in line for line in lines)
        assert "regard_reloads_total 1" in httpx.get(f"{url}metrics").text
        process.terminate()
        out, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert [json.loads(line)["path"] for line in out.splitlines()] == ["/v1/completions", "/metrics"]
