"""A client of the one server that `oarlock run-batch` started, over its Unix socket.

Owns: the connections.
Reads: nothing of ours.
Never: asks anybody else; understands more of HTTP than that server says to it.

Asyncio's own streams: those of httpx over a Unix socket put a traceback into the log whenever a request is cancelled.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_HEAD = 1 << 16  # bytes of the headers of an answer


class Lost(ConnectionError):
    """The server closed the connection, or says what is no answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One response; `headers` by their names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class PrivateClient:
    """As many connections as requests are open at once, each used again."""

    def __init__(self, socket: Path, key: str) -> None:
        self._socket, self._key = socket, key
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, method: str, path: str, body: bytes = b"") -> Answer:
        """Raises ConnectionError, or OSError where there is no socket."""
        reader, writer = await self._connection()
        try:
            head = f"{method} {path} HTTP/1.1\r\nHost: batch\r\nAuthorization: Bearer {self._key}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode("ascii") + body)
            await writer.drain()
            answer = await _read(reader)
        except BaseException:
            writer.close()
            raise
        if answer.headers.get("connection") == "close":
            writer.close()
        else:
            self._idle.append((reader, writer))
        return answer

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The one that was used last, as the server closes those that were not for long."""
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof():
                return reader, writer
            writer.close()
        return await asyncio.open_unix_connection(self._socket, limit=MAX_HEAD)

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()


async def _read(reader: asyncio.StreamReader) -> Answer:
    try:
        top, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return Answer(int(top.split(" ")[1]), headers, await reader.readexactly(int(headers["content-length"])))
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, LookupError) as error:
        raise Lost(f"the server's answer is not whole: {error!r}") from None
