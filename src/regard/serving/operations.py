"""The outermost layer of a production server: /health and /ready, request ids, the access log and request metrics."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ..web.api_keys import ApiKeys
from ..web.requests import INFO, App, Limits, Message, Receive, RefusalBody, RequestGuard, Scope, Send, send_response
from .metrics import RequestMetrics
from .serve_config import OperationsConfig

if TYPE_CHECKING:
    from .reloadable_app import ReloadableApp

_CLIENT_GONE = 499  # nginx' status for a client that closed the connection before the response
_LOGGED_BYTES = 65_536  # of a request or response body, when texts are logged
_LOG = logging.getLogger("uvicorn.error")  # where other internal errors are logged
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Operations:
    """Wraps an ASGI application.

    ``write_log`` receives one line of JSON per request; bodies are included only with ``log_texts``. /health reports
    that the process is alive, /ready that it accepts requests: it does not while models are loading or the last
    requests drain. Both need no key, since load balancers poll them.
    """

    def __init__(
        self,
        app: App,
        metrics: RequestMetrics,
        *,
        is_ready: Callable[[], bool] = lambda: True,
        write_log: Callable[[str], None] | None = None,
        log_texts: bool = False,
    ) -> None:
        self.app, self.metrics, self.is_ready = app, metrics, is_ready
        self.write_log, self.log_texts = write_log, log_texts and write_log is not None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif scope["path"] == "/health":
            await send_json(send, 200, {"status": "ok"})
        elif scope["path"] == "/ready":
            ready = self.is_ready()
            await send_json(send, 200 if ready else 503, {"status": "ready" if ready else "not ready"})
        else:
            await self._observe(_ObservedRequest(scope, receive, send, self.log_texts))

    async def _observe(self, request: _ObservedRequest) -> None:
        self.metrics.in_progress += 1
        try:
            await self.app(request.scope, request.receive, request.send)
        except asyncio.CancelledError:
            request.status = _CLIENT_GONE
            raise
        except Exception:
            request.status = request.status or 500
            raise
        finally:
            self.metrics.in_progress -= 1
            status, end = request.status or _CLIENT_GONE, time.perf_counter()
            first, whole = (request.first_byte or end) - request.start, end - request.start
            key = request.scope[INFO].get("key", "")
            self.metrics.observe(request.scope["method"], request.route, status, key, first, whole)
            if self.write_log is not None:
                try:
                    self.write_log(json.dumps(request.log_entry(status, key, first, whole), ensure_ascii=False))
                except OSError as error:  # a full disk: the response is not to blame
                    _LOG.error("the access log cannot be written: %s", error.strerror or error)


class _ObservedRequest:
    """A request whose ASGI messages are counted as they pass."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, keep_texts: bool) -> None:
        self.scope, self._receive, self._send, self._keep_texts = scope, receive, send, keep_texts
        self.start, self.first_byte, self.status = time.perf_counter(), 0.0, 0
        self.n_received = self.n_sent = 0
        self.texts = {"request": b"", "response": b""}
        header = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"), "")
        self.id = header if _REQUEST_ID.fullmatch(header) else secrets.token_hex(8)
        scope[INFO] = {"id": self.id}

    @property
    def route(self) -> str:
        """The route's path pattern rather than the path, which bounds the number of metric labels."""
        return str(self.scope[INFO].get("route", "other"))

    async def receive(self) -> Message:
        message = await self._receive()
        self.n_received += len(message.get("body", b""))
        self._keep("request", message)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.first_byte, self.status = time.perf_counter(), message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self.id.encode())]
        self.n_sent += len(message.get("body", b""))
        self._keep("response", message)
        await self._send(message)

    def _keep(self, side: str, message: Message) -> None:
        if self._keep_texts and len(self.texts[side]) < _LOGGED_BYTES:
            self.texts[side] = (self.texts[side] + message.get("body", b""))[:_LOGGED_BYTES]

    def log_entry(self, status: int, key: str, first: float, whole: float) -> dict[str, Any]:
        """The line of the access log; the query string is left out, since it may contain a key."""
        client = self.scope.get("client") or [""]
        entry = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "id": self.id,
            "client": client[0],
            "key": key,
            "method": self.scope["method"],
            "path": self.scope["path"],
            "status": status,
            "ms": round(1e3 * whole, 1),
            "first_byte_ms": round(1e3 * first, 1),
            "received_bytes": self.n_received,
            "sent_bytes": self.n_sent,
        }
        return entry | {side: body.decode("utf-8", "replace") for side, body in self.texts.items() if self._keep_texts}


def with_operations(
    app: ReloadableApp,
    limits: Limits,
    host: str,
    keys: str | ApiKeys | None,
    config: OperationsConfig,
    refusal_body: RefusalBody,
) -> App:
    """Wrap an application, from the inside out, in keys and limits, CORS, and metrics with the access log."""
    from starlette.middleware.cors import CORSMiddleware

    origins = [origin.rstrip("/").lower() for origin in config.allow_origin]  # as browsers send them
    layer: App = RequestGuard(app, limits, host, keys, refusal_body, origins, config.allow_host)
    if origins:  # any header may be sent: OpenAI's client for JavaScript has a dozen of its own
        headers = {"allow_headers": ["*"], "expose_headers": ["x-request-id", "retry-after"]}
        layer = CORSMiddleware(layer, allow_origins=origins, allow_methods=["GET", "POST"], **headers)
    options: dict[str, Any] = {"write_log": config.open_log(), "log_texts": config.log_texts}
    return Operations(layer, app.metrics, is_ready=lambda: app.is_ready, **options)


async def send_json(send: Send, status: int, document: dict[str, Any]) -> None:
    await send_response(send, status, json.dumps(document).encode(), "application/json")
