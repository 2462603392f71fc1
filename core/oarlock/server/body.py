"""From an HTTP request to a checked body: content type, size, JSON, fields, model name.

Owns: the order of these checks, the same on every route.
Reads: `server.state`, `server.schema`, `server.jsonbody`.
Never: looks at what a field means.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from starlette.requests import ClientDisconnect, Request

from oarlock.server.errors import ApiError, bad, model_not_found
from oarlock.server.jsonbody import parse_object
from oarlock.server.schema import Table, check_fields
from oarlock.server.state import ServerState

PATIENCE_S = 75.0  # for the next piece of a body
IGNORED_HEADER = "X-Oarlock-Ignored-Fields"


async def read_body(request: Request, limit: int) -> bytes:
    """Raises ApiError 413 as soon as more than `limit` bytes are announced or have come, 408 when nothing comes for a while."""
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise _too_large(limit)
    pieces: list[bytes] = []
    size = 0
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(PATIENCE_S):
                piece = await anext(stream)
        except StopAsyncIteration:
            return b"".join(pieces)
        except TimeoutError:
            message = f"Nothing more of the request body came for {PATIENCE_S:.0f} s."
            raise ApiError(408, message, code="body_too_slow", headers={"Connection": "close"}) from None
        size += len(piece)
        if size > limit:
            raise _too_large(limit)
        pieces.append(piece)


def _too_large(limit: int) -> ApiError:
    message = f"The request body is larger than {limit} bytes; send less, or start the server with a larger --max-body-bytes."
    return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})


async def checked_body(request: Request, state: ServerState, table: Table) -> tuple[dict[str, Any], dict[str, str]]:
    """The request's fields, and headers for the response. Raises ApiError.

    A body of another content type is refused: a web page could send it without asking the browser first.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not re.fullmatch(r"application/[a-z0-9.+-]+\+json", kind):
        raise bad(None, "Send the body as JSON, with the header Content-Type: application/json.", "invalid_content_type")
    try:
        raw = await read_body(request, state.server.max_body_bytes)
    except ClientDisconnect:
        raise bad(None, "The client closed the connection before the body was complete.") from None
    values, ignored = check_fields(parse_object(raw), table, state.server.allow_unknown_fields)
    name = values.get("model")
    if name is not None and name not in state.names:
        raise model_not_found(name, state.names)
    if not ignored:
        return values, {}
    shown = ",".join(re.sub(r"[^A-Za-z0-9_.-]", "_", field)[:64] for field in ignored[:32])
    return values, {IGNORED_HEADER: shown}
