"""Replicas of the API as a Ray Serve deployment, behind one front that holds keys, limits, metrics and the access log.

The front keeps each request until its response is complete. If the replica that computes it is lost, the front sends
the request to another one. Nothing of an unstreamed response has been sent by then; of a stream, the events that the
client already has are left out (``resumed_stream``). A sampled stream without a seed is given one, so that both
replicas produce the same text.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RegardError
from ..experiments.sweep_runner import connect_ray
from ..foundation.plugins import import_optional
from ..web.requests import Limits, Message, Receive, Scope, Send
from .api_errors import error_body
from .app import new_application, serve_api
from .operations import send_json
from .resumed_stream import ResumedStream

if TYPE_CHECKING:
    from .engine_scheduler import ServingEngine

_MAX_ATTEMPTS = 20
_PAUSE_SECONDS = 0.25  # before a lost request is sent again
_SHUTTING_DOWN = b'"code": "shutting_down"'  # generated text cannot contain this: its quotes are escaped
_SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path")


class ReplicaServer:
    """The application inside a replica: takes a request as plain data and yields the ASGI messages of its response."""

    def __init__(self, paths: Sequence[str], device: str, engine: ServingEngine, limits: Limits) -> None:
        from .engine_scheduler import open_served

        self.app = new_application(open_served(paths, device, engine, limits), limits)
        self._lifespan: Any = None

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[Message]:
        if self._lifespan is None:  # entered here, in the event loop that serves the requests
            self._lifespan = self.app.router.lifespan_context(self.app)
            await self._lifespan.__aenter__()
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            return requests.pop() if requests else await asyncio.get_running_loop().create_future()

        task = asyncio.ensure_future(self.app({**scope, "asgi": {"version": "3.0"}}, receive, messages.put))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], (b"x-replica", str(os.getpid()).encode())]
                yield message
        finally:
            task.cancel()  # a no-op unless the front stopped reading
            with suppress(BaseException):
                await task


class ReplicaApp:
    """An ASGI application that forwards requests to replicas.

    ``ask(scope, body)`` iterates over the response messages of one replica; after an error in ``lost`` the request goes
    to another one.
    """

    def __init__(
        self, ask: Callable[[dict[str, Any], bytes], Any], lost: type[Exception] | tuple[type[Exception], ...]
    ) -> None:
        self._ask, self._lost = ask, lost

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = {name: scope[name] for name in _SCOPE if name in scope}
        request["headers"] = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
        body = _with_seed((await receive()).get("body", b""))
        sent = list[Message]()  # the messages of a stream that the client has
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            try:
                await self._forward(request, body, send, sent, retried=(429, 503) if attempt > 1 else (503,))
                return
            except _ReplicaLost:
                await asyncio.sleep(_PAUSE_SECONDS * min(attempt, 4))
        if sent:
            raise RegardError(f"a stream was lost: {_MAX_ATTEMPTS} replicas failed")
        await send_json(send, 503, error_body(503, "no replica responds; try again in a moment"))

    async def _forward(
        self, request: dict[str, Any], body: bytes, send: Send, sent: list[Message], retried: tuple[int, ...]
    ) -> None:
        """Send the response of one replica: a stream as it arrives, less what is in ``sent``; any other one at its end.

        A status in ``retried`` counts as a lost replica: 503 from one that is shutting down, and, for a request that
        was accepted before, 429 from one whose queue is full.
        """
        messages = self._ask(request, body)
        resumed = ResumedStream(b"".join(message.get("body", b"") for message in sent)) if sent else None
        held, is_stream = list[Message](), False
        try:
            async for message in messages:
                if message["type"] == "http.response.start":
                    is_stream = (b"content-type", b"text/event-stream; charset=utf-8") in message["headers"]
                    if message["status"] in retried or (sent and not is_stream):
                        raise _ReplicaLost
                    if sent:
                        continue
                elif is_stream and _SHUTTING_DOWN in message.get("body", b""):
                    raise _ReplicaLost
                elif resumed is not None:
                    message["body"] = resumed.rest_of(message.get("body", b""))
                if not is_stream:
                    held.append(message)
                elif message.get("body") != b"" or not message.get("more_body"):
                    sent.append(message)
                    await send(message)
                if message["type"] == "http.response.body" and not message.get("more_body"):
                    break  # complete: losing the replica no longer matters
        except self._lost:
            raise _ReplicaLost from None
        finally:
            messages.cancel()
        for message in held:
            await send(message)


class _ReplicaLost(Exception):
    """The request has to be sent to another replica."""


def _with_seed(body: bytes) -> bytes:
    """Add a seed to a streaming request without one, so that another replica samples the same text."""
    with suppress(ValueError, RecursionError):
        fields = json.loads(body) if b'"stream"' in body else None
        if isinstance(fields, dict) and fields.get("stream") is True and fields.get("seed") is None:
            return json.dumps({**fields, "seed": secrets.randbelow(2**31)}).encode()
    return body


# ---------------------------------------------------------------------- the Ray Serve deployment


def open_replicas(
    paths: Sequence[str | Path],
    *,
    replicas: int,
    cores: float = 1.0,
    device: str = "auto",
    engine: ServingEngine = "torch",
    limits: Limits | None = None,
    name: str = "regard",
) -> Any:
    """Deploy the models on the connected cluster, in place of what has the same name; returns the application that
    forwards requests to them."""
    import ray
    from starlette.applications import Starlette
    from starlette.routing import Mount

    serve = import_optional("ray.serve", "regard deploy", "cluster")
    limits = limits or Limits()
    resources = {"num_cpus": cores, "num_gpus": 1 if device != "cpu" and ray.cluster_resources().get("GPU") else 0}
    needed = replicas * cores
    if (available := ray.cluster_resources().get("CPU", 0)) < needed:
        raise RegardError(f"{replicas} replicas of {cores:g} cores need {needed:g}; the cluster has {available:g}")
    deployment = serve.deployment(
        _replica_class(),
        name="models",
        num_replicas=replicas,
        max_ongoing_requests=limits.waiting,
        health_check_period_s=2,
        graceful_shutdown_timeout_s=60,
        ray_actor_options=resources,
    )
    serve.start(proxy_location="Disabled")  # requests come through our front
    bound = deployment.bind(os.getcwd(), sys.path, [str(path) for path in paths], device, engine, limits)
    handle = serve.run(bound, name=name, route_prefix=None)
    answer = handle.options(stream=True, method_name="answer")
    # RayTaskError is not among them: an error in the application would only occur again.
    lost = ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError, ray.exceptions.ObjectLostError
    app = Starlette(routes=[Mount("/", ReplicaApp(answer.remote, lost))])
    app.state.model_names = handle.model_names.remote().result()
    return app


def deploy_api(
    paths: Sequence[str | Path],
    *,
    on: str = "ray",
    replicas: int = 2,
    cores: float = 1.0,
    device: str = "auto",
    engine: ServingEngine = "torch",
    limits: Limits | None = None,
    port: int = 8017,
    **options: Any,
) -> int:
    """``serve_api`` with the models in replicas on a Ray cluster; they alone stop with this process."""
    serve = import_optional("ray.serve", "regard deploy", "cluster")
    ray, connected_here = connect_ray(on)
    name, is_deployed = f"regard-{ray.util.get_node_ip_address()}-{port or os.getpid()}", False

    def open_app(paths: Sequence[str | Path]) -> Any:
        nonlocal is_deployed
        is_deployed = True  # before: a deployment that fails is deleted too
        options: dict[str, Any] = {"cores": cores, "device": device, "engine": engine, "limits": limits}
        return open_replicas(paths, replicas=replicas, name=name, **options)

    try:
        return serve_api(paths, limits=limits, port=port, open_app=open_app, **options)
    finally:
        with suppress(Exception):  # the cluster may be gone; an error above counts
            if is_deployed:
                serve.delete(name)
            if not serve.status().applications:
                serve.shutdown()
        if connected_here:
            ray.shutdown()


def _replica_class() -> type:
    """The class that Ray's workers instantiate.

    It is defined locally so that Ray pickles it by value: workers cannot import this package before ``__init__`` has
    extended their import path.
    """

    class Replica:
        def __init__(self, directory: str, path: list[str], paths: list[str], *options: Any) -> None:
            import contextlib
            import os
            import sys

            sys.path += [folder for folder in path if folder not in sys.path]
            with contextlib.suppress(OSError):
                os.chdir(directory)
            from regard.serving.ray_replicas import ReplicaServer

            self.server = ReplicaServer(paths, *options)

        async def answer(self, scope: Any, body: bytes) -> Any:
            async for message in self.server.answer(scope, body):
                yield message

        async def model_names(self) -> list[str]:
            return list(self.server.app.state.model_names)

    return Replica
