"""The explorer as an ASGI application, and the process that serves it until a signal comes."""

from __future__ import annotations

import os
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

from ..errors import RegardError, UsageError
from .requests import UNFORESEEN, App, Limits, RequestGuard, RequestRefused, is_local

if TYPE_CHECKING:
    from ..models import Model
    from .served_models import ServedModel

STATIC = Path(__file__).with_name("static")
_SHUTDOWN_SECONDS = 3


def explorer(
    models: Sequence[ServedModel] | dict[str, Model],
    limits: Limits | None = None,
    host: str = "127.0.0.1",
    api_key: str | None = None,
) -> App:
    """The explorer of some open models as an ASGI application; with an ``api_key``, for those who have it."""
    from .served_models import name_models

    limits = limits or Limits()
    served = name_models(list(models.items())) if isinstance(models, dict) else list(models)
    return RequestGuard(_application(served, limits), limits, host, api_key)


def _application(models: list[ServedModel], limits: Limits) -> Any:
    from fastapi import FastAPI
    from fastapi.responses import FileResponse
    from fastapi.staticfiles import StaticFiles

    from .api import ExplorerState, router

    state = ExplorerState(models, limits)

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        state.workers.open()
        yield
        state.workers.close()

    # FastAPI's interactive documentation loads its scripts from elsewhere, so it is left out.
    app = FastAPI(title="regard", docs_url=None, redoc_url=None, openapi_url="/api/openapi.json", lifespan=lifespan)
    app.state.explorer = state
    app.include_router(router)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")

    async def page() -> Any:
        headers = {"Cache-Control": "no-cache"}
        return FileResponse(STATIC / "index.html", media_type="text/html; charset=utf-8", headers=headers)

    app.get("/", include_in_schema=False)(page)
    _add_error_handlers(app)
    return app


def _add_error_handlers(app: Any) -> None:
    """Every error becomes a status and {"error": "one sentence"}."""
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse, Response
    from starlette.exceptions import HTTPException  # the base class of FastAPI's

    from .api import NotModified, etag

    def handler(status_and_sentence: Callable[[Any], tuple[int, str]]) -> Callable[[Any, Any], Any]:
        async def handle(_: Any, error: Any) -> Any:
            status, sentence = status_and_sentence(error)
            content = {"error": " ".join(sentence.split()).encode("utf-8", "replace").decode()}
            return JSONResponse(content, status, headers={"Cache-Control": "no-store"})

        return handle

    async def not_modified(request: Any, _: Any) -> Any:
        return Response(status_code=304, headers={"ETag": etag(request)})

    app.add_exception_handler(NotModified, not_modified)
    app.add_exception_handler(RequestRefused, handler(lambda error: (error.status, str(error))))
    app.add_exception_handler(RequestValidationError, handler(lambda error: (422, sentence_of(error.errors()[0]))))
    app.add_exception_handler(HTTPException, handler(lambda error: (error.status_code, str(error.detail))))
    for kind in (ValueError, TypeError, RegardError):
        app.add_exception_handler(kind, handler(lambda error: (422, str(error) or type(error).__name__)))
    app.add_exception_handler(Exception, handler(lambda error: (500, UNFORESEEN.format(type(error).__name__))))


def sentence_of(problem: dict[str, Any]) -> str:
    """A validation error as a sentence, without the value that was sent: it may be long, or not JSON."""
    if problem.get("type") == "json_invalid":
        return "the body is not JSON"
    names = [str(part) for part in problem.get("loc", ()) if part not in ("body", "query", "path")]
    where = ".".join(names)[:100]
    message = str(problem.get("msg", "is not understood")).removeprefix("Value error, ")
    return f"{where}: {message[:1].lower()}{message[1:]}" if where else message


