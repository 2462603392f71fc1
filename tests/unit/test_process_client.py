"""Both ends of the sockets between API process and engine process: the client with a child that does nothing, the loop with a core that does."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from oarlock.backend_api import DeviceSpec, ProbeResult
from oarlock.config.sections import EngineConfig, ModelConfig
from oarlock.engine import process_client, wire
from oarlock.engine.process import EngineProcess
from oarlock.engine.process_client import ProcessClient
from oarlock.errors import ConfigError, EngineDead
from oarlock.messages import EngineOutput, EngineOutputs, EngineRequest, SchedulerStats
from oarlock.sampling_params import SamplingParams
from toy_frontend import SUMMARY, info

DEVICE = DeviceSpec("toy", lambda: ProbeResult("available", "a toy"), "toy:Toy", "toy")
OUTPUTS = EngineOutputs((EngineOutput("a", new_token_ids=(1,)),), SchedulerStats())


class Served:
    """A client, what it was told, and the engine's end of its sockets."""

    def __init__(self, client: ProcessClient, engine: Any) -> None:
        self.client, self.engine = client, engine
        self.deaths: asyncio.Queue[str] = asyncio.Queue()
        self.outputs: asyncio.Queue[EngineOutputs] = asyncio.Queue()
        client.on_dead, client.on_outputs = self.deaths.put_nowait, self.outputs.put_nowait

    async def death(self) -> str:
        return await asyncio.wait_for(self.deaths.get(), 5)


@pytest.fixture
def served(monkeypatch):
    real = subprocess.Popen

    @asynccontextmanager
    async def start() -> AsyncIterator[Served]:
        client = ProcessClient(EngineConfig(ModelConfig("m")), SUMMARY, DEVICE)
        engine = zmq.Context.instance().socket(zmq.PUSH)
        engine.connect(f"ipc://{client._folder}/out")
        try:
            yield Served(client, engine)
        finally:
            client._child.kill()
            client.shutdown()
            engine.close(linger=0)

    monkeypatch.setattr(
        process_client.subprocess, "Popen", lambda _, **how: real([sys.executable, "-S", "-c", "import time; time.sleep(60)"], **how)
    )
    return start


def test_engine_that_is_ready_is_heard(served):
    async def run() -> None:
        async with served() as s:
            s.engine.send(wire.pack(wire.READY, info(vocab_size=77)))
            await asyncio.wait_for(s.client.ready(), 5)
            assert s.client.info.vocab_size == 77
            s.engine.send(wire.pack(wire.OUTPUTS, OUTPUTS))
            assert await asyncio.wait_for(s.outputs.get(), 5) == OUTPUTS

    asyncio.run(run())


def test_messages_that_come_together_are_all_taken_in_order_and_none_after_the_end(served):
    async def run() -> None:
        async with served() as s:
            told = [EngineOutputs((EngineOutput("a", new_token_ids=(n,)),), SchedulerStats()) for n in range(50)]
            for outputs in told:
                s.engine.send(wire.pack(wire.OUTPUTS, outputs))
            assert [await asyncio.wait_for(s.outputs.get(), 5) for _ in told] == told
            for frame in (wire.pack(wire.DEAD, ("EngineDead", "over")), *[wire.pack(wire.OUTPUTS, OUTPUTS)] * 3):
                s.engine.send(frame)
            s.client._ready.add_done_callback(lambda ready: ready.exception())
            assert await s.death() == "over"
            before = time.process_time()
            await asyncio.sleep(0.3)
            assert s.outputs.empty() and time.process_time() - before < 0.1  # what is unread is not looked at again and again

    asyncio.run(run())


def test_engine_that_cannot_start_says_why_in_its_own_kind_of_error(served):
    async def run() -> None:
        async with served() as s:
            s.engine.send(wire.pack(wire.DEAD, ("ConfigError", "--block-size 3: no")))
            with pytest.raises(ConfigError, match="--block-size 3: no"):
                await asyncio.wait_for(s.client.ready(), 5)
            assert await s.death() == "--block-size 3: no"

    asyncio.run(run())


def test_killed_engine_is_noticed_and_takes_no_more(served):
    async def run() -> None:
        async with served() as s:
            s.client._child.kill()
            assert "signal 9" in await s.death()
            assert not s.client.is_alive()
            with pytest.raises(EngineDead):
                s.client.submit(EngineRequest("a", (1,), SamplingParams()))
            with pytest.raises(EngineDead):
                await s.client.ready()

    asyncio.run(run())


@pytest.mark.parametrize("frame", [wire.pack(wire.OUTPUTS, OUTPUTS), b"Onot msgpack"])
def test_what_cannot_be_taken_in_ends_the_engine_instead_of_leaving_everybody_without_an_answer(served, frame):
    async def run() -> None:
        async with served() as s:

            def fail(outputs: EngineOutputs) -> None:
                raise ValueError("a defect of the front end")

            s.client.on_outputs = fail
            s.engine.send(frame)
            assert "the front end failed at what the engine said" in await s.death()
            assert s.client._child.wait(5) == -9

    asyncio.run(run())


# ---------------------------------------------------------------- the engine's end
class IdleCore:
    """Nothing to do; its one worker is `end`."""

    def __init__(self, end: socket.socket) -> None:
        self.executor = SimpleNamespace(idle_ends=lambda: (end.fileno(),))
        self.resets = 0

    def has_work(self) -> bool:
        return False

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def check_workers(self) -> None:
        raise EngineDead("a worker died: rank 0 is gone")


def test_idle_engine_takes_messages_and_hears_of_a_worker_that_is_gone():
    ours, theirs = socket.socketpair()
    inbox, sender = (zmq.Context.instance().socket(kind) for kind in (zmq.PULL, zmq.PUSH))
    inbox.bind("inproc://idle-engine")
    sender.connect("inproc://idle-engine")
    core: Any = IdleCore(ours)
    process = EngineProcess(core, inbox, None)
    sender.send(wire.pack(wire.RESET))
    process._receive(wait=True)
    assert core.resets == 1
    theirs.close()
    with pytest.raises(EngineDead, match="rank 0 is gone"):
        process.run()
    for end in (inbox, sender, ours):
        end.close()
