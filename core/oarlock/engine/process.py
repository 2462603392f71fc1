"""The engine process: reads requests from a socket, steps, writes one message a step for all streams.

Owns: the process's main loop and its end.
Reads: `engine.core`, `engine.wire`, `executor`.
Never: spins when idle; outlives its parent.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import zmq

from oarlock.engine import wire
from oarlock.errors import EngineDead, OarlockError
from oarlock.executor.parent import die_with_parent, leave_signals_to_parent
from oarlock.logs import configure_logging

if TYPE_CHECKING:
    from oarlock.engine.core import EngineCore

log = logging.getLogger("oarlock.engine")
STUCK_WAIT_MS = 5  # between looks when requests wait but nothing can be scheduled
REPORT_EVERY_S = 1.0  # while requests wait and nothing is computed, the front end hears of it this often: so a stuck engine shows


class EngineProcess:
    """One core behind two sockets."""

    def __init__(self, core: EngineCore, inbox: Any, outbox: Any) -> None:
        self.core, self.inbox, self.outbox = core, inbox, outbox
        self.deadline: float | None = None  # of a shutdown with grace
        self.reported_s = 0.0  # time.monotonic() of the last message
        self.idle = zmq.Poller()
        for end in (inbox, *core.executor.idle_ends()):
            self.idle.register(end, zmq.POLLIN)

    def run(self) -> None:
        """Serve until told to stop. Raises EngineDead when the device can no longer be trusted."""
        core = self.core
        while self.deadline is None or (core.has_work() and time.monotonic() < self.deadline):
            self._receive(wait=not core.has_work())
            if not core.has_work():
                continue
            outputs = core.step()
            now = time.monotonic()
            if outputs.outputs or outputs.num_step_tokens or not core.has_work() or now - self.reported_s > REPORT_EVERY_S:
                self.reported_s = now
                self.outbox.send(wire.pack(wire.OUTPUTS, outputs))
            if not outputs.outputs and (not outputs.step_s or outputs.stats.num_running == 0):
                self.inbox.poll(STUCK_WAIT_MS)

    def _receive(self, *, wait: bool) -> None:
        """Take in everything that has arrived; block for the first message when there is nothing else to do."""
        if wait and any(end is not self.inbox for end, _ in self.idle.poll(None)):
            self.core.check_workers()  # nobody asked them anything
        while True:
            try:
                frame = self.inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(*wire.unpack(frame))

    def _take(self, kind: bytes, body: Any) -> None:
        if kind == wire.REQUEST:
            self.core.add(body)
        elif kind == wire.ABORT:
            self.core.abort(body)
        elif kind == wire.RESET:
            self.core.reset_prefix_cache()
        elif kind == wire.SHUTDOWN:
            self.deadline = time.monotonic() + body


def main() -> int:
    """Entry of `python -m oarlock.engine.process PARENT_PID`, bootstrap on standard input."""
    die_with_parent(int(sys.argv[1]))
    leave_signals_to_parent()
    config, summary, device, factory, socket = wire.load_bootstrap(sys.stdin.readline())
    configure_logging(config.observability)
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for name, end in (("in", inbox), ("out", outbox)):
        end.setsockopt(zmq.RCVHWM if end is inbox else zmq.SNDHWM, 0)
        end.connect(f"ipc://{socket}/{name}")
    executor = None
    try:
        from oarlock.engine.core import EngineCore
        from oarlock.executor import make_executor

        executor = make_executor(config, summary, device, factory)
        core = EngineCore(config, summary, executor)
        gc.collect()
        gc.freeze()  # PERF: what is there by now stays, and would be looked through again and again
        outbox.send(wire.pack(wire.READY, core.info))
        EngineProcess(core, inbox, outbox).run()
        code = 0
    except OarlockError as error:
        outbox.send(wire.pack(wire.DEAD, (type(error).__name__, str(error))))
        code = 1
    except Exception as error:
        log.exception("the engine failed")
        outbox.send(wire.pack(wire.DEAD, (EngineDead.__name__, f"{type(error).__name__}: {error}")))
        code = 1
    finally:
        if executor is not None:
            executor.shutdown()
    context.destroy(linger=2000)
    return code


if __name__ == "__main__":
    exit_code = main()
    sys.stderr.flush()
    os._exit(exit_code)  # threads of libraries must not hold a finished engine