def serve(
    paths: Sequence[str | Path],
    *,
    host: str = "127.0.0.1",
    port: int = 8017,
    device: str = "auto",
    open_browser: bool = False,
    limits: Limits | None = None,
    api_key: str | None = None,
    needs_key: bool = True,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> int:
    """Load the models and serve them until a signal comes; returns the exit code of that signal.

    Requests get a few seconds to finish; work that still runs then ends with the process. Where other machines reach
    it, an ``api_key`` is needed, unless ``needs_key`` is False.
    """
    if api_key is not None and len(api_key) < 8:
        raise UsageError(f"--api-key of {len(api_key)} characters is too easy to guess; use at least 8")
    if not is_local(host) and api_key is None and needs_key:
        hint = "--api-key KEY (or REGARD_API_KEY) keeps out who does not know it; --no-api-key lets everyone in"
        raise UsageError(f"--host {host} lets other machines in: {hint}")
    try:
        import fastapi  # noqa: F401 - so that a missing library is one sentence
        import uvicorn
    except ImportError:
        raise RegardError("the explorer needs fastapi and uvicorn: pip install 'regard[serve]'") from None

    from .served_models import open_models

    limits = limits or Limits()
    listening = _listen(host, port)  # before the models are loaded: a port in use is reported at once
    app = _application(open_models(paths, device), limits)
    config = server_config(RequestGuard(app, limits, host, api_key), limits)
    listening.listen()  # a browser that opens the URL at once waits instead of being refused
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # one that a browser can open
    address = f"[{address}]" if ":" in address else address
    url = f"http://{address}:{listening.getsockname()[1]}/"
    say(f"regard: {url} (Ctrl-C ends it)")
    if not is_local(host):
        who = "everyone there" if api_key is None else "whoever knows the key"
        say(f"regard: other machines reach it too, at {host}, and {who} may use it")
    if api_key is not None:
        say("regard: a browser opens /?key=KEY; programs send the header Authorization: Bearer KEY")
        url += f"?{urlencode({'key': api_key})}"
    if open_browser:
        timer = threading.Timer(0.5, webbrowser.open, [url])
        timer.daemon = True
        timer.start()
    code = _run_until_signal(uvicorn.Server(config), listening)
    if app.state.explorer.workers.is_busy:  # a thread that computes cannot be stopped, and Python would wait for it
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def server_config(app: App, limits: Limits) -> Any:
    """uvicorn's settings: a connection must begin a request in time, and there are never more than can be opened."""
    import uvicorn
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    backlog, most = _connection_limits()

    class TimedProtocol(AutoHTTPProtocol):  # type: ignore[misc]  # one of two classes
        """A connection that is closed where the next request's first line and headers do not arrive in time.

        uvicorn's own limit is for the time between two requests, and ends with the first byte.
        """

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait_for_request(None)
            if len(self.connections) > most:
                transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            self._deadline.cancel()
            super().connection_lost(exc)

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

    return uvicorn.Config(
        app,
        http=TimedProtocol,
        backlog=backlog,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
    )


def _connection_limits() -> tuple[int, int]:
    """Connections accepted at a time, and open at most: asyncio goes into a loop where it runs out of descriptors."""
    try:
        import resource

        n_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        n_open = len(os.listdir("/proc/self/fd"))
    except (ImportError, OSError):  # Windows, macOS
        n_files, n_open = 256, 64
    backlog = max(4, min(128, n_files // 8))
    return backlog, max(4, n_files - n_open - backlog - 8)


def _run_until_signal(server: Any, listening: socket.socket) -> int:
    """Run uvicorn; on a signal it shuts down in order and then raises the signal again, which is recorded here."""
    signals: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.signal(number, lambda number, frame: signals.append(number)) for number in numbers]
    try:
        server.run([listening])
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
    return 128 + signals[-1] if signals else 0


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        why = error.strerror or str(error)
        if isinstance(error, socket.gaierror):
            raise RegardError(f"--host {host} is no address of this machine: {why}") from None
        raise RegardError(f"port {port} of {host} cannot be used: {why}; --port 0 takes any that is free") from None
    return listening
