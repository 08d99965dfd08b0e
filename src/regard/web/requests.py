"""What a request may contain: its body, limits, and the ASGI layer that checks host, origin and size."""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import json
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from hmac import compare_digest
from http.cookies import CookieError, SimpleCookie
from typing import Annotated, Any
from urllib.parse import parse_qs, urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Limits:
    body_bytes: int = 8 * MEGABYTE
    body_seconds: float = 20.0  # in which a body must arrive
    header_seconds: float = 10.0  # in which a request must begin: its first line and headers
    body_strings: int = 20_000  # names and texts of a JSON body
    body_lists: int = 450_000  # and its lists and objects; texts may hold brackets too
    held_bytes: int = 256 * MEGABYTE  # bodies of all requests together
    characters: int = 200_000  # of a text, before it is tokenised
    characters_per_token: int = 64  # a text longer than max_len tokens of this size is refused before it is tokenised
    tokens: int = 16_384  # of one look, also where the model could read more
    new_tokens: int = 1024
    pixels: int = 16_000_000
    tile: int = 256  # rows, and columns, of one response with exact weights
    labels: int = 2048
    response_bytes: int = MEGABYTE  # of any response: 250,000 weights of 4 bytes
    beam_nodes: int = 6000  # of a beam search's tree; a larger one is sent without the dropped hypotheses
    kept_bytes: int = 2000 * MEGABYTE  # of all looks together; the least recently used one is dropped first
    kept_looks: int = 64
    model_seconds: float = 300.0  # of a request that runs a model, with the time in the queue
    request_seconds: float = 60.0  # of any other
    stream_seconds: float = 600.0
    waiting: int = 256  # requests in the queue
    walk_tokens: int = 512  # up to this length the model runs again to show the values v of a layer


UNFORESEEN = "something went wrong here ({}); the server's log says more"


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
Headers = dict[str, list[str]]  # by name in lower case

LOCAL = ("127.0.0.1", "localhost", "::1")
_COOKIE = "regard-key"
# Only our own scripts and styles, and none that stand in the page; it turns drawings into data: URLs.
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:;"
    b" base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
)


