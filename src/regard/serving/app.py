"""The API as an ASGI application, and the process that serves it until a signal comes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RegardError
from ..web.api_keys import ApiKeys, read_keys
from ..web.requests import App, Limits, Receive, RequestGuard, RequestRefused, Scope, Send
from ..web.server import (
    check_key,
    end_process,
    import_uvicorn,
    listen,
    run_until_signal,
    server_config,
    url_of,
    who_can_reach,
)
from .reloadable_app import ReloadableApp, freeze_live_objects
from .serve_config import OperationsConfig

if TYPE_CHECKING:
    from ..models import Model
    from ..web.served_models import ServedModel
    from .api_models import ApiModel
    from .engine_scheduler import ServingEngine
    from .routes import ServingState

_SWITCH_SECONDS = 0.0001  # by default a thread that decodes may wait 5 ms, a block of steps, for the event loop
_POST_SECONDS = 0.05  # tokens that a stream produces within this time are sent together


def create_api(
    models: Sequence[ServedModel | ApiModel] | dict[str, Model],
    limits: Limits | None = None,
    *,
    host: str = "127.0.0.1",
    api_key: str | ApiKeys | None = None,
    has_explorer: bool = False,
) -> App:
    """The API over loaded models as an ASGI application; ``api_key``, if given, is required of every request.

    With ``has_explorer`` the explorer is served at /, next to /v1.
    """
    limits = limits or Limits()
    return RequestGuard(new_application(models, limits, has_explorer), limits, host, api_key, refusal_body)


def refusal_body(path: str, status: int, sentence: str) -> dict[str, Any]:
    """The JSON body with which the guard refuses a request: OpenAI's format below ``/v1``."""
    from .api_errors import error_body

    return error_body(status, sentence) if path.startswith("/v1") else {"error": sentence}


def new_application(
    models: Sequence[ServedModel | ApiModel] | dict[str, Model], limits: Limits, has_explorer: bool = False
) -> Any:
    """The FastAPI application; ``app.state.serving`` is its ``ServingState``. It does not notice that a client leaves:
    ``RequestGuard``, or whatever calls it, cancels the request."""
    from fastapi import FastAPI

    from ..web.served_models import name_models
    from .api_models import ApiModel
    from .routes import ServingState, router

    served = name_models(list(models.items())) if isinstance(models, dict) else list(models)
    opened = [each if isinstance(each, ApiModel) else ApiModel(each, limits) for each in served]
    state = ServingState({model.id: model for model in opened}, limits)

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        sys.setswitchinterval(_SWITCH_SECONDS)
        for model in state.models.values():
            model.scheduler.post, model.scheduler.post_seconds = loop.call_soon_threadsafe, _POST_SECONDS
        yield
        for model in state.models.values():
            model.close()
        if has_explorer:
            app.state.explorer.workers.close()

    app = FastAPI(title="regard", docs_url=None, redoc_url=None, openapi_url="/v1/openapi.json", lifespan=lifespan)
    app.state.serving, app.state.model_names = state, list(state.models)
    app.include_router(router)
    _add_error_handlers(app)
    if has_explorer:
        _add_explorer(app, state, limits)
    return app


def _add_explorer(app: Any, state: ServingState, limits: Limits) -> None:
    """Route everything outside /v1 to the explorer.

    Both share the models: the explorer's interventions and recorders only affect the thread that opens them.
    """
    from ..web.server import explorer_application

    pages = explorer_application([model.served for model in state.models.values()], limits)
    no_route = app.router.default
    app.state.explorer = pages.state.explorer

    async def route_to_explorer(scope: Scope, receive: Receive, send: Send) -> None:
        is_api = scope["path"] == "/v1" or scope["path"].startswith("/v1/")
        await (no_route if is_api else pages)(scope, receive, send)

    app.router.default = route_to_explorer


def _add_error_handlers(app: Any) -> None:
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException

    from .api_errors import ApiError, error_document
    from .request_queue import QueueFull

    async def handle(_: Any, error: Exception) -> Any:
        status, content, headers = error_document(error)
        return JSONResponse(content, status, headers={"Cache-Control": "no-store", **headers})

    ours = (ApiError, QueueFull, RequestRefused, RegardError)
    for kind in (*ours, RequestValidationError, HTTPException, ValueError, TypeError, Exception):
        app.add_exception_handler(kind, handle)


def serve_api(
    paths: Sequence[str | Path],
    *,
    host: str = "127.0.0.1",
    port: int = 8017,
    device: str = "auto",
    engine: ServingEngine = "torch",
    has_explorer: bool = True,
    limits: Limits | None = None,
    api_key: str | ApiKeys | None = None,
    needs_key: bool = True,
    operations: OperationsConfig | None = None,
    open_app: Callable[[Sequence[str | Path]], Any] | None = None,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> int:
    """Load the models and serve them until a signal arrives; returns that signal's exit code.

    ``engine`` runs exported directories with ONNX Runtime or CTranslate2; the explorer at / is only available with
    torch. After the signal no new requests are accepted, and running ones get ``operations.drain_seconds`` to finish.
    ``open_app`` builds the application from paths; by default the models are loaded in this process.
    """
    check_key(host, api_key, needs_key)
    uvicorn = import_uvicorn("the API", "api")
    from .engine_scheduler import open_served
    from .operations import with_operations

    limits, operations = limits or Limits(), operations or OperationsConfig()
    tls = operations.tls
    listening = listen(host, port)  # before the models are loaded: a port in use is reported at once

    def open_again() -> Any:
        """Read keys, config and models again; the keys are replaced last, so that a failure changes nothing."""
        keys = api_key if isinstance(api_key, ApiKeys) else None
        new_keys = None if keys is None or keys.path is None else read_keys(keys.path)
        app = open_paths(operations.models_now() or paths)
        if keys is not None and new_keys is not None:
            keys.replace(new_keys)
        return app

    has_explorer = has_explorer and open_app is None and engine == "torch"
    open_paths = open_app or (
        lambda current: new_application(open_served(current, device, engine, limits), limits, has_explorer)
    )
    reloadable = ReloadableApp(open_paths(paths), open_again, say)
    app = with_operations(reloadable, limits, host, api_key, operations, refusal_body)
    server = uvicorn.Server(server_config(app, limits, operations.drain_seconds, tls))
    listening.listen()
    url = url_of(host, listening, tls)
    for line in _announcement(url, host, reloadable.state.model_names, has_explorer, has_key=api_key is not None):
        say(f"regard: {line}")
    freeze_live_objects()
    reloadable.is_shutting_down = lambda: bool(server.should_exit)
    return end_process(run_until_signal(server, listening), is_busy=not reloadable.is_idle)


def _announcement(url: str, host: str, names: Sequence[str], has_explorer: bool, has_key: bool) -> list[str]:
    """The lines that say what is served, and who can reach it."""
    lines = [f"{url}v1 serves {', '.join(names)} (press Ctrl-C to stop)"]
    if has_explorer:
        lines.append(f"explorer at {url}{'?key=KEY' if has_key else ''}")
    return [*lines, *who_can_reach(host, has_key)]
