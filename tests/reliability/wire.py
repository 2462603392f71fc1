"""Ways to put a request on a socket, from the usual to the hostile, and a reader of what comes back.

Owns: one connection, and the ways.
Never: judges an answer.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Self


class Closed(Exception):
    """The server ended the connection before an answer was whole."""


class NoHttp(Exception):
    """What came is no HTTP/1.1 response."""


@dataclass(slots=True)
class Answer:
    """One response, read whole."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


@dataclass(slots=True)
class Message:
    """One request as it is to be sent."""

    method: bytes
    target: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes

    def head(self, *more: bytes, length: int | None = None, version: bytes = b"HTTP/1.1") -> bytes:
        lines = [b"%b %b %b" % (self.method, self.target, version), b"host: x", *(b"%b: %b" % pair for pair in self.headers)]
        if length is not None:
            lines.append(b"content-length: %d" % length)
        return b"\r\n".join([*lines, *more]) + b"\r\n\r\n"

    def whole(self) -> bytes:
        return self.head(length=len(self.body)) + self.body


class Link:
    """One connection. `spent`: not to be used again."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer, self.spent = reader, writer, False

    @classmethod
    async def open(cls, port: int) -> Self:
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 20))

    def close(self) -> None:
        self.spent = True
        self.writer.transport.abort()

    async def send(self, data: bytes) -> None:
        """Errors show when the answer is read."""
        try:
            self.writer.write(data)
            await self.writer.drain()
        except ConnectionError:
            pass

    def end(self) -> None:
        """Nothing more will be sent."""
        self.spent = True
        try:
            self.writer.write_eof()
        except OSError:
            pass

    async def answer(self, method: bytes = b"POST") -> Answer:
        """The next response. Raises Closed, NoHttp."""
        try:
            while True:
                top, *lines = (await self.reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
                version, status, _ = (*top.split(b" ", 2), b"")[:3]
                if version != b"HTTP/1.1" or not status.isdigit():
                    raise NoHttp(top[:80])
                if int(status) >= 200:
                    break
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
            if headers.get(b"connection", b"").lower() == b"close":
                self.spent = True
            body = b"" if method == b"HEAD" or int(status) in (204, 304) else await self._body(headers)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            self.spent = True
            raise Closed from error
        except (asyncio.LimitOverrunError, ValueError) as error:
            raise NoHttp(repr(error)) from None
        return Answer(int(status), headers, body)

    async def _body(self, headers: dict[bytes, bytes]) -> bytes:
        if b"content-length" in headers:
            return await self.reader.readexactly(int(headers[b"content-length"]))
        if headers.get(b"transfer-encoding") != b"chunked":
            self.spent = True
            return await self.reader.read(-1)
        pieces = []
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            pieces.append((await self.reader.readexactly(size + 2))[:-2])
        await self.reader.readexactly(2)
        return b"".join(pieces)


Way = Callable[[Link, Message, random.Random], Awaitable[Answer | None]]  # None: no answer was waited for


def _cuts(data: bytes, rng: random.Random, pieces: int) -> list[bytes]:
    at = sorted(rng.randrange(len(data) + 1) for _ in range(pieces - 1))
    return [data[start:end] for start, end in zip([0, *at], [*at, len(data)], strict=True)]


def _chunk(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


async def plain(link: Link, message: Message, rng: random.Random) -> Answer | None:
    await link.send(message.whole())
    return await link.answer(message.method)


async def chunked(link: Link, message: Message, rng: random.Random) -> Answer | None:
    """The body in chunks, some with extensions, some with a trailer."""
    pieces = [piece for piece in _cuts(message.body, rng, rng.choice((1, 2, 7, 60))) if piece]
    extension = rng.choice((b"", b"", b";a=b"))
    sent = b"".join(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces) + b"0\r\n" + rng.choice((b"", b"", b"x-trailer: y\r\n")) + b"\r\n"
    await link.send(message.head(b"transfer-encoding: chunked") + sent)
    return await link.answer(message.method)


async def slow(link: Link, message: Message, rng: random.Random) -> Answer | None:
    """Head and body in pieces, with pauses between them."""
    for piece in _cuts(message.whole(), rng, rng.choice((2, 3, 6))):
        await link.send(piece)
        await asyncio.sleep(rng.random() * 0.1)
    return await link.answer(message.method)


async def half_closed(link: Link, message: Message, rng: random.Random) -> Answer | None:
    """The whole request, then the end of the sender's half."""
    await link.send(message.whole())
    link.end()
    return await link.answer(message.method)


async def half_closed_body(link: Link, message: Message, rng: random.Random) -> Answer | None:
    """A part of the body, then the end of the sender's half."""
    data = message.whole() if rng.random() < 0.5 else message.head(b"transfer-encoding: chunked") + _chunk(message.body or b"{")
    await link.send(data[: rng.randrange(len(data))])
    link.end()
    return await link.answer(message.method)


