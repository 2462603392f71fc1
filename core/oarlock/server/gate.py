"""What every request passes before it reaches a route: its id, the API key, the server's phase.

Owns: the X-Request-Id header, authentication, and the answer to what goes wrong outside the routes.
Reads: `server.state`, `server.errors`.
Never: reads a body; lets a path but the three open ones pass without a key.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import uuid
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from oarlock.async_llm import TRACE
from oarlock.server.errors import JSON, STOPS, ApiError, from_exception
from oarlock.server.kinds import REQUEST_ID
from oarlock.server.state import OWNER, ServerState

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

OPEN_PATHS = frozenset({"/health", "/ping", "/version"})
ANY_PHASE = OPEN_PATHS | {"/metrics"}


def route_path(scope: Scope) -> str:
    """The path as the router sees it: without the root path, where that is a prefix of it."""
    path, root = scope["path"], scope.get("root_path", "")
    if root and (path == root or path.startswith(root + "/")):
        return path[len(root) :]
    return path


def header(scope: Scope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:
            return value
    return None


def response_start(status: int, content_type: bytes, length: int | None, extra: Iterable[tuple[str, str]] = ()) -> dict[str, Any]:
    headers = [(b"content-type", content_type)]
    if length is not None:
        headers.append((b"content-length", b"%d" % length))
    headers += [(name.lower().encode("ascii"), value.encode("latin-1", "replace")) for name, value in extra]
    return {"type": "http.response.start", "status": status, "headers": headers}


async def send_json(send: Send, status: int, body: bytes, extra: Iterable[tuple[str, str]] = ()) -> None:
    await send(response_start(status, JSON, len(body), extra))
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ApiError, body: bytes | None = None) -> None:
    await send_json(send, error.status, error.body() if body is None else body, error.headers.items())


class Keys:
    """The accepted API keys, as digests: comparing takes the same time whatever is sent, and nothing here can be printed."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def find(self, *sent: bytes) -> int | None:
        """The number of the key that one of what was sent is; b"" is none."""
        found = None
        for key in sent:
            digest = hashlib.sha256(key.strip()).digest()
            for number, known in enumerate(self._digests):
                if hmac.compare_digest(digest, known) and key and found is None:
                    found = number
        return found


def _sent_keys(scope: Scope, *, x_api_key: bool, basic: bool) -> tuple[bytes, ...]:
    """What came as a key: Bearer KEY, the header X-API-Key, the password of HTTP Basic. The last two only where they are taken."""
    scheme, _, token = (header(scope, b"authorization") or b"").partition(b" ")
    keys: tuple[bytes, ...]
    match scheme.lower():
        case b"bearer":
            keys = (token,)
        case b"basic" if basic and _is_own_page(scope):
            try:
                keys = (base64.b64decode(token).partition(b":")[2],)
            except binascii.Error:
                keys = ()
        case _:
            keys = ()
    return (*keys, header(scope, b"x-api-key") or b"") if x_api_key else keys


def _is_own_page(scope: Scope) -> bool:
    """Whether no page of another site made a browser send this. A browser adds the password by itself, whoever asks."""
    if (site := header(scope, b"sec-fetch-site")) is not None:
        return site in (b"same-origin", b"none")
    origin = header(scope, b"origin")  # an older browser, or plain HTTP: reads give away nothing to the other page, and writes have an origin
    return origin is None or origin.partition(b"://")[2] == header(scope, b"host")


class Gate:
    """ASGI middleware around the routes."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], state: ServerState) -> None:
        self._app, self._state = app, state
        self._keys = Keys(state.api_keys)
        self._root = (state.server.root_path or "").rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._root:
            scope["root_path"] = self._root  # the router takes it off paths that have it, so a proxy may strip it or not
        request_id = _request_id(header(scope, b"x-request-id"))
        scope.setdefault("state", {})["request_id"] = request_id
        TRACE.set(((header(scope, b"traceparent") or b"").decode("latin-1"), request_id))
        started = False

        async def send_with_id(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode("ascii"))]
            await send(message)

        error = self._refusal(scope)
        if error is None:
            try:
                await self._app(scope, receive, send_with_id)
                return
            except STOPS:
                raise
            except BaseException as exc:
                error = from_exception(exc, request_id)
                if started:
                    raise  # half a response is out; the server closes the connection
        await send_error(send_with_id, error, self._state.error_body(route_path(scope), error, request_id))

    def _refusal(self, scope: Scope) -> ApiError | None:
        path = route_path(scope)
        if self._keys and path not in OPEN_PATHS:
            sent = _sent_keys(scope, x_api_key=self._state.takes_x_api_key(path), basic=bool(self._state.browser_paths))
            number = self._keys.find(*sent)
            if number is None:
                text, ask = "The API key is missing or wrong; send it as Authorization: Bearer KEY.", "Bearer"
                if path in self._state.browser_paths:
                    text, ask = "This page needs the API key: give it as the password, with any user name.", 'Basic realm="Oarlock", charset="UTF-8"'
                return ApiError(401, text, code="invalid_api_key", headers={"WWW-Authenticate": ask})
            OWNER.set(number)
        if path in ANY_PHASE:
            return None
        return self._state.not_serving()


def _request_id(sent: bytes | None) -> str:
    """The client's id where it is short and plain, else a fresh one."""
    if sent is not None and len(sent) <= 128:
        text = sent.decode("latin-1")
        if REQUEST_ID.fullmatch(text):
            return text
    return uuid.uuid4().hex
