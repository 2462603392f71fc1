"""What one connection may cost: heads without end, heads and bodies that never come, answers that nobody reads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from oarlock.config.sections import ServerConfig
from oarlock.server import body, connection, http
from oarlock.server.errors import ApiError
from oarlock.server.gate import send_error, send_json
from oarlock.server.http import HttpServer
from oarlock.server.state import BodyMemory
from starlette.requests import Request

pytestmark = pytest.mark.asyncio
HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[], Awaitable[Streams]]


class App:
    """Answers with the length of the body; answers /flood without end until the client is gone."""

    def __init__(self) -> None:
        self.memory = BodyMemory(1 << 20)
        self.flooding = asyncio.Event()
        self.gone = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            async with body.reading(Request(scope, receive), 1 << 20, self.memory) as raw:
                pass
        except ApiError as error:
            await send_error(send, error)
            return
        if scope["path"] != "/flood":
            await send_json(send, 200, json.dumps({"bytes": len(raw)}).encode())
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        self.flooding.set()
        watch = asyncio.create_task(self._until_gone(receive))
        while not watch.done():
            await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})
            await asyncio.sleep(0)
        self.gone.set()

    @staticmethod
    async def _until_gone(receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


@contextlib.asynccontextmanager
async def serving(app: App) -> AsyncIterator[Connect]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        server = HttpServer(app, ServerConfig())
        task = asyncio.create_task(server.serve(sockets=[sock]))
        try:
            yield lambda: asyncio.open_connection(*sock.getsockname())
        finally:
            server.finish()
            await task


async def rest(streams: Streams, timeout_s: float = 5.0) -> bytes:
    """All that comes until the server closes the connection."""
    async with asyncio.timeout(timeout_s):
        data = b""
        with contextlib.suppress(ConnectionError):
            while piece := await streams[0].read(1 << 16):
                data += piece
        return data


def error_of(response: bytes, status: int) -> dict[str, Any]:
    head, _, raw = response.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status) and b"content-type: application/json" in head.lower()
    return json.loads(raw)["error"]


async def send_for_ever(streams: Streams, piece: bytes) -> int:
    """Bytes sent until the server had enough."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < 8 << 20 and not streams[0].at_eof():
            streams[1].write(piece)
            await streams[1].drain()
            sent += len(piece)
            await asyncio.sleep(0.001)
    return sent


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (HEAD + b"x: ", b"a" * 10_000),
        (HEAD, b"x-one-of-many: y\r\n" * 500),
        (b"GET /", b"a" * 10_000),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n", b"x-trailer: y\r\n" * 500),
    ],
    ids=["one-header", "many-headers", "path", "trailers"],
)
async def test_head_without_end_is_refused(start: bytes, piece: bytes) -> None:
    async with serving(App()) as connect:
        streams = await connect()
        streams[1].write(start)
        assert await send_for_ever(streams, piece) < 4 << 20  # what the sockets hold, and no more
        response = await rest(streams)
        if response:  # a reset may overtake it where more comes than is still read
            assert error_of(response, 400)["code"] == "headers_too_large"


async def test_sender_of_a_large_head_sees_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.5)
    async with serving(App()) as connect:
        for _ in range(5):
            streams = await connect()
            streams[1].write(HEAD + b"x: " + b"a" * 1_000_000 + b"\r\n\r\n")
            await streams[1].drain()
            response = await rest(streams)
            assert error_of(response, 400)["code"] == "headers_too_large" and b"x-request-id: " in response


