"""From an HTTP request to a checked body: content type, size, JSON, fields, model name.

Owns: the order of these checks, the same on every route.
Reads: `config.sections`, `server.state`, `server.schema`, `server.jsonbody`.
Never: looks at what a field means.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import ClientDisconnect, Request

from oarlock.config.sections import ServerConfig
from oarlock.server.errors import ApiError, bad, model_not_found
from oarlock.server.jsonbody import parse_object
from oarlock.server.schema import Table, check_fields
from oarlock.server.state import BodyMemory, ServerState

PATIENCE_S = 75.0  # for the next piece of a body
IGNORED_HEADER = "X-Oarlock-Ignored-Fields"


@contextlib.asynccontextmanager
async def reading(request: Request, limit: int, memory: BodyMemory) -> AsyncIterator[bytes]:
    """The body, counted in `memory` until the block ends.

    Raises ApiError 413 as soon as more than `limit` bytes are announced or have come, 408 when nothing comes for a while, 429 where
    other bodies leave no room.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise _too_large(limit)
    pieces: list[bytes] = []
    size = 0
    stream = request.stream()
    try:
        while (piece := await _next(stream)) is not None:
            if size + len(piece) > limit:
                raise _too_large(limit)
            memory.grow(size, size + len(piece))
            size += len(piece)
            pieces.append(piece)
        raw = b"".join(pieces)
        pieces.clear()
        yield raw
    finally:
        memory.free(size)


async def _next(stream: AsyncIterator[bytes]) -> bytes | None:
    """The next piece of a body; None after the last."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await anext(stream)
    except StopAsyncIteration:
        return None
    except TimeoutError:
        message = f"Nothing more of the request body came for {PATIENCE_S:.0f} s."
        raise ApiError(408, message, code="body_too_slow", headers={"Connection": "close"}) from None


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
        async with reading(request, state.server.max_body_bytes, state.bodies) as raw:
            if len(raw) <= BodyMemory.FREE_BYTES:
                parsed = parse_object(raw)
            else:
                async with state.bodies.turn:
                    parsed = parse_object(raw)
                    await asyncio.sleep(0)  # whoever waits for the loop goes before the next large body
    except ClientDisconnect:
        raise bad(None, "The client closed the connection before the body was complete.") from None
    _check_lengths(parsed, table, state.server)
    values, ignored = check_fields(parsed, table, state.server.allow_unknown_fields)
    name = values.get("model")
    if name is not None and name not in state.names:
        raise model_not_found(name, state.names)
    if not ignored:
        return values, {}
    shown = ",".join(re.sub(r"[^A-Za-z0-9_.-]", "_", field)[:64] for field in ignored[:32])
    return values, {IGNORED_HEADER: shown}


def _check_lengths(parsed: dict[str, Any], table: Table, server: ServerConfig) -> None:
    """Refuse the lists that are too long before their entries are looked at: a million of them takes seconds. Raises ApiError 400."""
    caps = {
        "logit_bias": ("max-logit-bias", server.max_logit_bias),
        "stop": ("max-stop-strings", server.max_stop_strings),
        "bad_words": ("max-bad-words", server.max_bad_words),
        "stop_token_ids": ("max-stop-token-ids", server.max_stop_token_ids),
    }
    for name, (flag, cap) in caps.items():
        value = parsed.get(name)
        if name in table.fields and isinstance(value, list | dict) and len(value) > cap:
            raise bad(name, f"{name} has {len(value)} entries; the limit (--{flag}) is {cap}.", "invalid_value")
