"""Request bodies, limits, and the ASGI layer that checks the host, origin, key and size of a request."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Annotated, Any
from urllib.parse import parse_qs, urlsplit

from pydantic import BaseModel, ConfigDict, Field

from .api_keys import ApiKeys

MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Limits:
    """Upper limits; a request that exceeds one is refused unless its comment says otherwise."""

    body_bytes: int = 8 * MEGABYTE
    body_seconds: float = 20.0  # for a body to arrive
    header_seconds: float = 10.0  # for the first line and the headers of a request to arrive
    header_bytes: int = 65_536  # names and values of all headers together
    body_strings: int = 20_000  # names and strings of a JSON body
    body_lists: int = 450_000  # lists and objects of a JSON body, counted by their brackets, those in strings included
    held_bytes: int = 256 * MEGABYTE  # bodies of all current requests together
    characters: int = 200_000  # of a text
    characters_per_token: int = 64  # a text of more than max_len times this is refused before it is tokenised
    tokens: int = 16_384  # of one look, even if the model reads more
    new_tokens: int = 1024
    pixels: int = 16_000_000
    tile: int = 256  # rows, and columns, of exact weights in one response
    labels: int = 2048  # in one response
    response_bytes: int = MEGABYTE  # 250,000 weights of 4 bytes
    beam_nodes: int = 6000  # of a beam search's tree; a larger tree is sent without the dropped hypotheses
    kept_bytes: int = 2000 * MEGABYTE  # all looks together; the least recently used one is dropped first
    kept_looks: int = 64
    model_seconds: float = 300.0  # for a request that runs a model, including its time in the queue
    request_seconds: float = 60.0  # for any other request
    stream_seconds: float = 600.0  # for a stream of the explorer, and for any client to read what it was sent
    waiting: int = 256  # requests in the queue
    walk_tokens: int = 512  # of a text for which the model runs again to show v; a longer one is shown without v
    capture_tokens: int = 4096  # of a text whose activations are captured in one pass
    sweep_operations: float = 2e12  # of a patching sweep; a larger one is estimated from one gradient


INTERNAL_ERROR = "internal error ({}); see the server's log"


class RequestRefused(Exception):
    """Refuses a request with an HTTP status and a sentence; after ``retry_seconds`` it may be repeated."""

    def __init__(self, status: int, sentence: str, retry_seconds: int | None = None) -> None:
        super().__init__(sentence)
        self.status, self.retry_seconds = status, retry_seconds


Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = dict[str, list[str]]  # by name in lower case
RefusalBody = Callable[[str, int, str], dict[str, Any]]

INFO = "regard"  # scope entry that the layers share: the request's id and route, its key's name, whether it is admin
HAS_LONG_HEADERS = "regard.has_long_headers"  # scope entry: some headers were dropped for their size
LOCAL = ("127.0.0.1", "localhost", "::1")
_COOKIE = "regard-key"
# Only our own script and style files, nothing inline. The page exports drawings as data: and blob: URLs.
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
    """The ASGI layer that checks Host and Origin (against DNS rebinding and foreign pages), the key and the body.

    With ``api_key``, a single key or a set of them, a request must send one as `Authorization: Bearer KEY` or in the
    cookie that /?key=KEY sets. Pages of ``allow_origins`` (in lower case, without a final slash) may call the server
    too; ``allow_hosts`` are additional names of this server.
    """

    def __init__(
        self,
        app: App,
        limits: Limits,
        host: str = "127.0.0.1",
        api_key: str | ApiKeys | None = None,
        refusal_body: RefusalBody = lambda path, status, sentence: {"error": sentence},
        allow_origins: Sequence[str] = (),
        allow_hosts: Sequence[str] = (),
    ) -> None:
        """``refusal_body(path, status, sentence)`` builds the JSON body of a refusal."""
        self.app, self.limits, self._refusal_body = app, limits, refusal_body
        self._keys = ApiKeys.single(api_key) if isinstance(api_key, str) else api_key
        self._allow_origins = set(allow_origins)
        self._n_held = 0  # bytes of all bodies in memory
        self._allowed = {*LOCAL, host.lower(), *(() if is_local(host) else (socket.gethostname().lower(),))}
        self._allowed |= {name.lower() for name in allow_hosts}
        self._any_address = not is_local(host)  # any IP address may be ours; a name may be DNS rebinding

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
                if scope["path"].startswith("/static/"):  # the browser revalidates each file before using its copy
                    message["headers"].append((b"cache-control", b"no-cache"))
            await send(message)

        n_held = 0
        try:
            if scope.get(HAS_LONG_HEADERS):
                raise RequestRefused(431, f"the headers have more than {self.limits.header_bytes:,} bytes")
            headers = _read_headers(scope)
            self._check(headers)
            if self._keys is not None and await self._log_in(self._keys, scope, headers, send_with_headers):
                return
            messages = [await self._read_body(receive)]
            if messages[0]["type"] == "http.disconnect":
                return
            n_held = len(messages[0].get("body", b""))
            await self._call_app(scope, receive, send_with_headers, messages)
        except RequestRefused as refused:
            body = self._refusal_body(scope["path"], refused.status, str(refused))
            await _send_refusal(send_with_headers, refused, body)
        finally:
            self._n_held -= n_held

    async def _call_app(self, scope: Scope, receive: Receive, send: Send, messages: list[Message]) -> None:
        """Run the application; it is cancelled if the client disconnects before the response is complete.

        It pops the body from ``messages``, so that no other reference keeps it in memory.
        """
        complete = False

        async def receive_body() -> Message:
            return messages.pop() if messages else await receive()  # after the body, the disconnect

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

    async def _log_in(self, keys: ApiKeys, scope: Scope, headers: Headers, send: Send) -> bool:
        """Check the key. /?key=KEY sets a cookie and redirects to / without the key; only then returns True."""
        in_query = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("key", [])
        cookies = SimpleCookie()
        with suppress(CookieError):
            cookies.load("; ".join(headers.get("cookie", [])))
        bearer = [value[7:].strip() for value in headers.get("authorization", []) if value[:7].lower() == "bearer "]
        sent_keys = bearer or (in_query if scope["path"] == "/" else [])
        key = keys.find(sent_keys, [cookies[_COOKIE].value] if _COOKIE in cookies else [])
        if key is None:
            raise RequestRefused(401, "this server needs a key: Authorization: Bearer KEY, or /?key=KEY in a browser")
        scope.setdefault(INFO, {}).update(key=key.name, admin=key.admin)
        if seconds := keys.take(key):
            sentence = f"key {key.name!r} is limited to {key.per_minute} requests a minute; try again in {seconds} s"
            raise RequestRefused(429, sentence, seconds)
        if scope["path"] != "/" or not in_query:
            return False
        secure = "; Secure" if scope.get("scheme") == "https" else ""
        cookie = f"{_COOKIE}={keys.cookie(key)}; Path=/; HttpOnly; SameSite=Strict{secure}".encode()
        await send_response(send, 303, b"", "text/plain", (b"location", b"/"), (b"set-cookie", cookie))
        return True

    def _check(self, headers: Headers) -> None:
        host = headers.get("host", [])
        if len(host) != 1 or not self._is_own_host(host[0]):
            names = ", ".join(host)[:100] or "nothing"
            problem = f"the Host header says {names!r}, which is not this server"
            raise RequestRefused(403, f"{problem}; open http://127.0.0.1 instead")
        for origin in headers.get("origin", []):
            if not (self._allow_origins & {"*", origin.lower()} or _is_origin(origin, host[0])):
                raise RequestRefused(403, f"pages of {origin[:100]!r} may not call this server")
        for length in headers.get("content-length", []):
            if not (length.isascii() and length.isdigit()):
                raise RequestRefused(400, f"Content-Length {length[:40]!r} is not a number")
            if len(length) > 18 or int(length) > self.limits.body_bytes:
                raise _body_too_large(length, self.limits)

    def _is_own_host(self, host: str) -> bool:
        """Whether a Host header, `localhost:8000` or `[::1]:80`, names this server."""
        if any(sign in host for sign in "/@?#\\ "):
            return False
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
        except ValueError:
            return False
        return name in self._allowed or (self._any_address and _is_address(name))

    async def _read_body(self, receive: Receive) -> Message:
        """Read the whole body; returns it as one message, or the disconnect that arrived instead of its rest.

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
                        raise RequestRefused(429, "too many request bodies are in memory; try again in a moment")
            _check_json_size(body, limits)
        except BaseException as failure:
            self._n_held -= len(body)
            if isinstance(failure, TimeoutError):
                sentence = f"the body did not arrive within {limits.body_seconds:g} s"
                raise RequestRefused(408, sentence) from None
            raise
        return {"type": "http.request", "body": bytes(body), "more_body": False}