async def hang_up(link: Link, message: Message, rng: random.Random) -> Answer | None:
    """All or a part of it, and then nobody is there."""
    data = message.whole()
    await link.send(data if rng.random() < 0.6 else data[: rng.randrange(len(data))])
    await asyncio.sleep(rng.choice((0.0, 0.0, 0.002, 0.02)))
    link.close()
    return None


async def leave_in_the_answer(link: Link, message: Message, rng: random.Random) -> Answer | None:
    await link.send(message.whole())
    try:
        await asyncio.wait_for(link.reader.read(rng.choice((1, 50, 300))), 10)
    except ConnectionError:
        pass
    link.close()
    return None


async def many_headers(link: Link, message: Message, rng: random.Random) -> Answer | None:
    count, size = rng.choice(((10, 10), (200, 20), (3000, 10), (5, 15_000), (1, 60_000), (1, 200_000), (40_000, 1)))
    message.headers += [(b"x-%d" % at, b"y" * size) for at in range(count)]
    await link.send(message.whole())
    return await link.answer(message.method)


async def odd_headers(link: Link, message: Message, rng: random.Random) -> Answer | None:
    """Headers that another end may read otherwise. What follows on this connection is nobody's."""
    odd = (
        b"transfer-encoding: chunked", b"transfer-encoding: gzip, chunked", b"transfer-encoding : chunked", b"content-length: -1", b"content-length: 5, 5", b"content-length: 1e3",
        b"content-length: 99999999999999999999", b"content-length: 0x10", b"x:\x00y", b"x: \xff\xfe", b": y", b"x y: z", b" folded", b"host: y", b"expect: 100-continue", b"expect: 200-ok",
        b"connection: close", b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: x\r\nsec-websocket-version: 13", b"upgrade: h2c\r\nconnection: upgrade", b"content-encoding: gzip",
        b"accept: x/y", b"x-request-id: " + b"a" * 500, b"x-request-id: a\x01b", b"authorization: Bearer " + b"\xff" * 40, b"content-type: text/plain", b"content-type: application/json;" + b"a" * 2000,
        b"x-forwarded-for: 1.2.3.4", b"cookie: a=b", b"range: bytes=0-1", b"transfer-encoding: identity",
    )  # fmt: skip
    await link.send(message.head(rng.choice(odd), length=len(message.body)) + message.body)
    link.end()
    return await link.answer(message.method)


async def wrong_length(link: Link, message: Message, rng: random.Random) -> Answer | None:
    await link.send(message.head(length=max(0, len(message.body) + rng.choice((-20, -1, 1, 1000, 1 << 26)))) + message.body)
    await asyncio.sleep(0.01)
    link.end()
    return await link.answer(message.method)


async def no_http(link: Link, message: Message, rng: random.Random) -> Answer | None:
    lines = (
        b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\r\n\r\n\r\n", b"GET  /  HTTP/1.1\r\n\r\n", b"G\x00T / HTTP/1.1\r\n\r\n",
        message.head(b"transfer-encoding: chunked") + b"zz\r\nxx\r\n", message.head(b"transfer-encoding: chunked") + b"ffffffffffffffffff\r\n", message.head(b"transfer-encoding: chunked") + b"-1\r\n",
        message.head(length=0, version=b"HTTP/1.0"), message.head(length=0, version=b"HTTP/0.9"), rng.randbytes(300), b"POST http://other.example/v1/models HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /" + b"a" * 80_000 + b" HTTP/1.1\r\n\r\n", b"CONNECT x:1 HTTP/1.1\r\n\r\n",
    )  # fmt: skip
    await link.send(rng.choice(lines))
    link.end()
    return await link.answer(message.method)


async def pipelined(link: Link, message: Message, rng: random.Random) -> Answer | None:
    """Two at once, the second of which the first must not disturb."""
    await link.send(message.whole() + message.whole())
    first = await link.answer(message.method)
    return first if link.spent else await link.answer(message.method)


async def slow_reader(link: Link, message: Message, rng: random.Random) -> Answer | None:
    link.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await link.send(message.whole())
    await asyncio.sleep(rng.random() * 0.2)
    link.writer.transport.resume_reading()  # type: ignore[attr-defined]
    return await link.answer(message.method)


WAYS: tuple[tuple[int, Way], ...] = (
    (72, plain), (6, chunked), (3, slow), (1, half_closed), (2, half_closed_body), (3, hang_up), (2, leave_in_the_answer), (1, many_headers), (3, odd_headers), (2, wrong_length), (1, no_http),
    (2, pipelined), (2, slow_reader),
)  # fmt: skip
