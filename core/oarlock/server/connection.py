"""One HTTP connection: uvicorn's protocol, with the bounds that it lacks.

Owns: what a client may hold of the server without having sent a request, and without reading the answer.
Reads: `server.errors`.
Never: knows a route.

Without them one client fills the memory with a header that never ends, and clients that send or read nothing keep
their connections, and their places in the queue, for ever.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from oarlock.server.errors import ApiError

MAX_HEAD_BYTES = 64 << 10  # and as much again as one read of the socket brings
PATIENCE_S = 75.0  # for the end of a head, and for a client that does not read
LINGER_S, LINGER_BYTES = 2.0, 2 << 20  # what is still read of a refused message, so that its sender comes to see the answer
LAST_CALL_S = 0.25  # for a request that was on its way when the server began to end


class Connection(HttpToolsProtocol):
    """Closes a connection whose head is too large or too slow, or whose client has stopped reading."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._overhead = 0  # bytes since the last piece of a body or end of a message: heads, chunk sizes, trailers
        self._head_due: asyncio.TimerHandle | None = None
        self._read_due: asyncio.TimerHandle | None = None
        self._refused = 0  # bytes that came after a refusal, and 1
        self._last_call = False

    # ---------------------------------------------------------------- transport
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_due, self._read_due):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._refused += len(data)
            if self._refused > LINGER_BYTES:
                self.transport.abort()
            return
        self._overhead += len(data)
        super().data_received(data)
        if self._overhead > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(ApiError(400, f"The request's headers are larger than {MAX_HEAD_BYTES} bytes.", code="headers_too_large"))

    def shutdown(self) -> None:
        """The server ends. Closing an idle connection at once would lose a request that has arrived and was not read yet."""
        self._last_call = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False
        else:
            self.loop.call_later(LAST_CALL_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if not self._overhead and (self.cycle is None or self.cycle.response_complete):
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._read_due = self.loop.call_later(PATIENCE_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._read_due is not None:
            self._read_due.cancel()

    # ---------------------------------------------------------------- parser
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None
        super().on_headers_complete()
        if self._last_call and self.cycle is not None:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._overhead = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._overhead = 0
        super().on_message_complete()

    # ---------------------------------------------------------------- refusals
    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for what is no HTTP."""
        self._refuse(ApiError(400, msg, code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        """Answer in the one envelope, where no other answer is on its way, and close."""
        if self._refused:
            return
        self._refused = 1
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started:
                self.transport.close()
                return
            cycle.disconnected = True
            cycle.message_event.set()
        body = error.body()
        head = [*self.server_state.default_headers, (b"content-type", b"application/json"), (b"connection", b"close")]
        head += [(b"content-length", b"%d" % len(body)), (b"x-request-id", uuid.uuid4().hex.encode("ascii"))]
        self.transport.write(STATUS_LINE[error.status] + b"".join(b"%b: %b\r\n" % pair for pair in head) + b"\r\n" + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()  # closing now would reset the connection, and the sender lose the answer
            self.loop.call_later(LINGER_S, self.transport.close)
        else:
            self.transport.close()

    def _expect_head(self) -> None:
        if self._head_due is None:
            self._head_due = self.loop.call_later(PATIENCE_S, self.transport.close)
