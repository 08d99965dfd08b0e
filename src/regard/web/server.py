"""The explorer as an ASGI application, and the process that serves it until a signal arrives."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import sys
import threading
import webbrowser
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from ..errors import BadOutput, RegardError, UsageError
from .api_keys import ApiKeys
from .requests import HAS_LONG_HEADERS, INTERNAL_ERROR, App, Limits, RequestGuard, RequestRefused, is_local

if TYPE_CHECKING:
    from ..models import Model
    from .served_models import ServedModel

STATIC = Path(__file__).with_name("static")
_SHUTDOWN_SECONDS = 3
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
_ALTERNATIVE = re.compile(r"\[|^constrained-")  # how pydantic names the types of a union: list[constrained-str]


def explorer(
    models: Sequence[ServedModel] | dict[str, Model],
    limits: Limits | None = None,
    host: str = "127.0.0.1",
    api_key: str | ApiKeys | None = None,
) -> App:
    """The explorer over loaded models as an ASGI application; ``api_key``, if given, is required of every request."""
    from .served_models import name_models

    limits = limits or Limits()
    served = name_models(list(models.items())) if isinstance(models, dict) else list(models)
    return RequestGuard(explorer_application(served, limits), limits, host, api_key)


def explorer_application(models: list[ServedModel], limits: Limits) -> Any:
    """The FastAPI application; ``app.state.explorer`` is its ``ExplorerState``."""
    from fastapi import FastAPI
    from fastapi.responses import FileResponse, HTMLResponse
    from fastapi.staticfiles import StaticFiles

    from .api import ExplorerState, router
    from .chapter_pages import chapter_page, picture_file

    state = ExplorerState(models, limits)

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        state.workers.open()
        yield
        state.workers.close()

    # FastAPI's interactive documentation is off: it loads scripts from other sites.
    app = FastAPI(title="regard", docs_url=None, redoc_url=None, openapi_url="/api/openapi.json", lifespan=lifespan)
    app.state.explorer = state
    app.include_router(router)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")

    async def page() -> Any:
        headers = {"Cache-Control": "no-cache"}
        return FileResponse(STATIC / "index.html", media_type="text/html; charset=utf-8", headers=headers)

    async def picture(name: str) -> Any:
        return FileResponse(picture_file(name))

    async def chapter(language: str, number: int, theme: str = "light") -> Any:
        return HTMLResponse(chapter_page(number, language, theme))

    app.get("/", include_in_schema=False)(page)
    app.get("/learn/images/{name}", include_in_schema=False)(picture)
    app.get("/learn/{language}/{number}", include_in_schema=False)(chapter)
    _add_error_handlers(app)
    return app


def _add_error_handlers(app: Any) -> None:
    """Turn every exception into a status and {"error": message}."""
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse, Response
    from starlette.exceptions import HTTPException  # the base class of FastAPI's

    from .api import NotModified, etag

    def status_of(error: Any) -> tuple[int, str]:
        match error:
            case RequestRefused():
                return error.status, str(error)
            case RequestValidationError():
                return 422, sentence_of(main_problem(error))
            case HTTPException():
                return error.status_code, str(error.detail)
            case BadOutput():
                return 500, str(error)
            case ValueError() | TypeError() | RegardError():
                return 422, str(error) or type(error).__name__
        return 500, INTERNAL_ERROR.format(type(error).__name__)

    async def handle(request: Any, error: Any) -> Any:
        if isinstance(error, NotModified):
            return Response(status_code=304, headers={"ETag": etag(request)})
        status, sentence = status_of(error)
        content = {"error": " ".join(sentence.split()).encode("utf-8", "replace").decode()}
        headers = {"Cache-Control": "no-store", **(getattr(error, "headers", None) or {})}  # Allow, of a 405
        return JSONResponse(content, status, headers=headers)

    ours = (NotModified, RequestRefused, RegardError)
    for kind in (*ours, RequestValidationError, HTTPException, ValueError, TypeError, Exception):
        app.add_exception_handler(kind, handle)


def main_problem(error: Any) -> dict[str, Any]:
    """The problem of a request to report: a value that is wrong rather than another type that a field may have."""
    problems: list[dict[str, Any]] = error.errors()
    return next((x for x in problems if not x["type"].endswith(("_type", "_parsing"))), problems[0])


def sentence_of(problem: dict[str, Any]) -> str:
    """A validation error as one sentence. The value itself is left out: it may be long, or not JSON."""
    if problem.get("type") == "json_invalid":
        return "the body is not JSON"
    if tuple(problem.get("loc", ())) == ("body",) and problem.get("type") in ("model_attributes_type", "missing"):
        return "the body is not a JSON object sent with the header Content-Type: application/json"
    names = [str(part) for part in problem.get("loc", ()) if part not in ("body", "query", "path")]
    where = ".".join(name for name in names if not _ALTERNATIVE.search(name))[:100]
    message = str(problem.get("msg", "is invalid")).removeprefix("Value error, ")
    return f"{where}: {message[:1].lower()}{message[1:]}" if where else message


def serve(
    paths: Sequence[str | Path],
    *,
    host: str = "127.0.0.1",
    port: int = 8017,
    device: str = "auto",
    open_browser: bool = False,
    limits: Limits | None = None,
    api_key: str | ApiKeys | None = None,
    needs_key: bool = True,
    tls: tuple[Path, Path] | None = None,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> int:
    """Load the models and serve them until a signal arrives; returns that signal's exit code.

    After the signal, requests get a few seconds to finish; then the process exits. If ``host`` is reachable from other
    machines, an ``api_key`` is required unless ``needs_key`` is False. ``tls`` holds the certificate file and its key
    file.
    """
    check_key(host, api_key, needs_key)
    uvicorn = import_uvicorn("the explorer", "serve")
    from .served_models import open_models

    limits = limits or Limits()
    listening = listen(host, port)  # before the models are loaded: a port in use is reported at once
    app = explorer_application(open_models(paths, device), limits)
    config = server_config(RequestGuard(app, limits, host, api_key), limits, tls=tls)
    listening.listen()  # from now on a browser waits for the server instead of being refused
    url = url_of(host, listening, tls)
    say(f"regard: {url} (press Ctrl-C to stop)")
    for line in who_can_reach(host, has_key=api_key is not None):
        say(f"regard: {line}")
    if api_key is not None:
        say("regard: open /?key=KEY in a browser; programs send the header Authorization: Bearer KEY")
        url += f"?{urlencode({'key': api_key})}" if isinstance(api_key, str) else ""
    if open_browser:
        timer = threading.Timer(0.5, webbrowser.open, [url])
        timer.daemon = True
        timer.start()
    code = run_until_signal(uvicorn.Server(config), listening)
    return end_process(code, is_busy=app.state.explorer.workers.is_busy)


def import_uvicorn(what: str, extra: str) -> Any:
    """Import the libraries of a server; a missing one is reported in one line."""
    try:
        import fastapi  # noqa: F401 - needed later
        import uvicorn
    except ImportError:
        raise RegardError(f'{what} needs fastapi and uvicorn: pip install "regard[{extra}]"') from None
    return uvicorn


def who_can_reach(host: str, has_key: bool) -> list[str]:
    """A line that says who can reach the server from other machines; none if the host is local."""
    who = "anyone with the key" if has_key else "anyone"
    return [] if is_local(host) else [f"reachable from other machines ({host}): {who} can use it"]


def end_process(code: int, is_busy: bool) -> int:
    """Return the exit code; exit at once if a thread still computes: it cannot be stopped, and Python would wait."""
    if is_busy:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def check_key(host: str, api_key: str | ApiKeys | None, needs_key: bool) -> None:
    """Refuse a key that is too short, and a public host without a key unless ``needs_key`` is False."""
    if isinstance(api_key, str) and len(api_key) < 8:
        raise UsageError(f"--api-key of {len(api_key)} characters is too easy to guess; use at least 8")
    if not is_local(host) and api_key is None and needs_key:
        hint = "protect it with --api-key KEY (or REGARD_API_KEY), or let anyone in with --no-api-key"
        raise UsageError(f"--host {host} lets other machines in: {hint}")


def url_of(host: str, listening: socket.socket, tls: tuple[Path, Path] | None = None) -> str:
    """The URL of a listening socket, in a form that a browser can open."""
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    address = f"[{address}]" if ":" in address else address
    return f"http{'s' * (tls is not None)}://{address}:{listening.getsockname()[1]}/"


def server_config(
    app: App, limits: Limits, shutdown_seconds: int = _SHUTDOWN_SECONDS, tls: tuple[Path, Path] | None = None
) -> Any:
    """uvicorn's settings, with limits on idle connections, on header sizes and on the number of connections.

    After a signal, requests get ``shutdown_seconds`` to finish.
    """
    import uvicorn

    backlog, max_connections = _connection_limits()
    config = uvicorn.Config(
        app,
        http=_timed_protocol(limits, max_connections),
        backlog=backlog,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=shutdown_seconds,
        **({} if tls is None else {"ssl_certfile": tls[0], "ssl_keyfile": tls[1]}),
    )
    logging.getLogger("uvicorn.error").addFilter(_is_no_cancellation)
    return config


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """Drop the tracebacks of requests that did not finish in the time they get at the end."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def _timed_protocol(limits: Limits, max_connections: int) -> type:
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class TimedProtocol(AutoHTTPProtocol):  # type: ignore[misc]  # one of two classes
        """Closes a connection if the next request's first line and headers do not arrive in time, or if its client
        does not read what it has been sent.

        uvicorn's own timeout covers the time between two requests and ends with the first byte. httptools has no limit
        on the size of headers, so those past ours are dropped as they arrive.
        """

        def data_received(self, data: bytes) -> None:
            # httptools drops the body of a request that offers an upgrade, as Java's client does; none is accepted.
            super().data_received(_UPGRADE.sub(b"\r\nX-Offer:", data))

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._n_header_bytes = 0

        def on_header(self, name: bytes, value: bytes) -> None:
            self._n_header_bytes += len(name) + len(value)
            if self._n_header_bytes <= limits.header_bytes:
                super().on_header(name, value)
            else:
                self.scope[HAS_LONG_HEADERS] = True

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait_for_request(None)
            if len(self.connections) > max_connections:
                transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            self._deadline.cancel()
            if self.flow.write_paused:
                self._unread.cancel()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._unread = self.loop.call_later(limits.stream_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            self._unread.cancel()
            super().resume_writing()

        def on_response_complete(self) -> None:
            last = self.cycle
            super().on_response_complete()
            self._deadline.cancel()
            self._wait_for_request(last)

        def _wait_for_request(self, last: Any) -> None:
            self._deadline = self.loop.call_later(limits.header_seconds, self._close_without_request, last)

        def _close_without_request(self, last: Any) -> None:
            if self.cycle is last:
                self.transport.abort()

    return TimedProtocol


def _connection_limits() -> tuple[int, int]:
    """The accept backlog and the maximum number of connections: asyncio spins when file descriptors run out."""
    try:
        import resource

        n_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        n_open = len(os.listdir("/proc/self/fd"))
    except (ImportError, OSError):  # Windows, macOS
        n_files, n_open = 256, 64
    backlog = max(4, min(128, n_files // 8))
    return backlog, max(4, n_files - n_open - backlog - 8)


def run_until_signal(server: Any, listening: socket.socket) -> int:
    """Run uvicorn until a signal arrives; returns 128 + its number. uvicorn re-raises the signal after shutdown."""
    signals: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.signal(number, lambda number, frame: signals.append(number)) for number in numbers]
    try:
        server.run([listening])
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
    return 128 + signals[-1] if signals else 0


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        why = error.strerror or str(error)
        if isinstance(error, socket.gaierror):
            raise RegardError(f"--host {host} is not an address of this machine: {why}") from None
        raise RegardError(f"cannot listen on port {port} of {host}: {why}; --port 0 picks a free one") from None
    return listening
