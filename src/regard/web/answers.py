"""Answers on the wire: bytes of float32, JSON without NaN, and one place that knows how large they may be."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from fastapi import Request
from fastapi.responses import JSONResponse, Response
from torch import Tensor

from .limits import Limits, Refused

BINARY = "application/octet-stream"
# A look never changes, and its id is never given again: what was fetched once need not be asked for again.
_LASTING = "private, max-age=86400, immutable"


class Unchanged(Exception):
    """The browser has this answer already."""


def etag(request: Request) -> str:
    """The name of an answer about a look: which look, and which question."""
    asked = f"{request.url.path}?{request.url.query}"
    return f'"{hashlib.blake2s(asked.encode(), digest_size=12).hexdigest()}"'


def check_unchanged(request: Request) -> None:
    known = request.headers.get("if-none-match", "")
    if etag(request) in {name.strip().removeprefix("W/") for name in known.split(",")}:
        raise Unchanged


def floats(request: Request, values: Tensor, limits: Limits) -> Response:
    """Numbers row by row, 4 bytes each, little endian; their shape in a header."""
    numbers = values.detach().cpu().float().contiguous().numpy()
    content = np.ascontiguousarray(numbers, dtype="<f4").tobytes()
    shape = ",".join(str(n) for n in values.shape)
    return sized(Response(content, media_type=BINARY, headers={"X-Shape": shape, **lasting(request)}), limits)


def document(request: Request, content: Any, limits: Limits) -> Response:
    return sized(JSONResponse(plain(content), headers=lasting(request)), limits)


def lasting(request: Request) -> dict[str, str]:
    return {"Cache-Control": _LASTING, "ETag": etag(request)}


def sized(response: Response, limits: Limits) -> Response:
    """No answer is larger than a page should have to wait for."""
    if len(response.body) > limits.response_bytes:
        size, most = len(response.body), limits.response_bytes
        raise Refused(413, f"the answer has {size:,} bytes, more than the {most:,} that are sent at once; ask for less")
    return response


def plain(x: Any) -> Any:
    """As JSON can say it: arrays as lists, records as objects, and null for what is no finite number."""
    match x:
        case None | bool() | int() | str():
            return x
        case float():
            return x if math.isfinite(x) else None
        case Tensor() | np.ndarray() | np.generic():
            return plain(x.tolist())
        case Mapping():
            return {str(name): plain(value) for name, value in x.items()}
        case tuple() if hasattr(x, "_asdict"):
            return plain(x._asdict())
        case Sequence() | set() | frozenset():
            return [plain(value) for value in x]
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return {field.name: plain(getattr(x, field.name)) for field in dataclasses.fields(x)}
    raise TypeError(f"{type(x).__name__} has no form in JSON")
