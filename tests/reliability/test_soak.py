"""Three thousand short requests, and servers that are restarted one after the other while clients go on."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import soak
from oarlock.conformance.null_answers import answer
from real_server import RealServer
from tiny_model import make_tiny_model
from wire import Closed, Link, Message, plain

pytestmark = pytest.mark.alone


def test_three_thousand_short_requests_are_answered_rightly_in_flat_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(soak.HERE), os.environ.get("PYTHONPATH", "")])))
    monkeypatch.setattr(soak, "FLAGS", (*soak.FLAGS, "--middleware", "heap_middleware.FrozenCount"))
    with soak.soaked_server(tmp_path) as server:
        before_text = server.alive()
        run = soak.Soak(server)
        before = [soak.descriptors(pid) for pid in run.pids]
        asyncio.run(run.run(3000))
        report = run.report()
        assert report["wrong"] == [] and report["requests"] == 3000
        server.kv_idle()
        assert server.alive() == before_text
        assert [soak.descriptors(pid) for pid in run.pids] == before
        assert run.memory[-1][1] - run.memory[len(run.memory) // 2][1] < 4 << 20, run.memory
        assert report["health_ms"]["asked"] > 10 and report["health_ms"]["median"] < 100, report["health_ms"]
        # A full collection over what was imported would take the 100 ms that /health may take.
        assert int(server.http.get("/health").headers["x-frozen"]) > 50_000


def test_expected_answers_are_compared() -> None:
    path, body, expected = soak.make(1, 386)
    assert path == "/v1/completions" and expected == answer(body["prompt"], body["max_tokens"], 386)
    whole = b'{"choices":[{"index":0,"token_ids":[1,2]},{"index":1,"token_ids":[3]}]}'
    streamed = b'data: {"choices":[{"index":1,"token_ids":[3]}]}\n\ndata: {"choices":[{"index":0,"token_ids":[1,2]}]}\n\ndata: {"choices":[]}\n\ndata: [DONE]\n\n'
    assert soak.tokens_of(whole, 2) == soak.tokens_of(streamed, 2) == [[1, 2], [3]]


class Client:
    """Takes another server where one says 503 or does not take the connection; never sends again what was answered in part."""

    def __init__(self, servers: list[RealServer], vocab_size: int) -> None:
        self.servers, self.vocab_size = servers, vocab_size
        self.outcomes: Counter[str] = Counter()
        self.stop = False

    async def work(self, number: int) -> None:
        index = number * 100_000
        while not self.stop:
            await self.ask(index)
            index += 1

    async def ask(self, index: int) -> None:
        path, body, expected = soak.make(index, self.vocab_size)
        message = Message(b"POST", path.encode(), [*soak.JSON, (b"connection", b"close")], soak.json.dumps(body).encode())
        choices = body.get("n", 1)
        deadline = time.monotonic() + 30
        at = index
        while True:
            assert time.monotonic() < deadline, "no server took it"
            at += 1
            try:
                link = await Link.open(self.servers[at % len(self.servers)].port)
            except OSError:
                self.outcomes["not listening"] += 1
                await asyncio.sleep(0.02)
                continue
            try:
                found = await asyncio.wait_for(plain(link, message, random.Random(0)), 20)
            except Closed:
                self.outcomes["lost"] += 1
                return
            finally:
                link.close()
            assert found is not None
            if found.status != 503:
                break
            assert found.headers[b"retry-after"].isdigit()
            self.outcomes["503"] += 1
            await asyncio.sleep(0.02)
        right = found.status == 200 and soak.tokens_of(found.body, choices) == [expected] * choices
        self.outcomes["right" if right else f"wrong: {found}"] += 1


def test_rolling_restart_under_load_loses_nothing(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    servers = [RealServer(model, *soak.FLAGS, log=tmp_path / f"{n}.log", defaults=()) for n in range(2)]
    try:
        for server in servers:
            server.launch()
        for server in servers:
            server.wait_ready()
        client = Client(servers, soak.json.loads((model / "config.json").read_text())["vocab_size"])
        asyncio.run(_restart_each(client))
        told = dict(client.outcomes)
        assert set(told) <= {"right", "503", "not listening"}, told
        assert told["right"] > 200 and told.get("503", 0) + told.get("not listening", 0) > 0, told
    finally:
        for server in servers:
            server.http.close()
            server.kill()


async def _restart_each(client: Client) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(8):
            group.create_task(client.work(number))
        await asyncio.sleep(0.5)
        for server in client.servers:
            os.kill(server.pid, signal.SIGTERM)
            assert await asyncio.to_thread(server.wait_exit, 20) == 0
            await asyncio.sleep(0.2)
            server.launch()
            await asyncio.to_thread(server.wait_ready)
            await asyncio.sleep(0.3)
        client.stop = True