class RequestGuard:
    """The outermost ASGI layer: checks Host and Origin (against DNS rebinding and other pages), the key and the body.

    With an ``api_key``, a request has it as `Authorization: Bearer KEY`, or in the cookie that /?key=KEY sets.
    """

    def __init__(self, app: App, limits: Limits, host: str = "127.0.0.1", api_key: str | None = None) -> None:
        self.app, self.limits = app, limits
        self._api_key = None if api_key is None else _digest(api_key)
        self._n_held = 0  # bytes of bodies
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

        n_held = 0
        try:
            headers = _read_headers(scope)
            self._check(headers)
            if self._api_key is not None and await self._log_in(scope, headers, send_with_headers):
                return
            messages = [await self._read_body(receive)]
            n_held = len(messages[0].get("body", b""))
            await self._call_app(scope, receive, send_with_headers, messages)
        except RequestRefused as refused:
            await _send_refusal(send_with_headers, refused)
        finally:
            self._n_held -= n_held

    async def _call_app(self, scope: Scope, receive: Receive, send: Send, messages: list[Message]) -> None:
        """Let the application respond; it is cancelled when the client is gone before the response is complete.

        It takes the body out of ``messages``, so that nothing else keeps it in memory.
        """
        complete = False

        async def receive_body() -> Message:
            return messages.pop() if messages else await receive()  # after the body, the end of the connection

        async def watch_send(message: Message) -> None:
            nonlocal complete
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        async def wait_until_gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        app = asyncio.ensure_future(self.app(scope, receive_body, watch_send))
        gone = asyncio.ensure_future(wait_until_gone())
        try:
            await asyncio.wait((app, gone), return_when=asyncio.FIRST_COMPLETED)
            if not complete:
                app.cancel()
            await asyncio.wait((app,))
            if not app.cancelled():
                app.result()
        finally:
            gone.cancel()
            app.cancel()

    async def _log_in(self, scope: Scope, headers: Headers, send: Send) -> bool:
        """Check the key; a page opened with ?key=KEY gets a cookie of it, and is sent on without the key (True)."""
        asked = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("key", [])
        cookies = SimpleCookie()
        with suppress(CookieError):
            cookies.load("; ".join(headers.get("cookie", [])))
        bearer = [value[7:].strip() for value in headers.get("authorization", []) if value[:7].lower() == "bearer "]
        known = [cookies[_COOKIE].value] if _COOKIE in cookies else []
        given = [*map(_digest, bearer or (asked if scope["path"] == "/" else [])), *known]
        if not any(compare_digest(each.encode(), str(self._api_key).encode()) for each in given):
            raise RequestRefused(401, "this server needs a key: Authorization: Bearer KEY, or /?key=KEY in a browser")
        if scope["path"] != "/" or not asked:
            return False
        cookie = f"{_COOKIE}={self._api_key}; Path=/; HttpOnly; SameSite=Strict".encode()
        redirect = [(b"location", b"/"), (b"set-cookie", cookie), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 303, "headers": redirect})
        await send({"type": "http.response.body", "body": b""})
        return True

    def _check(self, headers: Headers) -> None:
        host = headers.get("host", [])
        if len(host) != 1 or not self._is_own_host(host[0]):
            said = ", ".join(host)[:100] or "nothing"
            problem = f"the Host header says {said!r}, which is not this server"
            raise RequestRefused(403, f"{problem}; open http://127.0.0.1 instead")
        for origin in headers.get("origin", []):
            if not _is_origin(origin, host[0]):
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

    async def _read_body(self, receive: Receive) -> Message:
        """The whole body, or the message that came instead of its rest.

        Its size is counted as it arrives, since Content-Length may be missing.
        """
        limits, body, more = self.limits, bytearray(), True
        try:
            async with asyncio.timeout(limits.body_seconds):
                while more:
                    message = await receive()
                    if message["type"] != "http.request":
                        self._n_held -= len(body)
                        return message
                    piece, more = message.get("body", b""), message.get("more_body", False)
                    body += piece
                    self._n_held += len(piece)
                    if len(body) > limits.body_bytes:
                        raise _body_too_large(len(body), limits)
                    if self._n_held > limits.held_bytes:
                        raise RequestRefused(429, "other requests take all memory for bodies; ask again in a moment")
            _check_json_size(body, limits)
        except BaseException as failure:
            self._n_held -= len(body)
            if isinstance(failure, TimeoutError):
                sentence = f"the body did not arrive within {limits.body_seconds:g} s"
                raise RequestRefused(408, sentence) from None
            raise
        return {"type": "http.request", "body": bytes(body), "more_body": False}


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def _read_headers(scope: Scope) -> Headers:
    headers: Headers = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1").strip())
    return headers


def _is_origin(origin: str, host: str) -> bool:
    try:
        return urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:  # "http://[" is no address
        return False


def _check_json_size(body: bytearray, limits: Limits) -> None:
    """Refuse a body of very many values before it is parsed: each takes a hundred bytes and more, and some time.

    A quote without a backslash before it begins or ends a string; the second may have one before it, the first cannot.
    """
    n_strings = body.count(b'"') - body.count(b'\\"')
    n_lists = body.count(b"[") + body.count(b"{")
    for n, most, what in ((n_strings, limits.body_strings, "strings"), (n_lists, limits.body_lists, "lists")):
        if n > most:
            raise RequestRefused(413, f"a body with {n:,} {what} is more than the {most:,} allowed")


def _body_too_large(n_bytes: int | str, limits: Limits) -> RequestRefused:
    return RequestRefused(413, f"a body of {str(n_bytes)[:40]} bytes is more than the {limits.body_bytes:,} allowed")


async def _send_refusal(send: Send, refused: RequestRefused) -> None:
    content = json.dumps({"error": str(refused)}, ensure_ascii=False).encode("utf-8", "replace")
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    if refused.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
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
