"""An application that can be replaced while it runs: new requests go to the new one, the old one finishes its own.

It also answers the routes of the process rather than of a model: /metrics and /admin/reload.
"""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..web.requests import INFO, Receive, Scope, Send, send_response
from .metrics import CONTENT_TYPE, RequestMetrics
from .operations import send_json


class _RunningApp:
    """An application with its lifespan, and the number of its open requests."""

    def __init__(self, app: Any) -> None:
        self.app, self.is_started = app, False
        self.n_requests, self.is_idle = 0, asyncio.Event()
        self.is_idle.set()

    async def start(self) -> None:
        self._lifespan = self.app.router.lifespan_context(self.app)
        await self._lifespan.__aenter__()
        self.is_started = True

    async def finish(self) -> None:
        """Wait for the last request, then close the application."""
        await self.is_idle.wait()
        await self._lifespan.__aexit__(None, None, None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.n_requests += 1
        self.is_idle.clear()
        own = {**scope}  # the application adds itself to it, and a connection keeps its last scope
        try:
            await self.app(own, receive, send)
        finally:
            scope.setdefault(INFO, {})["route"] = getattr(own.get("route"), "path", "") or "other"
            self.n_requests -= 1
            if not self.n_requests:
                self.is_idle.set()


def freeze_live_objects() -> None:
    """Exempt all current objects, models and libraries, from garbage collection.

    Traversing them would pause the server for 100 ms or more whenever a request allocates many objects.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


class ReloadableApp:
    """``open_app`` loads the models and builds the FastAPI application; every reload calls it again.

    A reload (SIGHUP, or POST /admin/reload with an admin key) holds both applications in memory until the old one has
    finished its requests; if loading fails, the old one stays.
    """

    def __init__(self, first: Any, open_app: Callable[[], Any], say: Callable[[str], None]) -> None:
        self._running, self._open_app, self._say, self.metrics = _RunningApp(first), open_app, say, RequestMetrics()
        self._lock, self._tasks = asyncio.Lock(), set[asyncio.Task[None]]()
        self.is_shutting_down: Callable[[], bool] = lambda: False  # set to uvicorn's flag by serve_api

    @property
    def state(self) -> Any:
        return self._running.app.state

    @property
    def is_ready(self) -> bool:
        return self._running.is_started and not self.is_shutting_down()

    @property
    def is_idle(self) -> bool:
        """Whether no model is computing."""
        serving, explorer = (getattr(self.state, name, None) for name in ("serving", "explorer"))
        if explorer is not None and explorer.workers.is_busy:
            return False
        return serving is None or all(model.is_idle for model in serving.models.values())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._run_lifespan(receive, send)
        elif scope["path"] == "/metrics":
            scope.setdefault(INFO, {})["route"] = "/metrics"
            content = self.metrics.to_text(self._scheduler_statistics()).encode()
            await send_response(send, 200, content, CONTENT_TYPE)
        elif scope["path"] == "/admin/reload":
            await self._answer_reload(scope, send)
        elif self._running.is_started:
            await self._running(scope, receive, send)
        else:
            await send_json(send, 503, {"error": "the models are still loading; try again in a moment"})

    async def _run_lifespan(self, receive: Receive, send: Send) -> None:
        """ASGI's lifespan: start the first application, and at shutdown close the current one."""
        await receive()
        await self._running.start()
        no_signals = NotImplementedError, RuntimeError, ValueError, AttributeError  # not the main thread, no SIGHUP
        with suppress(*no_signals):
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._start_reload)
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._running.finish()
        for task in list(self._tasks):
            await task
        await send({"type": "lifespan.shutdown.complete"})

    def _scheduler_statistics(self) -> dict[str, Any]:
        serving = getattr(self.state, "serving", None)
        return {} if serving is None else {name: x.scheduler.statistics for name, x in serving.models.items()}

    # ------------------------------------------------------------------ reload

    async def reload(self) -> None:
        """Load the models again and send new requests to the new application."""
        async with self._lock:
            new = _RunningApp(await asyncio.to_thread(self._open_app))
            await new.start()
            old, self._running = self._running, new
            self.metrics.reloads += 1
        self._keep(asyncio.create_task(self._finish(old)))

    async def _finish(self, old: _RunningApp) -> None:
        await old.finish()
        del old  # or the old models would be frozen, and so be kept, with the new ones
        freeze_live_objects()

    def _start_reload(self) -> None:
        async def run() -> None:
            try:
                await self.reload()
                self._say("regard: models reloaded")
            except Exception as error:  # the old models keep serving
                self._say(f"regard: reload failed, the old models stay: {error}")

        self._keep(asyncio.create_task(run()))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer_reload(self, scope: Scope, send: Send) -> None:
        info = scope.setdefault(INFO, {})
        info["route"] = "/admin/reload"
        if scope["method"] != "POST":
            await send_json(send, 405, {"error": "use POST to reload the models"})
        elif not info.get("admin"):
            hint = "use a key made with --admin, or send SIGHUP to the server"
            await send_json(send, 403, {"error": f"this key may not reload models: {hint}"})
        else:
            try:
                await self.reload()
            except Exception as error:  # the old models keep serving
                await send_json(send, 422, {"error": f"reload failed, the old models stay: {error}"})
            else:
                await send_json(send, 200, {"models": list(self.state.model_names)})
