"""A worker in a process of its own: `python -m oarlock.executor.worker_process FD PARENT_PID`, bootstrap as the first message.

Owns: this process's loop.
Reads: `executor.codec`, `executor.frames`; the worker by dotted path.
Never: outlives its parent; answers out of order.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import select
import socket
import sys
import threading
from collections import deque
from queue import SimpleQueue
from typing import Any

from oarlock.config.resolve import from_dict
from oarlock.errors import OarlockError, WorkerError
from oarlock.executor import frames
from oarlock.executor.base import WORKER
from oarlock.executor.codec import decode, encode
from oarlock.executor.parent import die_with_parent, leave_signals_to_parent
from oarlock.logs import configure_logging
from oarlock.model_summary import ModelSummary

log = logging.getLogger("oarlock.worker")


def _worker(bootstrap: dict[str, Any]) -> Any:
    config = from_dict(bootstrap["config"])
    configure_logging(config.observability)
    summary = ModelSummary.from_dict(bootstrap["summary"])
    module, _, name = WORKER.partition(":")
    cls = getattr(importlib.import_module(module), name)
    return cls(config, summary, bootstrap["device"], bootstrap["factory"], bootstrap["rank"], bootstrap["size"], bootstrap["rendezvous"])


class WorkerLoop:
    """Answers every message once, in order. Steps may be launched ahead of being read, as deep as the engine sends them.

    A thread writes the answers: the engine may be writing a long message itself, and two ends that both write wait for ever.
    """

    def __init__(self, end: socket.socket, worker: Any, rank: int, size: int = 1) -> None:
        self.end, self.worker, self.rank, self.size = end, worker, rank, size
        self.is_halted = False  # a step failed here, and perhaps not on other ranks: run no more before the engine has checked all
        self.launched: deque[Any] = deque()
        self.answers: SimpleQueue[tuple[bytes, bytes]] = SimpleQueue()
        threading.Thread(target=self._write, name="oarlock-answers", daemon=True).start()

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the engine is gone, as the reading end will see
            while True:
                frames.send(self.end, *self.answers.get())

    def run(self) -> None:
        while True:
            # With steps launched, look for more to launch before waiting for the oldest.
            if self.launched and not select.select([self.end], [], [], 0)[0]:
                self._finish(self.launched.popleft())
                continue
            kind, body = frames.receive(self.end)
            if kind == frames.EXECUTE:
                self.launched.append(self._launch(decode(body)))
                continue
            while self.launched:
                self._finish(self.launched.popleft())
            if kind == frames.CLOSE:
                self.worker.close()
                return
            self._answer(self._try(*self._call(kind, body)))

    def _launch(self, out: Any) -> Any:
        """Run a step. After one that failed among several ranks the next would meet the failed step's collectives of the others."""
        if self.is_halted:
            return WorkerError(f"step {out.step_id} was not run, as the step before it failed on rank {self.rank}")
        launched = self._try(self.worker.execute, out)
        self.is_halted = self.size > 1 and isinstance(launched, Exception)
        return launched

    def _call(self, kind: bytes, body: bytes) -> tuple[Any, ...]:
        self.is_halted = False
        if kind == frames.START:
            return self.worker.start, *decode(body)
        return (getattr(self.worker, {frames.PREPARE: "prepare", frames.LOAD: "load", frames.MEASURE: "measure", frames.CANARY: "canary"}[kind]),)

    def _try(self, call: Any, *args: Any) -> Any:
        try:
            return call(*args)
        except Exception as error:
            if not isinstance(error, OarlockError):  # those say in words what is wrong, and the engine says it once for all ranks
                log.error("rank %d: %s: %s", self.rank, type(error).__name__, error, exc_info=error)
            return error

    def _finish(self, launched: Any) -> None:
        result = launched if isinstance(launched, Exception) else self._try(self.worker.read, launched)
        self._answer(result if isinstance(result, Exception) or self.rank == 0 else None)

    def _answer(self, result: Any) -> None:
        if isinstance(result, Exception):
            self.answers.put((frames.ERROR, encode((type(result).__name__, str(result)))))
        else:
            self.answers.put((frames.OK, encode(result)))


def main() -> int:
    die_with_parent(int(sys.argv[2]))
    leave_signals_to_parent()
    end = socket.socket(fileno=int(sys.argv[1]))
    _, body = frames.receive(end)
    bootstrap = json.loads(body)
    try:
        worker = _worker(bootstrap)
    except Exception as error:  # noqa: BLE001  the engine is told whatever it was
        frames.send(end, frames.ERROR, encode((type(error).__name__, str(error))))
        return 1
    frames.send(end, frames.OK, encode(None))
    try:
        WorkerLoop(end, worker, bootstrap["rank"], bootstrap["size"]).run()
    except (EOFError, OSError):
        return 1  # the engine is gone
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