async def test_bodies_of_any_cut_are_no_head() -> None:
    async with serving(App()) as connect:
        streams = await connect()
        streams[1].write(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        for _ in range(40):
            streams[1].write(b"1\r\na\r\n" * 1000)
            await streams[1].drain()
        streams[1].write(b"0\r\n\r\n" + HEAD + b"connection: close\r\ncontent-length: 300000\r\n\r\n" + bytes(300_000))
        response = await rest(streams)
        assert b'{"bytes": 40000}' in response and response.endswith(b'{"bytes": 300000}')


async def test_what_is_no_http_gets_the_envelope() -> None:
    async with serving(App()) as connect:
        streams = await connect()
        streams[1].write(b"\x16\x03\x01 hello\r\n\r\n")
        assert error_of(await rest(streams), 400)["code"] == "invalid_http"


@pytest.mark.parametrize(
    ("sent", "answers"),
    [(b"", 0), (HEAD, 0), (HEAD + b"\r\n" + HEAD, 1)],
    ids=["nothing", "half-a-head", "second-request"],
)
async def test_head_that_does_not_come_ends_the_connection(sent: bytes, answers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PATIENCE_S", 0.2)
    async with serving(App()) as connect:
        streams = await connect()
        streams[1].write(sent)
        assert (await rest(streams)).count(b"HTTP/1.1 ") == answers


async def test_body_that_does_not_come_is_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "PATIENCE_S", 0.2)
    async with serving(App()) as connect:
        streams = await connect()
        streams[1].write(HEAD + b"content-length: 10\r\n\r\n{")
        assert error_of(await rest(streams), 408)["code"] == "body_too_slow"


async def test_large_bodies_together_are_bounded() -> None:
    app = App()
    free = BodyMemory.FREE_BYTES
    app.memory.limit = 200_000
    async with serving(app) as connect:
        first, second, small = await connect(), await connect(), await connect()
        first[1].write(HEAD + b"content-length: 200000\r\n\r\n" + bytes(199_999))
        async with asyncio.timeout(5):
            while app.memory.used != 199_999 - free:
                await asyncio.sleep(0.01)
        second[1].write(HEAD + b"content-length: 200000\r\n\r\n" + bytes(200_000))
        answer = await rest(second)
        assert error_of(answer, 429)["code"] == "queue_full" and b"retry-after: 1\r\n" in answer.lower()
        small[1].write(HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % free + bytes(free))
        assert json.loads((await rest(small)).partition(b"\r\n\r\n")[2]) == {"bytes": free}
        assert app.memory.used == 199_999 - free
        first[1].write(b"x")
        head = await first[0].readuntil(b"}")
        assert head.startswith(b"HTTP/1.1 200 ")
        third = await connect()
        third[1].write(HEAD + b"content-length: 100000\r\n\r\n" + bytes(90_000))
        third[1].close()  # a body that is given up is freed as well
        async with asyncio.timeout(5):
            while app.memory.used:
                await asyncio.sleep(0.01)


async def test_client_that_reads_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PATIENCE_S", 0.2)
    app = App()
    async with serving(app) as connect:
        streams = await connect()
        streams[1].transport.pause_reading()  # type: ignore[attr-defined]
        streams[1].write(b"POST /flood HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(10):
            await app.flooding.wait()
            await app.gone.wait()


async def test_slow_reader_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PATIENCE_S", 0.5)
    app = App()
    async with serving(app) as connect:
        streams = await connect()
        streams[1].write(b"POST /flood HTTP/1.1\r\nhost: x\r\n\r\n")
        end = asyncio.get_running_loop().time() + 1.2
        while asyncio.get_running_loop().time() < end:
            assert await streams[0].read(1 << 20)
            await asyncio.sleep(0.01)
        assert not app.gone.is_set()
        streams[1].transport.abort()
        async with asyncio.timeout(5):
            await app.gone.wait()


async def test_client_that_reads_nothing_is_no_error_when_the_server_ends(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(http, "FINISH_S", 0.3)
    app = App()
    async with serving(app) as connect:
        logging.getLogger("uvicorn").addHandler(caplog.handler)
        streams = await connect()
        streams[1].transport.pause_reading()  # type: ignore[attr-defined]
        streams[1].write(b"POST /flood HTTP/1.1\r\nhost: x\r\n\r\n")
        await app.flooding.wait()
    assert app.gone.is_set() and not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_what_has_arrived_is_answered_when_the_server_ends() -> None:
    """On connections that were idle, and on those that no one has accepted yet; one that stays idle doesn't hold the end up."""
    request = HEAD + b"content-length: 2\r\n\r\n{}"
    with socket.create_server(("127.0.0.1", 0)) as sock:
        address = sock.getsockname()
        server = HttpServer(App(), ServerConfig())
        task = asyncio.create_task(server.serve(sockets=[sock]))
        fresh, used, idle = [await asyncio.open_connection(*address) for _ in range(3)]
        used[1].write(request)
        assert b"200 OK" in await used[0].readuntil(b'{"bytes": 2}')
        # From here on the server's loop does not run until it ends: what follows waits in the kernel.
        for streams in (fresh, used):
            streams[1].write(request)
        waiting = [socket.create_connection(address) for _ in range(5)]
        for peer in waiting:
            peer.sendall(request)
        started = asyncio.get_running_loop().time()
        await server.shutdown([sock])
        assert asyncio.get_running_loop().time() - started < 1.5
        late = [await asyncio.open_connection(sock=peer) for peer in waiting]
        for streams in (fresh, used, *late):
            answer = await rest(streams)
            assert answer.count(b"200 OK") == 1, answer
            streams[1].close()
        assert await rest(idle) == b""
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*address)
        task.cancel()
