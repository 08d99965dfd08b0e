"""How much one request may ask for, how much all looks together may keep, and the sentence where it is more."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Limits:
    """How much one request may ask for, and how much all looks together may keep."""

    body_bytes: int = 8 * MEGABYTE
    body_seconds: float = 20.0  # A body that trickles in for longer than this is given up
    characters: int = 200_000  # of a text, before it is tokenised
    # A text is refused unread when even tokens as long as this would not fit into the model's max_len
    characters_per_token: int = 64
    tokens: int = 16_384  # of one look, also where the model could read more
    new_tokens: int = 1024
    pixels: int = 16_000_000
    tile: int = 256  # rows, and columns, of one answer with exact weights
    labels: int = 2048
    response_bytes: int = MEGABYTE  # of one answer, whatever it is: 250,000 weights of 4 bytes
    beam_nodes: int = 6000  # of a beam search's tree; of a larger one what was given up is left out
    kept_bytes: int = 2000 * MEGABYTE  # q and k of all looks together; the one not asked for the longest goes first
    kept_looks: int = 64
    model_seconds: float = 300.0  # for a question that runs a model, waiting for others included
    request_seconds: float = 60.0  # for any other
    stream_seconds: float = 600.0
    waiting: int = 64  # requests that may wait for the processor
    walk_tokens: int = 512  # up to this length the model is run again to know the values v of a layer


class RequestRefused(Exception):
    """A request that gets a sentence instead of an answer."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOCAL = ("127.0.0.1", "localhost", "::1")
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
)


class RequestGuard:
    """The outermost layer of the application: who asks, from where, and how large the question is."""

    def __init__(self, app: App, limits: Limits, host: str = "127.0.0.1") -> None:
        self.app, self.limits = app, limits
        self._allowed = {*LOCAL, host.lower(), *(() if is_local(host) else (socket.gethostname().lower(),))}
        self._any_address = not is_local(host)  # a name can be made to point here, an address cannot be pretended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
                if scope["path"].startswith("/static/"):  # asked for each time, sent again only where it changed
                    message["headers"].append((b"cache-control", b"no-cache"))
            await send(message)

        try:
            self._check(scope)
            body = await _read_body(receive, self.limits)
        except RequestRefused as refused:
            await _send_refusal(send_with_headers, refused)
            return
        given = False

        async def receive_again() -> Message:
            nonlocal given
            if given:
                return await receive()  # only the end of the connection is still to come, whenever that is
            given = True
            return body

        await self.app(scope, receive_again, send_with_headers)

    def _check(self, scope: Scope) -> None:
        headers = _headers(scope)
        host = headers.get("host", [])
        if len(host) != 1 or not self._is_ours(host[0]):
            said = ", ".join(host)[:100] or "nothing"
            raise RequestRefused(
                403, f"the Host header says {said!r}, which is not this server; open http://127.0.0.1 instead"
            )
        for origin in headers.get("origin", []):
            if urlsplit(origin).netloc.lower() != host[0].lower():
                raise RequestRefused(403, f"a page of {origin[:100]!r} may not ask this server")
        for length in headers.get("content-length", []):
            if not (length.isascii() and length.isdigit()):
                raise RequestRefused(400, f"Content-Length {length[:40]!r} is not a number")
            if len(length) > 18 or int(length) > self.limits.body_bytes:
                raise _body_too_large(length, self.limits)

    def _is_ours(self, host: str) -> bool:
        name = (_host_name(host) or "").lower()
        if name in self._allowed:
            return True
        return self._any_address and _is_address(name)


def _body_too_large(n_bytes: int | str, limits: Limits) -> RequestRefused:
    return RequestRefused(413, f"a body of {str(n_bytes)[:40]} bytes is more than the {limits.body_bytes:,} allowed")


async def _read_body(receive: Receive, limits: Limits) -> Message:
    """The body, counted as it comes: a length that was not announced is limited too, and so is patience."""
    pieces, n_bytes, more = [], 0, True
    try:
        async with asyncio.timeout(limits.body_seconds):
            while more:
                message = await receive()
                if message["type"] != "http.request":
                    return message
                pieces.append(message.get("body", b""))
                n_bytes, more = n_bytes + len(pieces[-1]), message.get("more_body", False)
                if n_bytes > limits.body_bytes:
                    raise _body_too_large(n_bytes, limits)
    except TimeoutError:
        raise RequestRefused(408, f"the body did not arrive within {limits.body_seconds:g} s") from None
    return {"type": "http.request", "body": b"".join(pieces), "more_body": False}


async def _send_refusal(send: Send, refused: RequestRefused) -> None:
    content = json.dumps({"error": str(refused)}, ensure_ascii=False).encode("utf-8", "replace")
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    # The rest of the body is not read: the connection cannot be used for another request.
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def _headers(scope: Scope) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        found.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1").strip())
    return found


def _host_name(host: str) -> str | None:
    """`[::1]:80` → ::1, `localhost:8000` → localhost; None for what is no host."""
    if any(sign in host for sign in "/@?#\\ "):
        return None
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def is_local(host: str) -> bool:
    return host.lower() in LOCAL or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
