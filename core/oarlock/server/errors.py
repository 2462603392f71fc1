"""Every failure becomes one JSON envelope with the right status.

Owns: the mapping from exceptions to HTTP status, type, param and code; the envelope.
Reads: `errors`.
Never: puts a Python repr, a path or a stack trace into a message that a client sees.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from oarlock.errors import (
    EngineDead,
    OarlockError,
    PromptTooLong,
    QueueFull,
    RequestError,
    UnsupportedByBackend,
    WorkerError,
)
from oarlock.frontend.outputs import exception_for
from oarlock.messages import ErrorInfo

log = logging.getLogger("oarlock.server")

INVALID = "invalid_request_error"
# All else that is raised is a fault to be told: also a panic of a library written in Rust, which is no Exception.
STOPS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
JSON = b"application/json"


@dataclass(eq=False)
class ApiError(Exception):
    """An error ready for the wire."""

    status: int
    message: str
    type: str = INVALID
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Exception.__init__(self, self.message)

    def payload(self) -> dict[str, Any]:
        """The envelope, the same in a response body and in a stream event."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def body(self) -> bytes:
        return msgspec.json.encode(self.payload())


def bad(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A 400 that names its field."""
    return ApiError(400, message, INVALID, param, code)


def unavailable(message: str, code: str, retry_after_s: int | None = None) -> ApiError:
    """A 503: loading, draining, or a dead engine."""
    return ApiError(503, message, "server_error", None, code, {} if retry_after_s is None else {"Retry-After": str(retry_after_s)})


def model_not_found(name: str, served: tuple[str, ...]) -> ApiError:
    """The 404 for a model that is not served; the name is shortened, as the client chose it."""
    shown = name if len(name) <= 200 else name[:200] + "…"
    known = ", ".join(repr(s) for s in served)
    return ApiError(404, f"The model {shown!r} does not exist here; this server has {known}.", INVALID, "model", "model_not_found")


def queue_full(message: str, retry_after_s: int, code: str = "queue_full") -> ApiError:
    return ApiError(429, message, "rate_limit_error", None, code, {"Retry-After": str(max(1, retry_after_s))})


def from_exception(exc: BaseException, request_id: str = "") -> ApiError:
    """What the client is told about `exc`; logs what only the operator should read."""
    match exc:
        case ApiError():
            return exc
        case QueueFull():
            return queue_full(str(exc), exc.retry_after_s, exc.code or "queue_full")
        case PromptTooLong():
            return bad(exc.param, str(exc), exc.code or "context_length_exceeded")
        case RequestError():
            return bad(exc.param, str(exc), exc.code or "invalid_value")
        case UnsupportedByBackend():
            return bad(None, str(exc), "unsupported_by_device")
        case EngineDead():
            log.error("request %s: the engine has ended: %s", request_id, exc)
            return unavailable("The engine has ended; this server is shutting down.", "engine_dead")
        case WorkerError():
            log.error("request %s: %s", request_id, exc)
            return ApiError(500, "A step of the model failed; the request was ended. The server's log has the reason.", "server_error", None, "step_failed")
        case OarlockError():
            log.error("request %s: %s: %s", request_id, type(exc).__name__, exc)
            return ApiError(500, "The server could not serve the request; its log has the reason.", "server_error", None, "internal_error")
        case _:
            log.error("request %s: unexpected error", request_id, exc_info=exc)
            return ApiError(500, "Internal error; the server's log has the reason.", "server_error", None, "internal_error")


def from_info(info: ErrorInfo, request_id: str = "") -> ApiError:
    """An engine-side error that arrived as a record."""
    return from_exception(exception_for(info), request_id)
