"""The application, and the process that runs it until somebody ends it."""

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

from ..errors import RegardError
from .request_limits import App, Limits, RequestGuard, RequestRefused, is_local

if TYPE_CHECKING:
    from ..models import Model
    from .served_models import ServedModel

STATIC = Path(__file__).with_name("static")
_LEAVING_SECONDS = 3
# Scripts of ours alone. Pictures that are drawn here become data: URLs, and SVG carries its styles with it.
_POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; style-src 'self' 'unsafe-inline';"
    " base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)


def explorer(
    models: Sequence[ServedModel] | dict[str, Model], limits: Limits | None = None, host: str = "127.0.0.1"
) -> App:
    """The explorer of some open models as an ASGI application."""
    from .served_models import name_models

    limits = limits or Limits()
    served = name_models(list(models.items())) if isinstance(models, dict) else list(models)
    return RequestGuard(_application(served, limits), limits, host)


def _application(models: list[ServedModel], limits: Limits) -> Any:
    from fastapi import FastAPI
    from fastapi.staticfiles import StaticFiles

    from .api import ExplorerState, router

    here = ExplorerState(models, limits)

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        here.workers.open()
        yield
        here.workers.close()

    # The interactive documentation that FastAPI offers loads its scripts from elsewhere: it is left out.
    app = FastAPI(
        title="regard",
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/openapi.json",
        lifespan=lifespan,
    )
    app.state.explorer = here
    app.include_router(router)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    _add_page(app)
    _add_failures(app)
    return app


def _add_page(app: Any) -> None:
    from fastapi.responses import FileResponse

    async def page() -> Any:
        headers = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"}
        return FileResponse(STATIC / "index.html", media_type="text/html; charset=utf-8", headers=headers)

    app.get("/", include_in_schema=False)(page)


def _add_failures(app: Any) -> None:
    """Whatever goes wrong is one sentence."""
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse, Response
    from starlette.exceptions import HTTPException  # of which FastAPI's is a kind

    from .api import NotModified, etag

    def said(status: int, sentence: str) -> Any:
        content = {"error": " ".join(sentence.split()).encode("utf-8", "replace").decode()}
        return JSONResponse(content, status, headers={"Cache-Control": "no-store"})

    async def refused(_: Any, failure: Any) -> Any:
        return said(failure.status, str(failure))

    async def not_understood(_: Any, failure: Any) -> Any:
        return said(422, sentence_of(failure.errors()[0]))

    async def not_done(_: Any, failure: Any) -> Any:
        return said(422, str(failure) or type(failure).__name__)

    async def no_such_place(_: Any, failure: Any) -> Any:
        return said(failure.status_code, str(failure.detail))

    async def not_foreseen(_: Any, failure: Any) -> Any:
        return said(500, f"something went wrong here ({type(failure).__name__}); the server's log says more")

    async def unchanged(request: Any, _: Any) -> Any:
        return Response(status_code=304, headers={"ETag": etag(request)})

    for kind, answer in (
        (RequestRefused, refused),
        (RequestValidationError, not_understood),
        (ValueError, not_done),
        (TypeError, not_done),
        (RegardError, not_done),
        (HTTPException, no_such_place),
        (NotModified, unchanged),
        (Exception, not_foreseen),
    ):
        app.add_exception_handler(kind, answer)


def sentence_of(problem: dict[str, Any]) -> str:
    """What is wrong with a request, without repeating what was sent: it may be long, or no JSON at all."""
    if problem.get("type") == "json_invalid":
        return "the body is not JSON"
    names = [str(part) for part in problem.get("loc", ()) if part not in ("body", "query", "path")]
    where = ".".join(names)[:100]
    message = str(problem.get("msg", "is not understood")).removeprefix("Value error, ")
    return f"{where}: {message[:1].lower()}{message[1:]}" if where else message


# ---- the process


def serve(
    paths: Sequence[str | Path],
    *,
    host: str = "127.0.0.1",
    port: int = 8017,
    device: str = "auto",
    open_browser: bool = False,
    limits: Limits | None = None,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> int:
    """Open the models and answer until a signal comes; the exit code of that signal is returned.

    Requests get a few seconds to come to their end; work that is still going on then ends with the process.
    """
    try:
        import fastapi  # noqa: F401 - only to say here, in one sentence, that it is missing
        import uvicorn
    except ImportError:
        raise RegardError("the explorer needs fastapi and uvicorn: pip install 'regard[serve]'") from None

    from .served_models import open_models

    limits = limits or Limits()
    listening = _listen(host, port)  # before the models: a port that is taken is known at once
    app = _application(open_models(paths, device), limits)
    config = uvicorn.Config(
        RequestGuard(app, limits, host),
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=_LEAVING_SECONDS,
    )
    listening.listen()  # who follows the line below at once waits a moment instead of being refused
    url = f"http://{_url_host(host)}:{listening.getsockname()[1]}/"
    say(f"regard: {url} (Ctrl-C ends it)")
    if not is_local(host):
        say(f"regard: other machines reach it too, at {host}, and there is no password")
    if open_browser:
        soon = threading.Timer(0.5, webbrowser.open, [url])
        soon.daemon = True
        soon.start()
    code = _run_until_signal(uvicorn.Server(config), listening)
    if app.state.explorer.workers.busy:  # a thread that computes cannot be stopped, and Python would wait for it
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _run_until_signal(server: Any, listening: socket.socket) -> int:
    """Until a signal comes. uvicorn leaves in order and then passes the signal on, to be noted here."""
    heard: list[int] = []
    before = {
        number: signal.signal(number, lambda came, frame: heard.append(came))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        server.run([listening])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 + heard[-1] if heard else 0


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


def _url_host(host: str) -> str:
    """An address that can be opened: a server that listens everywhere is reached here, too."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
