"""Routes of plugins: the server as they see it, and what every request to them passes.

Owns: the checks around a plugin's route, its answer on the wire, and calls from one route to another.
Reads: `backend_api`, `server.*`.
Never: gives a plugin the request, the key or the server's state; leaves a route running for a client that hung up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from oarlock.backend_api import EventReply, JsonReply, Pooled, PoolOptions, Route, RouteCall, RouteError, RouteFields
from oarlock.errors import OarlockError, PluginError, RequestError
from oarlock.server import kinds
from oarlock.server.answer import DONE, encode, supervise
from oarlock.server.body import checked_body, reading
from oarlock.server.errors import STOPS, ApiError, bad, from_exception
from oarlock.server.gate import Receive, Scope, Send, response_start
from oarlock.server.kinds import Kind
from oarlock.server.pooling import pool
from oarlock.server.schema import Refused, Table
from oarlock.server.state import OpenRequest, ServerState

log = logging.getLogger("oarlock.server")
Inner = Callable[[Request], Awaitable[Response]]
# An error in a stream has no status of its own: its type says whose it is, and some codes which.
_TYPE_STATUS = {"invalid_request_error": 400, "rate_limit_error": 429}
_CODE_STATUS = {("server_error", code): 503 for code in ("loading", "shutting_down", "engine_dead")} | {("invalid_request_error", "aborted"): 409}
KINDS: dict[str, Kind] = {
    "boolean": kinds.boolean,
    "integer": kinds.integer,
    "number": kinds.number,
    "string": kinds.string,
    "strings": kinds.strings,
    "object": kinds.obj,
    "any": kinds.raw,
}


def make_table(path: str, fields: RouteFields) -> Table:
    """The fields as core's own routes have them."""

    def refused(why: str, neutral: tuple[Any, ...]) -> Refused:
        return Refused(why, lambda value: any(type(value) is type(one) and value == one for one in neutral))

    table = {name: KINDS[kind] for name, kind in fields.fields.items()}
    return Table(path, table, fields.required, {name: refused(*what) for name, what in fields.refused.items()})


class PluginServer:
    """`backend_api.RouteServer`. `routes` are the server's POST routes by path, `add` makes one of a function."""

    def __init__(self, state: ServerState, routes: Mapping[str, Inner], add: Callable[..., None]) -> None:
        self._state, self._routes, self._add = state, routes, add
        self._tasks: set[asyncio.Task[None]] = set()  # the loop alone would forget them

    @property
    def model_names(self) -> tuple[str, ...]:
        return self._state.names

    @property
    def max_model_len(self) -> int:
        return self._state.info.max_model_len

    @property
    def vocab_size(self) -> int:
        return self._state.info.vocab_size

    @property
    def max_prompts(self) -> int:
        return self._state.server.max_prompts

    @property
    def max_body_bytes(self) -> int:
        return self._state.server.max_body_bytes

    @property
    def allow_unknown_fields(self) -> bool:
        return self._state.server.allow_unknown_fields

    @property
    def options(self) -> Mapping[str, Any]:
        return self._state.engine.device.options

    @property
    def labels(self) -> tuple[str, ...]:
        return self._state.llm.processor.pooler.labels

    @property
    def post_paths(self) -> frozenset[str]:
        return frozenset(self._routes)

    def add(self, route: Route) -> None:
        """Raises PluginError for a path that is taken: a plugin cannot replace core's routes or another's."""
        if route.method == "POST" and route.path in self._routes:
            raise PluginError(f"there is a route POST {route.path} already")
        table = None if route.fields is None else make_table(route.path, route.fields)
        start = route.path.partition("/{")[0]
        if route.error_body is not None:
            self._state.error_bodies[start] = route.error_body
        if route.is_page:
            self._state.browser_paths.add(route.path)
        if route.takes_x_api_key:
            self._state.x_api_key_paths.add(start)

        async def endpoint(request: Request, state: ServerState) -> Response:
            try:
                call, headers = await _read(request, state, route, table)
            except (ApiError, RequestError):
                if route.generates:
                    state.metrics.outcome("refused")
                raise
            return _PluginAnswer(state, route, call, headers)

        endpoint.__name__ = route.path.strip("/").replace("/", "_")
        self._add(route.method, route.path, endpoint, table)

    async def call(self, path: str, body: Mapping[str, Any], request_id: str) -> Any:
        start: Mapping[str, Any] = {}
        pieces = []
        async with contextlib.aclosing(self._messages(path, body, request_id)) as messages:
            async for message in messages:
                start = start or message
                pieces.append(message.get("body", b""))
        value = msgspec.json.decode(b"".join(pieces))
        if start["status"] >= 400:
            raise _as_route_error(start, value["error"])
        return value

    async def stream(self, path: str, body: Mapping[str, Any], request_id: str) -> AsyncGenerator[Any, None]:
        start: Mapping[str, Any] = {}
        rest = b""
        async with contextlib.aclosing(self._messages(path, {**body, "stream": True}, request_id)) as messages:
            async for message in messages:
                start = start or message
                *events, rest = (rest + message.get("body", b"")).split(b"\n\n") if start["status"] < 400 else (rest + message.get("body", b""),)
                for event in events:
                    data = event.rpartition(b"data: ")[2]
                    if data == b"[DONE]":
                        continue
                    value = msgspec.json.decode(data)
                    if type(value.get("error")) is dict:
                        raise _as_route_error({}, value["error"])
                    yield value
        if start["status"] >= 400:
            raise _as_route_error(start, msgspec.json.decode(rest)["error"])

    async def pool(self, prompts: Sequence[Any], options: PoolOptions, request_id: str, param: str = "prompt") -> list[Pooled]:
        try:
            return await pool(self._state, prompts, options, request_id, param)
        except (ApiError, OarlockError) as exc:
            error = from_exception(exc, request_id)
            raise RouteError(error.status, error.message, error.param, error.code, error.type, error.headers) from None

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the background work of a plugin's route failed", exc_info=error)

    async def _messages(self, path: str, body: Mapping[str, Any], request_id: str) -> AsyncGenerator[Any, None]:
        """The ASGI messages of another route's answer. Its work ends when this generator is closed. Raises RouteError."""
        route = self._routes.get(path)
        if route is None:
            raise RouteError(404, f"There is no route POST {path[:200]} here.", code="not_found")
        if (error := self._state.not_serving()) is not None:
            raise _from(error)
        queue: asyncio.Queue[Any] = asyncio.Queue(maxsize=16)
        request = [{"type": "http.request", "body": encode(body), "more_body": False}]

        async def receive() -> Any:
            return request.pop() if request else await asyncio.get_running_loop().create_future()

        async def run() -> None:
            scope = {
                "type": "http", "method": "POST", "path": path, "query_string": b"", "headers": [(b"content-type", b"application/json")],
                "state": {"request_id": request_id},
            }  # fmt: skip
            try:
                response = await route(Request(scope, receive))
                await response(scope, receive, queue.put)
                await queue.put(None)
            except STOPS:
                raise
            except BaseException as exc:  # noqa: BLE001  it goes on in the task that reads the queue
                await queue.put(exc)

        task = asyncio.create_task(run())
        try:
            while (message := await queue.get()) is not None:
                if isinstance(message, BaseException):
                    raise _from(from_exception(message, request_id)) from None
                yield message
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _as_route_error(start: Mapping[str, Any], error: Mapping[str, Any]) -> RouteError:
    """Another route's envelope after this beginning of a response, with when to try again; {}: inside a stream."""
    status = start["status"] if start else _CODE_STATUS.get((error["type"], error["code"]), _TYPE_STATUS.get(error["type"], 500))
    headers = dict(start.get("headers", ()))
    again = {"Retry-After": headers[b"retry-after"].decode("latin-1")} if b"retry-after" in headers else {}
    return RouteError(status, error["message"], error["param"], error["code"], error["type"], again, counted=True)