def _read_headers(scope: Scope) -> Headers:
    headers: Headers = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1").strip())
    return headers


def _is_origin(origin: str, host: str) -> bool:
    try:
        return urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:  # for example "http://["
        return False


def _check_json_size(body: bytearray, limits: Limits) -> None:
    """Refuse a body with too many values before it is parsed: each takes a hundred bytes or more, and time.

    Strings are estimated by quotes that no backslash precedes. An opening quote never has one before it; a closing
    quote may, so the count is at least the number of strings.
    """
    n_strings = body.count(b'"') - body.count(b'\\"')
    n_lists = body.count(b"[") + body.count(b"{")
    for n, most, name in ((n_strings, limits.body_strings, "strings"), (n_lists, limits.body_lists, "lists")):
        if n > most:
            raise RequestRefused(413, f"a body with {n:,} {name} is more than the {most:,} allowed")


def _body_too_large(n_bytes: int | str, limits: Limits) -> RequestRefused:
    return RequestRefused(413, f"a body of {str(n_bytes)[:40]} bytes is more than the {limits.body_bytes:,} allowed")


async def _send_refusal(send: Send, refused: RequestRefused, body: dict[str, Any]) -> None:
    headers = [(b"connection", b"close")]  # the body may be unread, so no request can follow it
    if refused.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if refused.retry_seconds is not None:
        headers.append((b"retry-after", str(refused.retry_seconds).encode()))
    content = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
    await send_response(send, refused.status, content, "application/json", *headers)


async def send_response(
    send: Send, status: int, content: bytes, content_type: str, *headers: tuple[bytes, bytes]
) -> None:
    """Send a whole response that no cache may keep, with additional ``headers``."""
    own = [(b"content-type", content_type.encode()), (b"content-length", str(len(content)).encode())]
    no_store = (b"cache-control", b"no-store")
    await send({"type": "http.response.start", "status": status, "headers": [*own, no_store, *headers]})
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


# pydantic refuses half a surrogate pair in them, which JSON can express ("\ud800"), but tokenizers cannot.
ModelName = Annotated[str, Field(min_length=1, max_length=300)]
BodyText = Annotated[str, Field(max_length=_LIMITS.characters)]
BodyImage = Annotated[str, Field(max_length=_LIMITS.body_bytes)]  # an image file in base64, bare or as a data: URL
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
    scale: Annotated[float, Field(ge=0, le=1000)] = 1.0  # factor on the scores
    off: Annotated[list[tuple[ModelName, Index, Index]], Field(max_length=4096)] = []  # heads: (kind, layer, head)


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
