"""The client of `oarlock run-batch`, against a server of a few lines on a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from oarlock_batches.command import _answer_all
from oarlock_batches.private import Lost, PrivateClient

pytestmark = pytest.mark.asyncio
REQUEST = {"custom_id": "r", "method": "POST", "url": "/v1/completions", "body": {}}
WHOLE = b"HTTP/1.1 200 OK\r\nX-Request-Id: x\r\nContent-Length: 2\r\n\r\n{}"


@contextlib.asynccontextmanager
async def serving(folder: Path, answer: Callable[[int], bytes]) -> AsyncIterator[tuple[PrivateClient, list[int]]]:
    """(a client, the requests of each connection). `answer(n)` of the nth request; all but WHOLE closes the connection after it."""
    counts: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        own = len(counts)
        counts.append(0)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError), contextlib.closing(writer):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
                counts[own] += 1
                await asyncio.sleep(0.001 * (own % 3))
                writer.write(said := answer(sum(counts)))
                await writer.drain()
                if said != WHOLE:
                    return

    async with await asyncio.start_unix_server(serve, folder / "socket"):
        with contextlib.closing(PrivateClient(folder / "socket", "key")) as client:
            yield client, counts


async def test_a_batch_that_ends_early_leaves_no_word_of_its_open_requests(tmp_path: Path) -> None:
    """Nor in the log: httpx over a Unix socket says "Exception in callback Future.set_result" for a request that is cancelled."""

    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            if self.tell() > 3000:
                raise OSError(28, "No space left on device")
            return super().write(data)

    said: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
    lines = b"".join(json.dumps(REQUEST).encode() + b"\n" for _ in range(300))
    for _ in range(5):
        async with serving(tmp_path, lambda _: WHOLE) as (client, _counts):
            with pytest.raises(OSError, match="No space left"):
                await _answer_all(client, io.BytesIO(lines), Full(), 64)
            await asyncio.sleep(0.01)
    assert not said


async def test_connections_are_used_again_and_a_closed_one_is_not(tmp_path: Path) -> None:
    async with serving(tmp_path, lambda at: WHOLE.replace(b"X-", b"Connection: close\r\nX-") if at == 3 else WHOLE) as (client, counts):
        for _ in range(5):
            assert (await client.ask("POST", "/", b"{}")).json() == {}
        assert counts == [3, 2]


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n"])
async def test_an_answer_that_is_not_whole_is_a_lost_server(tmp_path: Path, said: bytes) -> None:
    async with serving(tmp_path, lambda _: said) as (client, _):
        with pytest.raises(Lost, match="not whole"):
            await client.ask("POST", "/", b"{}")
