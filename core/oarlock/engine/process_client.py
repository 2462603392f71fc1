"""`ProcessClient`: the API process's end of an engine process.

Owns: the child process, its sockets and the folder they lie in.
Reads: `engine.wire`, `messages`.
Never: blocks the event loop; restarts a dead engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from typing import Any

import zmq

from oarlock import errors
from oarlock.backend_api import DeviceSpec
from oarlock.config.sections import EngineConfig
from oarlock.engine import wire
from oarlock.engine.client import EngineClient
from oarlock.errors import EngineDead, OarlockError
from oarlock.executor.parent import how_it_ended
from oarlock.messages import Abort, EngineRequest
from oarlock.model_summary import ModelSummary

log = logging.getLogger("oarlock.engine")
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)  # as enumerations they cost more than the call
LONGEST_FOLDER = 80  # characters of a temporary folder: the name of a Unix socket has about 105


def _socket_folder() -> str:
    """A new folder that only this user reaches (mode 0700). Raises OarlockError when there is nowhere to make one."""
    try:
        return tempfile.mkdtemp(prefix="oarlock-", dir=None if len(tempfile.gettempdir()) <= LONGEST_FOLDER else "/tmp")
    except OSError as error:
        raise OarlockError(f"no folder can be made for the engine's sockets: {error}; set TMPDIR to a folder that can be written") from None


class ProcessClient(EngineClient):
    """Create it inside a running event loop; `await ready()` before anything else."""

    def __init__(self, config: EngineConfig, summary: ModelSummary, device: DeviceSpec) -> None:
        super().__init__()
        self._folder = _socket_folder()
        self._inbox: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._outbox: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        self._outbox.setsockopt(zmq.SNDHWM, 0)
        self._outbox.bind(f"ipc://{self._folder}/in")
        self._inbox.bind(f"ipc://{self._folder}/out")
        environment = dict(os.environ)
        for key, value in device.environment:
            environment.setdefault(key, value)
        self._child = subprocess.Popen(
            [sys.executable, "-m", "oarlock.engine.process", str(os.getpid())], stdin=subprocess.PIPE, env=environment, text=True
        )
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(wire.dump_bootstrap(config, summary, device.name, device.factory, self._folder) + "\n")
            self._child.stdin.close()
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._dead: str | None = None
        self._stopping = False
        self._descriptor: int = self._inbox.fileno()
        self._loop.add_reader(self._descriptor, self._read)  # PERF: zmq.asyncio took some 20 us more for each message
        threading.Thread(target=self._watch, name="oarlock-engine-watch", daemon=True).start()

    @property
    def pid(self) -> int:
        """The engine process."""
        return self._child.pid

    async def ready(self) -> None:
        """Wait until the model is loaded and warm.

        Raises:
            OarlockError: what the engine could not honour, as it said it.
        """
        await asyncio.shield(self._ready)

    def submit(self, request: EngineRequest) -> None:
        if self._dead is not None:
            raise EngineDead(self._dead)
        self._outbox.send(wire.pack(wire.REQUEST, request), zmq.NOBLOCK)

    def abort(self, abort: Abort) -> None:
        if self._dead is None:
            self._outbox.send(wire.pack(wire.ABORT, abort), zmq.NOBLOCK)

    def reset_prefix_cache(self) -> None:
        if self._dead is None:
            self._outbox.send(wire.pack(wire.RESET), zmq.NOBLOCK)

    def is_alive(self) -> bool:
        return self._dead is None

    def shutdown(self, grace_s: float = 0.0) -> None:
        """Ask the engine to end; it is killed when it has not after the grace and two seconds more."""
        if self._stopping:
            return
        self._stopping = True
        if self._child.poll() is None:
            with contextlib.suppress(zmq.ZMQError):
                self._outbox.send(wire.pack(wire.SHUTDOWN, float(grace_s)), zmq.NOBLOCK)
            try:
                self._child.wait(grace_s + 2.0)
            except subprocess.TimeoutExpired:
                self._child.send_signal(signal.SIGKILL)
                self._child.wait()
        self._dead = self._dead or "the engine has been shut down"
        self._loop.remove_reader(self._descriptor)
        self._outbox.close(linger=0)
        self._inbox.close(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)
        self.close_feed()

    # ------------------------------------------------------------ receiving
    def _read(self) -> None:
        """Take in one message. The descriptor tells of the first of several only, so more of them are looked for soon."""
        if self._dead is not None or self._stopping:
            self._loop.remove_reader(self._descriptor)
            return
        try:
            frame = self._inbox.recv(zmq.NOBLOCK)
        except zmq.Again:
            return
        try:
            if int(self._inbox.getsockopt(_EVENTS)) & _POLLIN:
                self._loop.call_soon(self._read)
            self._take(*wire.unpack(frame))
        except Exception as error:  # without a reader nobody would ever be answered
            log.exception("what the engine said could not be taken in")
            self._child.kill()
            self._end((EngineDead.__name__, f"the front end failed at what the engine said: {type(error).__name__}: {error}"))

    def _take(self, kind: bytes, body: Any) -> None:
        if kind == wire.OUTPUTS:
            self.emit(body)
        elif kind == wire.READY:
            self.info = body
            shutil.rmtree(self._folder, ignore_errors=True)  # both ends are connected: a server that is killed leaves nothing behind
            if not self._ready.done():
                self._ready.set_result(None)
        elif kind == wire.DEAD:
            self._end(body)

    def _watch(self) -> None:
        """Runs in a thread: the kernel tells at once when the child ends, whatever ended it."""
        code = self._child.wait()
        how = how_it_ended(code)
        with contextlib.suppress(RuntimeError):  # the loop may be closed already
            self._loop.call_soon_threadsafe(self._loop.call_later, 0.2, self._end, ("EngineDead", f"the engine process ended ({how})"))

    def _end(self, error: tuple[str, str]) -> None:
        """Tell whoever waits, once."""
        if self._dead is not None or self._stopping:
            return
        self._dead = error[1]
        kind: Any = getattr(errors, error[0], OarlockError)
        if not self._ready.done():
            self._ready.set_exception(kind(error[1]) if issubclass(kind, OarlockError) else OarlockError(error[1]))
        else:  # before that, whoever waits for it says why
            log.error("the engine has ended: %s", self._dead)
        self.on_dead(self._dead)