def _from(error: ApiError) -> RouteError:
    return RouteError(error.status, error.message, error.param, error.code, error.type, error.headers, counted=True)


async def _read(request: Request, state: ServerState, route: Route, table: Table | None) -> tuple[RouteCall, dict[str, str]]:
    values: dict[str, Any] = {}
    headers: dict[str, str] = {}
    raw = b""
    if table is not None:
        values, headers = await checked_body(request, state, table)
    elif route.takes_bytes:
        try:
            async with reading(request, state.server.max_body_bytes, state.bodies) as raw:
                pass
        except ClientDisconnect:
            raise bad(None, "The client closed the connection before the body was complete.") from None
    content_type = request.headers.get("content-type", "")
    return RouteCall(request.state.request_id, values, raw, content_type, dict(request.path_params), dict(request.query_params)), headers


class _PluginAnswer(Response):
    """Runs a plugin's route and writes what it answers."""

    def __init__(self, state: ServerState, route: Route, call: RouteCall, headers: dict[str, str]) -> None:
        self.background = None
        self._state, self._route, self._call, self._extra = state, route, call, headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await supervise(OpenRequest(self._call.request_id), self._run(send), receive)

    async def _run(self, send: Send) -> None:
        try:
            reply = await self._route.endpoint(self._call)
        except RouteError as error:
            raise self._refusal(error) from None
        if isinstance(reply, EventReply):
            await self._stream(reply, send)
            return
        status, data, kind = (reply.status, encode(reply.value), "application/json") if isinstance(reply, JsonReply) else (200, reply.data, reply.media_type)
        headers = {**self._extra, **reply.headers}
        await send(response_start(status, kind.encode("latin-1"), len(data), headers.items()))
        await send({"type": "http.response.body", "body": data})

    async def _stream(self, reply: EventReply, send: Send) -> None:
        started, tail = False, DONE if reply.done else b""
        try:
            async with contextlib.aclosing(reply.events) as events:
                async for name, value in events:
                    if not started:
                        started = True
                        headers = {**self._extra, **reply.headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
                        await send(response_start(200, b"text/event-stream; charset=utf-8", None, headers.items()))
                    await send({"type": "http.response.body", "body": _event(name, value), "more_body": True})
        except Exception as exc:  # noqa: BLE001  the client is told, in one way or the other
            error = self._refusal(exc) if isinstance(exc, RouteError) else from_exception(exc, self._call.request_id)
            if not started:
                raise error from None
            tail = _event("error", msgspec.Raw(self._state.error_body(self._route.path, error, self._call.request_id))) + tail
        await send({"type": "http.response.body", "body": tail, "more_body": False})

    def _refusal(self, error: RouteError) -> ApiError:
        if self._route.generates and not error.counted:
            self._state.metrics.outcome("abort" if error.code == "aborted" else "error" if error.status >= 500 else "refused")
        return ApiError(error.status, error.message, error.type, error.param, error.code, error.headers)


def _event(name: str | None, value: Any) -> bytes:
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + encode(value) + b"\n\n"


__all__ = ["PluginServer", "make_table"]
