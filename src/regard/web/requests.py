"""What a request may contain: its body, limits, and the ASGI layer that checks host, origin and size."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Limits:
    body_bytes: int = 8 * MEGABYTE
    body_seconds: float = 20.0  # in which a body must arrive
    characters: int = 200_000  # of a text, before it is tokenised
    characters_per_token: int = 64  # a text longer than max_len tokens of this size is refused before it is tokenised
    tokens: int = 16_384  # of one look, also where the model could read more
    new_tokens: int = 1024
    pixels: int = 16_000_000
    tile: int = 256  # rows, and columns, of one response with exact weights
    labels: int = 2048
    response_bytes: int = MEGABYTE  # of any response: 250,000 weights of 4 bytes
    beam_nodes: int = 6000  # of a beam search's tree; a larger one is sent without the dropped hypotheses
    kept_bytes: int = 2000 * MEGABYTE  # q and k of all looks together; the least recently used one is dropped first
    kept_looks: int = 64
    model_seconds: float = 300.0  # of a request that runs a model, with the time in the queue
    request_seconds: float = 60.0  # of any other
    stream_seconds: float = 600.0
    waiting: int = 64  # requests in the queue
    walk_tokens: int = 512  # up to this length the model runs again to show the values v of a layer


class RequestRefused(Exception):
    """A request that gets an HTTP error status and one sentence."""

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
    """The outermost ASGI layer: checks Host and Origin (against DNS rebinding and other pages) and the body's size."""

    def __init__(self, app: App, limits: Limits, host: str = "127.0.0.1") -> None:
        self.app, self.limits = app, limits
        self._allowed = {*LOCAL, host.lower(), *(() if is_local(host) else (socket.gethostname().lower(),))}
        self._any_address = not is_local(host)  # a foreign name may resolve to this machine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
                if scope["path"].startswith("/static/"):  # revalidated each time, sent again only where it changed
                    message["headers"].append((b"cache-control", b"no-cache"))
            await send(message)

        try:
            self._check(scope)
            body = await _read_body(receive, self.limits)
        except RequestRefused as refused:
            await _send_refusal(send_with_headers, refused)
            return
        messages = [body]

        async def receive_body() -> Message:
            return messages.pop() if messages else await receive()  # after the body, the end of the connection

        await self.app(scope, receive_body, send_with_headers)

    def _check(self, scope: Scope) -> None:
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1").strip())
        host = headers.get("host", [])
        if len(host) != 1 or not self._is_own_host(host[0]):
            said = ", ".join(host)[:100] or "nothing"
            problem = f"the Host header says {said!r}, which is not this server"
            raise RequestRefused(403, f"{problem}; open http://127.0.0.1 instead")
        for origin in headers.get("origin", []):
            if urlsplit(origin).netloc.lower() != host[0].lower():
                raise RequestRefused(403, f"a page of {origin[:100]!r} may not ask this server")
        for length in headers.get("content-length", []):
            if not (length.isascii() and length.isdigit()):
                raise RequestRefused(400, f"Content-Length {length[:40]!r} is not a number")
            if len(length) > 18 or int(length) > self.limits.body_bytes:
                raise _body_too_large(length, self.limits)

    def _is_own_host(self, host: str) -> bool:
        """Of `[::1]:80` the name is ::1, of `localhost:8000` localhost."""
        if any(sign in host for sign in "/@?#\\ "):
            return False
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
        except ValueError:
            return False
        return name in self._allowed or (self._any_address and _is_address(name))


def _body_too_large(n_bytes: int | str, limits: Limits) -> RequestRefused:
    return RequestRefused(413, f"a body of {str(n_bytes)[:40]} bytes is more than the {limits.body_bytes:,} allowed")


async def _read_body(receive: Receive, limits: Limits) -> Message:
    """The whole body; its size is counted as it arrives, since Content-Length may be missing."""
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
    headers.append((b"connection", b"close"))  # the rest of the body is not read, so no other request can follow it
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def is_local(host: str) -> bool:
    return host.lower() in LOCAL or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


_LIMITS = Limits()


def _check_unicode(text: str) -> str:
    """Refuse half a surrogate pair: JSON can spell it ("\\ud800"), but UTF-8 and tokenizers cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as wrong:
        raise ValueError(f"character {wrong.start} is half of a surrogate pair") from None
    return text


ModelName = Annotated[str, Field(min_length=1, max_length=300), AfterValidator(_check_unicode)]
BodyText = Annotated[str, Field(max_length=_LIMITS.characters), AfterValidator(_check_unicode)]
BodyImage = Annotated[str, Field(max_length=_LIMITS.body_bytes)]  # base64 of an image file, or such a data: URL
Index = Annotated[int, Field(ge=0, lt=2**31)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class SearchRequest(Body):
    """The fields of ``GenerateConfig`` that the page offers."""

    beam: Annotated[int, Field(ge=1, le=16)] = 1
    temperature: Annotated[float, Field(gt=0, le=100)] | None = None
    top_k: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_new_tokens: Annotated[int, Field(ge=1, le=_LIMITS.new_tokens)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None

    def fields(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


class ModelChanges(Body):
    """Interventions on the model's attention."""

    causal: bool = True  # False removes the causal mask
    scale: Annotated[float, Field(ge=0, le=1000)] = 1.0  # a factor on the scores
    off: Annotated[list[tuple[ModelName, Index, Index]], Field(max_length=4096)] = []  # (kind, layer, head), ablated


class LookRequest(Body):
    model: ModelName
    text: BodyText = ""
    target: BodyText | None = None
    image: BodyImage | None = None
    generate: SearchRequest | None = None
    variant: ModelChanges | None = None


class WatchRequest(Body):
    """The cross-attention that is sent while a text is generated."""

    layer: Index = 0
    head: Index | None = None  # None: the mean of all heads


class StreamRequest(Body):
    model: ModelName
    text: BodyText = ""
    image: BodyImage | None = None
    generate: SearchRequest = SearchRequest()
    watch: WatchRequest | None = None
    variant: ModelChanges | None = None


class ErrorBody(BaseModel):
    error: str
