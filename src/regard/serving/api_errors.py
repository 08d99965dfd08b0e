"""Errors in the format of OpenAI's API: an HTTP status and ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from typing import Any

from ..errors import BadOutput, RegardError
from ..web.requests import INTERNAL_ERROR, RequestRefused
from ..web.server import main_problem, sentence_of
from .request_queue import QueueFull
from .scheduler import SchedulerClosed

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """Answers a request with an error status and a message; ``param`` names the field that is wrong."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    message = " ".join(message.split()).encode("utf-8", "replace").decode()
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_document(error: Exception) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Return the status, the body and the extra headers for an exception."""
    from fastapi.exceptions import RequestValidationError
    from starlette.exceptions import HTTPException

    match error:
        case ApiError():
            return error.status, error_body(error.status, str(error), error.param, error.code), {}
        case QueueFull():
            return 429, error_body(429, str(error), code="queue_full"), {"Retry-After": str(error.retry_seconds)}
        case SchedulerClosed():
            return 503, error_body(503, str(error), code="shutting_down"), {"Retry-After": "5"}
        case RequestRefused():
            return error.status, error_body(error.status, str(error)), {}
        case RequestValidationError():
            problem = main_problem(error)
            names = [part for part in problem.get("loc", ()) if part not in ("body", "query", "path")]
            field = names[0][:100] if names and isinstance(names[0], str) else None  # a number: a place in the body
            return 400, error_body(400, sentence_of(problem), field), {}
        case HTTPException():
            return error.status_code, error_body(error.status_code, str(error.detail)), dict(error.headers or {})
        case BadOutput():
            return 500, error_body(500, str(error)), {}
        case ValueError() | TypeError() | RegardError():
            message = str(error).split("; truncate=True")[0]  # an option of Python's functions
            return 400, error_body(400, message or type(error).__name__), {}
    return 500, error_body(500, INTERNAL_ERROR.format(type(error).__name__)), {}
